"""Experts in host memory: the same tokens as a model on the device, and only routed experts are copied.

Slots are uninitialised memory, which holds NaN here: an expert that is read without having been copied shows.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.models.families import CAPPED, greedy, perturbed, prompt_of, small, tiny
from tests.support.models.program_cases import SMALL, decoded
from triforce_tree import load
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kernels import exchange
from triforce_tree.kernels.exchange import link
from triforce_tree.kernels.exchange.link import Link
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError
from triforce_tree.kv.offload.weights import streamed_experts
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.models.experts.modules import distinct, expert_modules
from triforce_tree.models.hf_model import HFModel

pytestmark = pytest.mark.usefixtures("poisoned_empty")

PROMPT, NEW, PIECE = prompt_of(120), 20, 32 * 128
EXPERTS, PER_TOKEN = 16, 2
_DENSE_FIRST = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-moe": lambda: tiny("qwen3-moe", num_hidden_layers=3, num_experts=EXPERTS),
    "mixtral": lambda: tiny("mixtral"),
    # Transposed weights, biases, and gates of its own.
    "gpt-oss": CAPPED["gpt-oss"],
    # The first layer has no experts.
    "dots1": lambda: small("Dots1Config", "Dots1ForCausalLM", **_DENSE_FIRST),
}


@cache
def whole(family: str = "qwen3-moe") -> PreTrainedModel:
    return MODELS[family]()


@cache
def expected(family: str = "qwen3-moe") -> list[int]:
    return greedy(whole(family), PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))


def streamed(family: str = "qwen3-moe", linears: bool = True) -> HFModel:
    model = copy.deepcopy(whole(family))
    return HFModel(model, StreamedWeights(model, "cpu", linears=linears))


def program_of(model: HFModel, levels: int, family: str = "qwen3-moe", bits: int = 8) -> DecodingProgram:
    config = HierarchyConfig.from_options(**SMALL, retrieval_weight_bits=bits if levels == 3 else 16)
    draft = None if levels == 1 else TreeDrafter(HFModel(perturbed(whole(family), 0.05)), config)
    return DecodingProgram(model, draft, config, 1, 200, levels, Offload(0, PIECE, 2))


class Routing:
    """The experts that the calls of a model's expert modules are routed to."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[int, set[int]]] = []
        for number, module in enumerate(expert_modules(model)):
            module.register_forward_pre_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[..., None]:
        return lambda module, args: self.calls.append((number, set(args[1].flatten().tolist())))

    def copies(self, held: dict[int, int] | None = None) -> int:
        """Returns how many experts must be copied if all modules share one set of slots."""
        held, count = dict(held or {}), 0
        for number, wanted in self.calls:
            missing = [expert for expert in wanted if held.get(expert) != number]
            held |= dict.fromkeys(missing, number)
            count += len(missing)
        return count


def expert_bytes(model: HFModel) -> int:
    [module] = expert_modules(model.model)[:1]
    return sum(w[0].nbytes for w in (module.gate_up_proj, module.down_proj))


@pytest.mark.parametrize("linears", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_those_of_a_model_on_the_device(family: str, linears: bool) -> None:
    model = streamed(family, linears)
    for levels in (1, 2):
        new, _ = decoded(program_of(model, levels, family), [PROMPT], [NEW])
        assert new == [expected(family)], levels
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        # Outside our engine as well, with every implementation.
        for implementation in ("grouped_mm", "batched_mm", "eager"):
            for each in (model.model, whole(family)):
                each.set_experts_implementation(implementation)
            assert torch.equal(model.model(ids).logits, whole(family)(ids).logits)
    whole(family).set_experts_implementation("grouped_mm")


@pytest.mark.parametrize("levels", [1, 2])
def test_only_experts_that_tokens_are_routed_to_are_copied(levels: int) -> None:
    model = streamed(linears=False)
    program = program_of(model, levels)
    routing, layers = Routing(program.full.model), len(expert_modules(model.model))

    def copied() -> int:
        """Experts, since the last call; every slot holds the first layer's expert afterwards."""
        nonlocal before
        now = model.streamed.copied
        model.streamed.experts._fetch(0, None)
        before, earlier = model.streamed.copied, before
        return (now - earlier) // expert_bytes(model)

    before = 0
    copied()
    decoded(program, [PROMPT], [NEW])
    prefill_and_passes = copied()
    routing.calls.clear()
    _, decoder = decoded(program, [PROMPT], [NEW], again=True)
    passes = decoder.levels[-1].forwards
    assert len(routing.calls) == layers * passes
    most = max(len(wanted) for _, wanted in routing.calls)
    assert most == PER_TOKEN if levels == 1 else PER_TOKEN < most < EXPERTS
    # An expert stays in its slot until another layer needs the slot: even fewer than are routed to.
    count = copied()
    assert count == routing.copies(dict.fromkeys(range(EXPERTS), 0))
    assert count < sum(len(wanted) for _, wanted in routing.calls) < layers * passes * EXPERTS
    # A prefill by layers copies no expert of a layer twice.
    assert prefill_and_passes - count <= layers * EXPERTS


def test_a_slower_link_carries_the_experts_that_are_copied() -> None:
    weights = streamed(linears=False).streamed
    before = weights.copied
    with link.limited(Link(torch.device("cpu"), 1e12)) as slow:
        for ids in ([0, 3], [3], [1, 2, 3]):
            weights.experts._fetch(1, torch.tensor(ids))
            assert slow.carried == (weights.copied - before, 0)
    assert slow.carried[0] > 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_three_levels(family: str, bits: int) -> None:
    model = streamed(family, linears=False)
    program = program_of(model, 3, family, bits)
    before = model.streamed.copied
    target, retrieval = Routing(program.full.model), Routing(program.retrieval_model.model)
    new, decoder = decoded(program, [PROMPT], [NEW])
    assert new == [expected(family)]
    assert decoder.levels[-1].accepted > 0
    assert decoder.levels[1].forwards > decoder.levels[-1].forwards
    # The retrieval model has experts of its own, and copies none.
    assert not retrieval.calls
    assert model.streamed.copied > before
    assert target.calls


def test_expected_bytes_of_a_pass() -> None:
    model, layers = streamed(linears=False), 3
    own = expert_bytes(model)
    assert model.streamed.bytes == layers * EXPERTS * own
    assert model.streamed.slot_bytes == EXPERTS * own
    assert model.streamed.pass_bytes(1) == layers * PER_TOKEN * own
    assert model.streamed.pass_bytes(4) == int(layers * own * distinct(EXPERTS, PER_TOKEN, 4))
    assert distinct(128, 8, 1) == pytest.approx(8)
    assert distinct(128, 8, 32) == pytest.approx(128 * (1 - (15 / 16) ** 32))
    # A pass over many tokens copies no more than all.
    assert model.streamed.pass_bytes(10_000) == layers * EXPERTS * own
    # Linear layers cross the bus in every pass.
    both = streamed(linears=True).streamed
    assert both.pass_bytes(1) == both.bytes - model.streamed.bytes + model.streamed.pass_bytes(1)


def test_experts_alone_can_be_captured() -> None:
    assert streamed(linears=False).streamed.capturable
    assert not streamed(linears=True).streamed.capturable
    with pytest.raises(ValueError, match="has no fused experts to stream"):
        StreamedWeights(tiny("llama-gqa"), "cpu", linears=False)


def test_a_pass_after_an_interrupted_copy_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed()
    ids = torch.tensor([PROMPT])
    fetch, left = exchange.fetch_experts, 4

    def interrupted(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        fetch(*args)

    monkeypatch.setattr(exchange, "fetch_experts", interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model.model(ids)
    with torch.no_grad():
        # The interrupted layer comes first: what was listed for it must not count as copied.
        layer = model.model.model.layers[1]
        hidden = torch.randn(1, 9, 32)
        assert torch.equal(layer.mlp(hidden), whole().model.layers[1].mlp(hidden))
        assert torch.equal(model.model(ids).logits, whole()(ids).logits)


def test_a_fault_while_experts_move_leaves_a_model_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(whole())
    take, left = HostMemory.take, 4

    def short(self: HostMemory, shape: Any, dtype: torch.dtype) -> Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            raise HostMemoryError("no more")
        return take(self, shape, dtype)

    monkeypatch.setattr(HostMemory, "take", short)
    with pytest.raises(HostMemoryError, match="no more"):
        StreamedWeights(model, "cpu")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole()(ids).logits)


def test_closed_weights_and_shared_experts_are_refused() -> None:
    model = streamed(linears=False)
    model.streamed.close()
    with pytest.raises(RuntimeError, match="streamed weights were freed"):
        model.model(torch.tensor([PROMPT]))
    shared = copy.deepcopy(whole())
    shared.model.layers[1].mlp.experts.down_proj = shared.model.layers[0].mlp.experts.down_proj
    with pytest.raises(ValueError, match="shares weights of a decoder layer"):
        StreamedWeights(shared, "cpu")


@pytest.mark.gpu
def test_a_captured_forward_copies_what_each_replay_is_routed_to() -> None:
    model = tiny("qwen3-moe", num_hidden_layers=3, num_experts=EXPERTS, hidden_size=256, head_dim=64).cuda()
    model.set_experts_implementation("batched_mm")
    prompts = [torch.tensor([prompt_of(9)], device="cuda"), torch.tensor([prompt_of(10)[:9]], device="cuda")]
    with torch.no_grad():
        reference = [model(ids, use_cache=False).logits for ids in prompts]
        StreamedWeights(model, "cuda", linears=False)
        ids = prompts[0].clone()
        for _ in range(2):
            model(ids, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(ids, use_cache=False).logits
        for _ in range(10):
            for prompt, logits in zip(prompts, reference, strict=True):
                ids.copy_(prompt)
                graph.replay()
                torch.testing.assert_close(out, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_experts_of_layers_that_stay_are_copied_once() -> None:
    model = streamed(linears=False)
    weights, own = model.streamed, expert_bytes(model)
    layer_bytes = EXPERTS * own
    for kept, places in ((2, 3), (99, 3), (1, 2), (0, 1)):
        weights.keep_experts(kept)
        assert weights.slot_bytes == places * layer_bytes
        # The parameters of a layer that stays are nobody else's.
        pointers = {module.down_proj.data_ptr() for module in expert_modules(model.model)}
        assert len(pointers) == places
        before, counts = weights.copied, []
        for _ in range(3):
            new, _ = decoded(program_of(model, 1), [PROMPT], [NEW])
            assert new == [expected()]
            counts.append(weights.copied - before - sum(counts))
        if places == 3:
            # All stay: what was routed to once is there.
            assert counts[0] <= 3 * layer_bytes
            assert counts[1:] == [0, 0]
            assert weights.pass_bytes(5) == 0
        else:
            assert counts[2] > 0
            assert weights.pass_bytes(1) == (len(expert_modules(model.model)) - kept) * PER_TOKEN * own
    assert weights.least_slot_bytes == layer_bytes


def test_a_program_is_made_anew_after_slots_have_moved() -> None:
    model = streamed(linears=False)
    program = program_of(model, 1)
    assert not program.cache.closed
    model.streamed.keep_experts(0)
    assert not program.cache.closed
    model.streamed.keep_experts(1)
    assert program.cache.closed


def test_device_memory_that_is_short_keeps_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(linears=False)
    make = streamed_experts._Slots

    def short(kind: Any, device: torch.device) -> Any:
        if len(model.streamed.experts._slots) == 1:
            raise torch.OutOfMemoryError("no more")
        return make(kind, device)

    monkeypatch.setattr(streamed_experts, "_Slots", short)
    with pytest.raises(torch.OutOfMemoryError):
        model.streamed.keep_experts(2)
    assert model.streamed.slot_bytes == model.streamed.least_slot_bytes
    new, _ = decoded(program_of(model, 1), [PROMPT], [NEW])
    assert new == [expected()]


@pytest.mark.parametrize(("device", "kv_on_host"), [("2GiB", False), ("700MiB", True)])
def test_an_engine_plans_for_experts(device: str, kv_on_host: bool) -> None:
    target = copy.deepcopy(whole())
    options = {"offload": "auto", "offload_weights": True, "gpu_memory": device, **SMALL}
    engine = load(target, perturbed(whole(), 0.05), device="cpu", **load_arguments(options))
    if kv_on_host:
        engine = engine.with_options(offload=True)
    weights = engine.target.streamed
    assert weights is not None
    # All but experts fits, and stays on the device.
    assert weights.capturable
    for levels in (1, 2, 3):
        own = engine.with_options(levels=levels)
        out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, len(PROMPT) :].tolist() == expected()
        plan = own.memory
        assert plan is not None
        assert (plan.offload is not None) == kv_on_host
        assert plan.host["weights"] == weights.bytes
        # Device memory is left for all experts.
        assert weights.slot_bytes == weights.bytes
        assert plan.device["weight slots"] + plan.device["resident experts"] == weights.slot_bytes
        assert (plan.config.retrieval_weight_bits == 8) == (levels == 3)
        assert out.memory["pass_weights_gib"] == 0
