"""Memory plans for models of 7, 8 and 13 billion weights with several amounts of device memory."""

from dataclasses import replace

import pytest

from tests.support.models.families import perturbed, tiny
from tests.support.models.model_sizes import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_1_8B, LONG, STREAMED_13B
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.memory_size import bytes_of
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, Machine, Sizes, WindowedLayers, weights_fit
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan, plan

LONGER = 524_288
H200_BUS = 55e9


def planned(
    sizes: Sizes,
    cap: float,
    context: int,
    given: dict[str, object] | None = None,
    host: float = 512,
    others: int = 0,
    batch: int = 1,
) -> MemoryPlan:
    options = {"offload": True, **(given or {})}
    machine = Machine(int(cap * GIB), int(host * GIB), H200_BUS, 4.4e12, others)
    config = HierarchyConfig.from_options(**options)
    return plan(sizes, machine, config, given or (), Workload(batch, context, 256))


FITTING = [
    (LLAMA_2_7B, 24, LONG),
    (LLAMA_2_7B, 48, LONG),
    (LLAMA_2_7B, 80, LONG),
    (LLAMA_2_7B, 48, LONGER),
    (LLAMA_3_1_8B, 24, LONG),
    (LLAMA_3_1_8B, 24, LONGER),
    (LLAMA_3_1_8B, 48, LONGER),
    (LLAMA_2_13B, 48, LONG),
    (STREAMED_13B, 24, LONG),
    (STREAMED_13B, 16, LONG),
]


@pytest.mark.parametrize(("sizes", "cap", "context"), FITTING)
def test_the_uses_add_up_to_the_device_memory(sizes: Sizes, cap: float, context: int) -> None:
    made = planned(sizes, cap, context)
    assert sum(made.device.values()) == int(cap * GIB)
    assert made.device["free"] >= 0.01 * cap * GIB
    assert made.peak <= cap * GIB
    assert made.offload is not None
    # Both parts together are the full KV cache, up to rounding to a unit.
    full = sizes.layers * sizes.row * (context + 256)
    split = made.device["resident KV"] + made.host["KV"]
    assert full <= split <= full + 64 * sizes.layers * sizes.row
    assert made.offload.resident_bytes == made.device["resident KV"]
    # Less than one piece is left unused.
    assert made.device["free"] <= 0.02 * cap * GIB + made.offload.piece_bytes or made.host["KV"] == 0


def test_a_7b_at_128k_on_24_gib_gets_fine_chunks_and_a_large_gamma() -> None:
    made = planned(LLAMA_2_7B, 24, LONG)
    assert made.levels == 3
    assert (made.config.retrieval.budget, made.config.retrieval.chunk) == (4096, 8)
    assert 27 <= made.config.gamma <= 50
    assert made.config.tree == "best-first:8,6,4"
    assert 50 * GIB < made.host["KV"] < 61 * GIB
    assert made.pass_seconds == pytest.approx(made.host["KV"] / H200_BUS)


def test_more_memory_means_more_resident_slots_and_a_smaller_gamma() -> None:
    plans = [planned(LLAMA_2_7B, cap, LONG) for cap in (24, 48, 64, 80, 96)]
    resident = [made.device["resident KV"] for made in plans]
    assert resident == sorted(resident)
    assert plans[-1].host["KV"] == 0
    gammas = [made.config.gamma for made in plans]
    assert gammas == sorted(gammas, reverse=True)
    assert gammas[-1] < gammas[0]


def test_given_options_are_not_changed() -> None:
    given = {"budget": 2048, "chunk": 32, "gamma": 20, "tree": "chain:4", "prefill_chunk": 512}
    made = planned(LLAMA_2_7B, 24, LONG, given)
    own = made.config.as_options()
    assert {name: own[name] for name in given} == given
    assert planned(LLAMA_2_7B, 24, LONG, {"levels": 1}).device["chunk means"] == 0
    odd = planned(LLAMA_2_7B, 24, LONG, {"budget": 3 * 7 * 64, "chunk": 21})
    assert odd.config.retrieval.chunk == 21


def test_little_memory_puts_hidden_states_on_the_host_and_makes_chunks_coarser() -> None:
    roomy, short = planned(LLAMA_3_1_8B, 48, LONGER), planned(LLAMA_3_1_8B, 22, LONGER)
    assert roomy.offload is not None
    assert short.offload is not None
    assert not roomy.offload.states_on_host
    assert short.offload.states_on_host
    assert short.host["hidden states of prefill"] == LONGER * 4096 * 2
    assert short.config.retrieval.chunk > roomy.config.retrieval.chunk
    assert planned(LLAMA_2_7B, 17, LONG).offload is not None


def test_other_tensors_and_batches_reduce_the_resident_slots() -> None:
    alone = planned(LLAMA_2_7B, 48, LONG)
    with_others = planned(LLAMA_2_7B, 48, LONG, others=8 * GIB)
    assert 7 * GIB < alone.device["resident KV"] - with_others.device["resident KV"] < 9 * GIB
    two = planned(LLAMA_2_7B, 48, LONG // 2, batch=2)
    assert two.host["KV"] == pytest.approx(alone.host["KV"], rel=0.3)


def test_auto_stays_on_the_device_if_everything_fits() -> None:
    machine = Machine(80 * GIB, 512 * GIB, H200_BUS, 4.4e12)
    config = HierarchyConfig.from_options(offload="auto")
    small = plan(LLAMA_3_1_8B, machine, config, (), Workload(1, LONG, 256))
    assert small.offload is None
    assert small.host_bytes == 0
    assert sum(small.device.values()) == machine.device
    assert small.config == replace(config, retrieval_weight_bits=16)
    smaller = Machine(72 * GIB, 512 * GIB, H200_BUS, 4.4e12)
    assert plan(LLAMA_2_7B, smaller, config, (), Workload(1, LONG, 256)).offload is not None


def test_streamed_weights_take_slots_and_a_copy_of_few_bits() -> None:
    made = planned(STREAMED_13B, 24, LONG)
    assert (made.levels, made.config.retrieval_weight_bits, made.config.retrieval.budget) == (3, 8, 4096)
    assert made.device["weights"] == STREAMED_13B.weights - STREAMED_13B.streamed < GIB
    assert made.device["weight slots"] == STREAMED_13B.slots
    assert made.device["low-bit weights"] == STREAMED_13B.streamed // 2
    assert made.host["weights"] == STREAMED_13B.streamed
    # machine.host includes what is locked already; a progress bar counts only what is still to be locked.
    assert made.coming_bytes == made.host["KV"]
    crossing = made.host["KV"] + made.host["weights"]
    assert made.pass_seconds == pytest.approx(crossing / H200_BUS)
    assert made.weight_seconds == pytest.approx(STREAMED_13B.streamed / H200_BUS)
    plan_json = made.as_dict()
    assert plan_json["pass_weights_gib"] == pytest.approx(23.6, abs=0.1)
    assert plan_json["pass_weights_ms"] == pytest.approx(461, abs=1)
    assert plan_json["options"]["retrieval_weight_bits"] == 8
    assert made.with_resident(0).host["weights"] == made.host["weights"]


def test_retrieval_weight_bits_are_the_most_that_fit_or_those_given() -> None:
    assert planned(STREAMED_13B, 16, LONG).config.retrieval_weight_bits == 4
    four = planned(STREAMED_13B, 24, LONG, {"retrieval_weight_bits": 4})
    assert four.config.retrieval_weight_bits == 4
    # Scales take two bytes per 128 weights.
    assert four.device["low-bit weights"] == STREAMED_13B.streamed // 4 + STREAMED_13B.streamed // 128
    for levels in (1, 2):
        made = planned(STREAMED_13B, 24, LONG, {"levels": levels})
        assert made.config.retrieval_weight_bits == 16
        assert made.device["low-bit weights"] == 0
    assert planned(LLAMA_2_13B, 48, LONG).config.retrieval_weight_bits == 16
    # "auto" is decided as if it was not given.
    auto: dict[str, object] = {"retrieval_weight_bits": "auto"}
    for sizes, cap, bits in ((STREAMED_13B, 24, 8), (STREAMED_13B, 16, 4), (LLAMA_2_13B, 48, 16)):
        made = planned(sizes, cap, LONG, auto)
        assert made.config.retrieval_weight_bits == bits
        assert made == planned(sizes, cap, LONG)
    with pytest.raises(
        ValueError, match="retrieval_weight_bits=16 lets the retrieval model use the target's own weights"
    ):
        planned(STREAMED_13B, 24, LONG, {"retrieval_weight_bits": 16})
    with pytest.raises(DoesNotFitError, match=r"; leave out retrieval_weight_bits=8, or shorten"):
        planned(STREAMED_13B, 16, LONG, {"retrieval_weight_bits": 8})


def test_auto_streams_weights_that_do_not_fit() -> None:
    assert weights_fit(LLAMA_2_7B.weights, 24 * GIB)
    assert weights_fit(LLAMA_2_13B.weights, 32 * GIB)
    assert not weights_fit(LLAMA_2_13B.weights, 24 * GIB)
    # A device that holds the weights only is not enough.
    assert not weights_fit(LLAMA_2_13B.weights, LLAMA_2_13B.weights)
    machine = Machine(80 * GIB, 512 * GIB, H200_BUS, 4.4e12)
    config = HierarchyConfig.from_options(offload="auto")
    made = plan(STREAMED_13B, machine, config, (), Workload(1, 4096, 256))
    assert made.offload is not None
    assert made.host["KV"] == 0


def test_smaller_plans_with_streamed_weights_reduce_bits_before_the_budget() -> None:
    made: MemoryPlan | None = planned(STREAMED_13B, 24, LONG)
    changes = []
    while made is not None:
        step = made.smaller()
        made = step[0] if step else None
        changes += [step[1].split()[0]] if step else []
    assert list(dict.fromkeys(changes)) == ["resident", "ring", "retrieval_weight_bits", "budget"]


def test_smaller_plans_shrink_step_by_step_and_end() -> None:
    made: MemoryPlan | None = planned(LLAMA_2_7B, 48, LONG)
    changes = []
    peaks = []
    while made is not None:
        assert made.offload is not None
        peaks.append((made.offload.resident_bytes, made.offload.buffers, made.config.retrieval.budget))
        step = made.smaller()
        made = step[0] if step else None
        changes += [step[1].split()[0]] if step else []
    assert list(dict.fromkeys(changes)) == ["resident", "ring", "budget"]
    assert peaks == sorted(peaks, reverse=True)
    assert len(changes) < 40


def test_a_plan_as_json() -> None:
    made = planned(LLAMA_2_7B, 24, LONG).as_dict()
    assert made["offloaded"] is True
    assert sum(made["device_gib"].values()) == pytest.approx(24)
    assert made["options"]["budget"] == 4096


@pytest.mark.parametrize("variance", [False, True], ids=["means", "variances too"])
def test_planned_bytes_are_those_that_a_program_allocates(variance: bool) -> None:
    target = tiny("llama-gqa")
    models = HFModel(target), HFModel(perturbed(target, 0.1))
    options = {
        "budget": 64, "chunk": 4, "recent": 16, "gamma": 8, "levels": 3, "key_variance": variance
    }  # fmt: skip
    config = HierarchyConfig.from_options(offload=True, **options)
    sizes = Sizes.of(*models, config)
    tensors = [*target.parameters(), *target.buffers()]
    assert sizes.weights == sum(t.nbytes for t in tensors)
    machine = Machine(GIB, GIB, H200_BUS, 4.4e12)
    made = plan(sizes, machine, config, options, Workload(2, 300, 84)).with_resident(40_000)
    drafter = TreeDrafter(models[1], made.config)
    program = DecodingProgram(models[0], drafter, made.config, 2, 384, 3, made.offload)
    cache = program.cache.backend.cache
    assert cache is not None
    assert cache.means is not None
    assert sum(part.nbytes for part in cache.store.kv) == made.device["level 1: chunks and window"]
    chunk_slots = cache.means[..., 0].numel() * 4
    assert cache.means.nbytes + chunk_slots == made.device["chunk means"]
    assert sum(buffer.nbytes for buffer in cache.host.ring.buffers) == made.device["ring"]
    assert cache.host.resident_bytes <= made.device["resident KV"]
    full = made.device["resident KV"] + made.host["KV"]
    assert cache.host.resident_bytes + cache.host.memory.bytes == full
    program.cache.close()


def test_planned_bytes_of_a_cache_in_8_bits() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    target = tiny("gemma3", num_hidden_layers=3, layer_types=kinds, sliding_window=100)
    options = {"budget": 64, "chunk": 4, "recent": 16, "levels": 3, "gamma": 8}
    config = HierarchyConfig.from_options(offload="auto", kv_bits=8, **options)
    models = HFModel(target), HFModel(perturbed(target, 0.1))
    sizes = Sizes.of(*models, config)
    machine = Machine(GIB, GIB, H200_BUS, 4.4e12)
    made = plan(sizes, machine, config, options, Workload(2, 300, 84))
    assert made.offload is None
    program = DecodingProgram(models[0], TreeDrafter(models[1], config), config, 2, 384, 3)
    view = program.retrieval
    assert view is not None
    for group, name in zip(program.store.groups, ("layers with windows", "KV"), strict=True):
        a_slot = sum(part[0, :, :, 0].nbytes for part in group.parts) * len(group.layers)
        allocated = sum(part.nbytes for part in group.parts)
        assert abs(made.device[name] - allocated) <= 128 * a_slot, name
    [means] = [kept.means.nbytes for kept in view.retrieved if kept is not None]
    assert made.device["chunk means"] == pytest.approx(means, rel=0.1)
    # Half of the bytes of fp16 and 3 % for scales, at 128 columns.
    half = replace(LLAMA_2_7B, kv_bits=8)
    assert half.row / LLAMA_2_7B.row == pytest.approx(0.5 * (1 + 4 / 128))


def test_an_8b_in_4_bits_with_a_cache_in_8_bits_leaves_a_third_of_24_gib_free() -> None:
    machine = Machine(24 * GIB, 64 * GIB, H200_BUS, 1e12)
    free = []
    for bits in (16, 8):
        sizes = replace(LLAMA_3_1_8B, weights=int(5.7e9), kv_bits=bits)
        config = HierarchyConfig.from_options(offload="auto", kv_bits=bits, levels=3)
        made = plan(sizes, machine, config, (), Workload(1, LONG - 256, 256))
        assert made.offload is None
        free.append(made.device["free"] / GIB)
    assert free == pytest.approx([1.1, 7.8], abs=0.3)


@pytest.mark.parametrize("prompt", [60, 300])
def test_planned_bytes_of_layers_with_windows(prompt: int) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    target = tiny("gemma3", num_hidden_layers=3, layer_types=kinds, sliding_window=100)
    models = HFModel(target), HFModel(perturbed(target, 0.1))
    options = {"budget": 64, "chunk": 4, "recent": 16, "gamma": 8, "levels": 2}
    config = HierarchyConfig.from_options(offload=True, **options)
    sizes = Sizes.of(*models, config)
    assert sizes.windowed == (WindowedLayers(2, 100, 128),)
    assert (sizes.full_layers, sizes.row) == (1, 128)
    machine = Machine(GIB, GIB, H200_BUS, 4.4e12)
    made = plan(sizes, machine, config, options, Workload(2, prompt, 84)).with_resident(20_000)
    drafter = TreeDrafter(models[1], made.config)
    program = DecodingProgram(models[0], drafter, made.config, 2, prompt + 84, 2, made.offload)
    cache = program.cache.backend.cache
    assert cache is not None
    assert sum(part.nbytes for part in cache.store.kv) == made.device["level 1: chunks and window"]
    full = made.device["resident KV"] + made.host["KV"]
    assert cache.host.resident_bytes + cache.host.memory.bytes == full
    allocated = sum(part.nbytes for group in cache.rings.groups for part in (group.k, group.v))
    # Layers that need no ring are rounded to pages of another size.
    slack = sum(len(group.layers) * 128 * 64 * 2 for group in cache.rings.groups if not group.ring)
    assert 0 <= made.device["layers with windows"] - allocated + slack <= 2 * slack
    program.cache.close()


@pytest.mark.parametrize("name", ["gpu_memory", "host_memory"])
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("1.5 GiB", 3 << 29),
        ("24GB", 24 * 10**9),
        ("16g", 16 * 10**9),
        (1 << 20, 1 << 20),
    ],
)
def test_memory_sizes_are_parsed(text: str | int, size: int, name: str) -> None:
    assert bytes_of(text, name) == size
    config = HierarchyConfig.from_options(**{name: text})
    assert getattr(config, name.replace("memory", "bytes")) == size
    assert config.offloads == "auto"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        *(
            (text, "is no size of memory; write it like 24GiB")
            for text in ("", "much", "0", "-1GiB", True, "24XB")
        ),
        (24, "24 is less than 1 MiB; write 24GiB"),
        ("48", "'48' is less than 1 MiB; write 48GiB"),
        ("24000", "'24000' is less than 1 MiB; write 24GiB"),
        ("1000K", "'1000K' is less than 1 MiB; write 1000GiB"),
    ],
)
@pytest.mark.parametrize("name", ["gpu_memory", "host_memory"])
def test_invalid_memory_sizes_are_refused(text: str | int, remedy: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*{remedy}"):
        HierarchyConfig.from_options(**{name: text})


def test_contradictory_options_are_refused() -> None:
    with pytest.raises(ValueError, match="offload='yes' must be"):
        HierarchyConfig(offload="yes")
    with pytest.raises(ValueError, match="offload=False asks for none"):
        HierarchyConfig(offload=False, gpu_memory="24GiB")
    with pytest.raises(ValueError, match="host_memory='24GiB' bounds an offloaded cache, and offload=False"):
        HierarchyConfig(offload=False, host_memory="24GiB")
