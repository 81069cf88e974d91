"""Plans with little host memory, and the advice of errors, on simulated machines."""

import re
from dataclasses import replace

import pytest

from tests.support.models.model_sizes import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_1_8B, LONG, STREAMED_13B
from triforce_tree.config import HierarchyConfig
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, Machine, Sizes
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan, plan

# With a desktop running 23 of 24 GiB are free; PCIe 4.
RTX_4090 = Machine(23 * GIB, 0, 25e9, 1e12, limit="NVIDIA GeForce RTX 4090")
LLAMA_3_2_1B = int(2.6e9)


def on_4090(
    sizes: Sizes, host: float, prompt: int = LONG, given: dict[str, object] | None = None, new: int = 256
) -> MemoryPlan:
    config = HierarchyConfig.from_options(**{"offload": True, **(given or {})})
    return plan(sizes, replace(RTX_4090, host=int(host * GIB)), config, given or (), Workload(1, prompt, new))


def test_a_7b_at_120k_runs_with_64_gb_of_host_memory() -> None:
    """59.6 GiB, of which 6 are reserved for the system; the full KV cache takes 60."""
    made = on_4090(LLAMA_2_7B, 53.6)
    assert made.fits
    assert made.levels == 3
    assert made.peak <= 23 * GIB
    assert made.host_bytes <= 53.6 * GIB
    assert made.device["resident KV"] + made.host["KV"] >= 32 * LLAMA_2_7B.row * (LONG + 256)
    assert made.pass_seconds == pytest.approx(made.host["KV"] / 25e9)
    # With more new tokens too.
    assert on_4090(LLAMA_2_7B, 53.6, new=1024).levels == 3


def test_an_8b_at_120k_keeps_fine_chunks() -> None:
    made = on_4090(replace(LLAMA_3_1_8B, draft=LLAMA_3_2_1B), 53.6)
    assert (made.levels, made.config.retrieval.budget, made.config.retrieval.chunk) == (3, 4096, 8)
    assert 0.5 < made.pass_seconds < 0.7


def test_less_host_memory_means_a_coarser_then_smaller_retrieval_cache_then_none() -> None:
    plans = [on_4090(LLAMA_2_7B, host) for host in (64, 58, 56, 55, 54.2, 53.6, 53.1, 52.2)]
    assert all(made.fits for made in plans)
    host = [made.host_bytes for made in plans]
    assert host == sorted(host, reverse=True)
    chosen = [made.config.retrieval for made in plans if made.levels == 3]
    fine = [c.budget / c.chunk for c in chosen]
    assert fine == sorted(fine, reverse=True)
    assert [made.levels for made in plans] == [3] * 7 + [2]


def test_given_retrieval_options_keep_three_levels() -> None:
    assert on_4090(LLAMA_2_7B, 52.2).levels == 2
    for name, value in (("budget", 1024), ("chunk", 64), ("gamma", 20), ("levels", 3)):
        with pytest.raises(DoesNotFitError):
            on_4090(LLAMA_2_7B, 52.2, given={name: value})


def test_a_resident_last_layer_saves_prefill_memory() -> None:
    made = on_4090(LLAMA_2_7B, 53.6)
    assert made.offload is not None
    assert made.offload.last_resident
    assert made.offload.resident_bytes >= made.layer_bytes
    # No extra memory is planned for a layer's keys and values, or for hidden states.
    assert made.device["prefill"] < 0.4 * GIB
    assert "hidden states of prefill" not in made.host
    # If the retrieval cache is too small for the hidden states, they are kept on the host.
    small = on_4090(LLAMA_2_7B, 55, given={"budget": 1024, "chunk": 64})
    assert small.offload is not None
    assert small.offload.states_on_host == ("hidden states of prefill" in small.host)


def test_a_smaller_plan_never_exceeds_host_memory() -> None:
    made: MemoryPlan | None = on_4090(LLAMA_2_7B, 53.6)
    changes = []
    while made is not None:
        assert made.host_bytes <= made.machine.host
        step = made.smaller()
        made = step[0] if step else None
        changes += [step[1].split()[0]] if step else []
    assert list(dict.fromkeys(changes)) == ["ring", "budget"]


def refusal(
    sizes: Sizes, machine: Machine, given: dict[str, object] | None = None, batch: int = 1, prompt: int = LONG
) -> str:
    config = HierarchyConfig.from_options(**{"offload": True, **(given or {})})
    with pytest.raises(DoesNotFitError) as caught:
        plan(sizes, machine, config, given or (), Workload(batch, prompt, 256))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def machine(device: float, host: float, most_device: float = 0, most_host: float = 0) -> Machine:
    sizes = [int(size * GIB) for size in (device, host, most_device, most_host)]
    return Machine(
        sizes[0], sizes[1], 25e9, 1e12, 0, "gpu_memory" if most_device else "RTX 4090",
        "host_memory" if most_host else "the machine", sizes[2], sizes[3],
    )  # fmt: skip


def test_the_error_lists_the_uses_of_host_memory() -> None:
    message = refusal(LLAMA_2_7B, machine(23, 32))
    found = re.match(
        r"a prompt of 122880 tokens needs at least 5\d\.\d GiB of host memory \(KV 5\d\.\d GiB.*\), "
        r"but the machine leaves 32\.0 GiB; shorten the prompt to at most (\d+) tokens$",
        message,
    )
    assert found, message
    longest = int(found[1])
    assert on_4090(LLAMA_2_7B, 32, longest).fits
    with pytest.raises(DoesNotFitError):
        on_4090(LLAMA_2_7B, 32, longest + 1024)
    assert "weights 23.6 GiB" in refusal(STREAMED_13B, machine(24, 90))


def test_more_memory_is_advised_only_if_the_machine_has_it() -> None:
    short = machine(8, 512, most_device=23)
    message = refusal(LLAMA_2_7B, short)
    found = re.search(
        r'gpu_memory has 8.0 GiB; allow more of the device \(gpu_memory="(\d+)GiB"\), or', message
    )
    assert found, message
    config = HierarchyConfig.from_options(offload=True)
    enough = int(found[1]) * GIB
    assert plan(LLAMA_2_7B, replace(short, device=enough), config, (), Workload(1, LONG, 256)).fits
    with pytest.raises(DoesNotFitError):
        plan(LLAMA_2_7B, replace(short, device=enough - GIB), config, (), Workload(1, LONG, 256))
    assert "gpu_memory" not in refusal(LLAMA_2_7B, machine(8, 512))
    message = refusal(LLAMA_2_7B, machine(23, 32, most_host=60))
    assert 'host_memory leaves 32.0 GiB; allow more host memory (host_memory="53GiB"), or shorten' in message
    assert "host_memory=" not in refusal(LLAMA_2_7B, machine(23, 32, most_host=48))
    two = replace(machine(23, 32, most_host=60), ranks=2)
    assert 'host_memory="106GiB"' in refusal(LLAMA_2_7B, two)


def test_weights_on_the_host_are_advised_if_they_fit_there() -> None:
    message = refusal(LLAMA_2_13B, machine(24, 512))
    assert "weights 24.2 GiB" in message
    assert message.endswith("; keep the weights on the host too (offload_weights=True)")
    assert planned_with_streamed_weights(64, LONG // 3).fits
    message = refusal(LLAMA_2_13B, machine(24, 64))
    found = re.search(r"; keep the weights .*, and shorten the prompt to at most (\d+) tokens$", message)
    assert found, message
    assert planned_with_streamed_weights(64, int(found[1])).fits
    assert refusal(LLAMA_2_13B, machine(24, 16)).endswith(
        "use a smaller model, or a machine with more memory"
    )


def planned_with_streamed_weights(host: int, prompt: int) -> MemoryPlan:
    config = HierarchyConfig.from_options(offload=True)
    return plan(STREAMED_13B, machine(24, host), config, (), Workload(1, prompt, 256))


def test_given_options_that_prevent_a_plan_are_named() -> None:
    message = refusal(LLAMA_2_7B, machine(23, 53.6), {"budget": 4096, "chunk": 8})
    assert "; leave out budget=4096 and chunk=8, or shorten the prompt to at most" in message
    assert "; leave out chunk=8, or" in refusal(LLAMA_2_7B, machine(23, 54.5), {"chunk": 8})
    message = refusal(LLAMA_2_7B, machine(23, 52.2), {"levels": 3})
    assert message.endswith("or set levels=2")


def test_fewer_sequences_are_advised_for_a_batch() -> None:
    message = refusal(LLAMA_3_1_8B, machine(23, 40), batch=8, prompt=65_536)
    assert message.startswith("a batch of 8 sequences, the longest prompt of 65536 tokens, needs")
    found = re.search(r"take at most (\d) of the 8 sequences at once", message)
    assert found, message
    config = HierarchyConfig.from_options(offload=True)
    assert plan(LLAMA_3_1_8B, machine(23, 40), config, (), Workload(int(found[1]), 65_536, 256)).fits
