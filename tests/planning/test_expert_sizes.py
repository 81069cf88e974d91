"""Memory plans of models with experts: Qwen3-30B-A3B's shape on 24 GiB, and bytes of a pass by its tokens."""

from dataclasses import replace

import pytest

from tests.support.models.families import tiny
from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning.expert_sizes import ExpertSizes
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, Machine, Sizes
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan, plan

BUS, READ = 25e9, 1e12
# 48 layers of 128 experts of 3 x 2048 x 768 in bf16; all else takes 3.1 GB.
EXPERTS = ExpertSizes(48, 128, 8, 2 * 3 * 2048 * 768, 2048 + 768)
REST = 3_080_000_000
QWEN3_30B = Sizes(
    EXPERTS.total + REST, int(0.6e9), 48, 32, 4, 128, 2048, 8 * EXPERTS.width, 151_936, experts=EXPERTS
)
STREAMED = replace(QWEN3_30B, streamed=EXPERTS.total, slots=EXPERTS.layer_bytes)


def planned(sizes: Sizes, prompt: int, device: float = 23, host: float = 90, **options: object) -> MemoryPlan:
    machine = Machine(int(device * GIB), int(host * GIB), BUS, READ)
    config = HierarchyConfig.from_options(**{"offload": "auto", **options})
    return plan(sizes, machine, config, options, Workload(1, prompt, 256))


def test_qwen3_30b_decodes_on_24_gib_with_its_experts_on_the_host() -> None:
    for prompt, levels in ((2000, 2), (16_384, 3)):
        made = planned(STREAMED, prompt)
        assert made.levels == levels
        # The KV cache stays on the device, so that stages are captured.
        assert made.offload is None
        assert made.fits
        assert sum(made.device.values()) == 23 * GIB
        assert made.device["weights"] == REST
        assert made.host == {"weights": EXPERTS.total}
        assert made.config.retrieval_weight_bits == (4 if levels == 3 else 16)
    # 30 billion weights in 4 bits, with their scales.
    assert made.device["low-bit weights"] / GIB == pytest.approx(14.6, abs=0.5)
    with pytest.raises(DoesNotFitError, match="weights 5"):
        planned(STREAMED, 2000, host=40)


def test_a_long_context_goes_to_the_host_too() -> None:
    made = planned(STREAMED, 122_880)
    assert made.offload is not None
    assert made.fits
    assert made.config.retrieval_weight_bits == 4
    assert made.host["weights"] == EXPERTS.total
    # Both cross the bus.
    crossing = made.host["KV"] + made.weight_bytes
    assert made.pass_seconds == pytest.approx(crossing / BUS)
    assert made.weight_seconds == pytest.approx(made.weight_bytes / BUS)


def test_memory_that_is_left_keeps_experts() -> None:
    plain = planned(STREAMED, 2000, levels=1)
    kept = plain.resident_experts
    assert 10 < kept < 20
    assert plain.device["resident experts"] == kept * EXPERTS.layer_bytes
    assert 0 <= plain.device["free"] - int(0.015 * 23 * GIB) < EXPERTS.layer_bytes + 1
    assert plain.weight_bytes == pytest.approx((48 - kept) * 8 * EXPERTS.bytes)
    assert plain.pass_seconds == pytest.approx(plain.weight_bytes / BUS)
    roomy = planned(STREAMED, 2000, device=80, levels=1)
    assert (roomy.resident_experts, roomy.weight_bytes) == (48, 0)
    # After device memory ran out, fewer stay.
    less = plain.smaller()
    assert less is not None
    assert less[0].resident_experts == kept // 2
    assert sum(less[0].device.values()) == sum(plain.device.values())
    assert less[1] == f"layers with resident experts {kept} -> {kept // 2}"


def test_a_prefill_has_few_chunks() -> None:
    for prompt, chunk in ((500, 1024), (2000, 4096), (6000, 8192), (16_384, 16_384)):
        made = planned(STREAMED, prompt, levels=1)
        assert made.config.prefill_chunk == chunk
        assert made.fits
    # Chunks are smaller where the retrieval model's copy takes the memory.
    assert planned(STREAMED, 16_384).config.prefill_chunk in (4096, 8192)
    assert planned(STREAMED, 16_384, levels=1, prefill_chunk=2048).config.prefill_chunk == 2048
    assert planned(QWEN3_30B, 6000, device=80).config.prefill_chunk is None


def test_bytes_depend_on_the_tokens_of_a_pass() -> None:
    assert STREAMED.streams_experts_only
    assert STREAMED.copied_weights(1) == 48 * 8 * EXPERTS.bytes
    assert STREAMED.copied_weights(1) < STREAMED.copied_weights(16) < STREAMED.copied_weights(1000)
    assert STREAMED.copied_weights(10_000) == EXPERTS.total
    assert STREAMED.copied_weights(10_000, 40) == 8 * EXPERTS.layer_bytes
    assert QWEN3_30B.copied_weights(16) == 0
    # A pass on the device reads the routed experts alone.
    assert QWEN3_30B.read_weights(1) == REST + 48 * 8 * EXPERTS.bytes
    with_linears = replace(STREAMED, streamed=EXPERTS.total + GIB)
    assert not with_linears.streams_experts_only
    assert with_linears.copied_weights(1) == GIB + 48 * 8 * EXPERTS.bytes


def test_a_refusal_advises_to_stream_the_experts() -> None:
    with pytest.raises(DoesNotFitError, match=r"offload_weights=True"):
        planned(QWEN3_30B, 2000)


def test_sizes_of_a_model() -> None:
    model = tiny("qwen3-moe", num_experts=16, num_hidden_layers=3)
    found = ExpertSizes.of(model, model.config)
    assert found == ExpertSizes(3, 16, 2, 3 * 32 * 16 * 4, 32 + 16)
    target = HFModel(model, StreamedWeights(model, "cpu", linears=False))
    sizes = Sizes.of(target, None, HierarchyConfig())
    assert sizes.experts == found
    assert (sizes.streamed, sizes.slots) == (target.streamed.bytes, found.layer_bytes)
    assert sizes.copied_weights(5) == target.streamed.pass_bytes(5)
    target.streamed.keep_experts(2)
    # Plans begin without layers that stay, whatever the last one was.
    assert Sizes.of(target, None, HierarchyConfig()).slots == found.layer_bytes
    assert ExpertSizes.of(tiny("llama-gqa"), None) is None
