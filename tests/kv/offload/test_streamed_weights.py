"""Weights in host memory: the same bits as a model on the device, in any order and after interruptions.

Copies are deferred until their event is waited for, as on a device, and a slot that is to be filled holds NaN
until then: a wait that is missing, or is for another layer, is detected.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL, decoded
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.backend import CacheSpec, PromptRun
from triforce_tree.kv.offload import pinned
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_prefill import prefill_offloaded
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError
from triforce_tree.kv.offload.views import StreamedView
from triforce_tree.kv.offload.weights import streamed_weights
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.models.few_row import few_row_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel

pytestmark = pytest.mark.usefixtures("poisoned_empty")

LAYERS, PIECE = 5, 32 * 128
PROMPT, NEW = prompt_of(120), 30


class DeferredCopies:
    """A copy stream whose copies run, in order, when their events are waited for."""

    stream = None

    def __init__(self, device: torch.device) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []

    def copy(self, target: Tensor, source: Tensor) -> "DeferredCopies.CopyEvent":
        # All queued work has run by now, and nothing may read the slot before the copy.
        target.fill_(0xFF)
        self.pending.append((target, source))
        return self.CopyEvent(self, len(self.pending))

    class CopyEvent:
        def __init__(self, stream: "DeferredCopies", until: int) -> None:
            self.stream, self.until = stream, until

        def wait(self) -> None:
            pending = self.stream.pending
            for number, (target, source) in enumerate(pending[: self.until]):
                if target.numel():
                    target.copy_(source)
                pending[number] = (target[:0], source[:0])


@pytest.fixture(autouse=True)
def _copies_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_weights, "CopyStream", DeferredCopies)


@cache
def whole(family: str = "llama-gqa", layers: int = LAYERS) -> PreTrainedModel:
    return tiny(family, num_hidden_layers=layers)


@cache
def draft_of(family: str = "llama-gqa") -> PreTrainedModel:
    return perturbed(whole(family), 0.05)


@cache
def expected(family: str = "llama-gqa") -> list[int]:
    return greedy(whole(family), PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))


def streamed(family: str = "llama-gqa", layers: int = LAYERS) -> HFModel:
    model = copy.deepcopy(whole(family, layers))
    return HFModel(model, StreamedWeights(model, "cpu"))


def weights_of(model: HFModel) -> StreamedWeights:
    assert isinstance(model.streamed, StreamedWeights)
    return model.streamed


def program_of(model: HFModel, levels: int, bits: int = 8, family: str = "llama-gqa") -> DecodingProgram:
    config = HierarchyConfig.from_options(**SMALL, retrieval_weight_bits=bits if levels == 3 else 16)
    draft = None if levels == 1 else TreeDrafter(HFModel(draft_of(family)), config)
    return DecodingProgram(model, draft, config, 1, 200, levels, Offload(0, PIECE, 2))


def target_logits(model: HFModel, width: int = 7) -> Tensor:
    """Returns logits of the last tokens, from a layerwise prefill and one pass of the target."""
    spec = CacheSpec(model, HierarchyConfig.from_options(**SMALL), 1, 160, 1)
    cache = OffloadedCache(spec, Offload(0, PIECE, 2))
    step = StepModel(few_row_copy(model.model))
    with model.active():
        prefill_offloaded(cache, [PROMPT[: 1 - width]], 16, [0], PromptRun())
    view = StreamedView(cache, width, torch.ones(width, width, dtype=torch.bool).tril())
    start = torch.tensor([len(PROMPT) - width])
    view.begin(start)
    return step(torch.tensor([PROMPT[-width:]]), start[:, None] + torch.arange(width), view)


@pytest.mark.parametrize("layers", [4, 5])
def test_logits_are_the_same_bits(layers: int) -> None:
    reference = target_logits(HFModel(copy.deepcopy(whole(layers=layers))))
    model = streamed(layers=layers)
    for _ in range(2):
        assert torch.equal(target_logits(model), reference)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        # Outside our engine as well.
        assert torch.equal(model.model(ids).logits, whole(layers=layers)(ids).logits)


@pytest.mark.parametrize(("levels", "bits"), [(1, 16), (2, 16), (3, 8), (3, 4)])
def test_greedy_tokens_are_those_of_a_model_on_the_device(levels: int, bits: int) -> None:
    model = streamed()
    new, decoder = decoded(program_of(model, levels, bits), [PROMPT], [NEW])
    assert new == [expected()]
    if levels == 3:
        assert decoder.levels[-1].accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt-neox", "phi3", "mixtral"])
def test_families(family: str) -> None:
    new, _ = decoded(program_of(streamed(family), 3, family=family), [PROMPT], [NEW])
    assert new == [expected(family)]


def test_a_prefill_copies_each_layer_once_and_so_does_a_pass() -> None:
    model = streamed()
    program, weights = program_of(model, 3), weights_of(model)
    assert len(PROMPT) > 5 * SMALL["prefill_chunk"]
    for _ in range(2):
        before = weights.copies, weights.copied
        program.prefill([PROMPT])
        assert weights.copies - before[0] == LAYERS
        assert weights.copied - before[1] == weights.bytes
    before = weights.copies, weights.copied
    _, decoder = decoded(program, [PROMPT], [NEW], again=True)
    # The forwards of the retrieval model, of which there are more, copy nothing.
    assert weights.copies - before[0] == LAYERS * decoder.levels[-1].forwards
    assert decoder.levels[1].forwards > decoder.levels[-1].forwards


def test_the_next_layer_is_copied_while_one_computes_and_the_first_after_the_last() -> None:
    model = streamed(layers=4)
    weights = weights_of(model)
    weights.wait_for_layer(0)
    assert weights._slot_layers == [0, 1]
    for layer in (0, 1, 2, 3):
        weights.wait_for_layer(layer)
        assert set(weights._slot_layers) == {layer, (layer + 1) % 4}
    before = weights.copies
    weights.wait_for_layer(0)
    assert weights.copies == before + 1


@pytest.mark.parametrize("order", [(2, 0, 1), (4, 3, 2, 1, 0), (0, 2, 4, 1, 3), (3, 3, 0)])
def test_any_order_is_right(order: tuple[int, ...]) -> None:
    model = streamed()
    for layer in order:
        weights_of(model).wait_for_layer(layer)
        own, reference = (m.model.layers[layer].state_dict() for m in (model.model, whole()))
        assert all(torch.equal(own[name], reference[name]) for name in reference)


@pytest.mark.parametrize("stop", range(LAYERS))
def test_a_pass_after_an_interrupted_one_is_right(monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    model = streamed()
    reference = target_logits(model)
    layer = model.model.model.layers[stop]
    forward = layer.mlp.forward

    def interrupted(hidden: Tensor) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer.mlp, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target_logits(model)
    monkeypatch.setattr(layer.mlp, "forward", forward)
    assert torch.equal(target_logits(model), reference)


def test_a_fault_in_a_copy_is_raised_and_the_next_pass_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed()
    reference = target_logits(model)
    stream, left = weights_of(model)._copy_stream, 7
    copy_once = stream.copy

    def failing(target: Tensor, source: Tensor) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            target.fill_(0xFF)
            raise RuntimeError("the copy failed")
        return copy_once(target, source)

    monkeypatch.setattr(stream, "copy", failing)
    with pytest.raises(RuntimeError, match="the copy failed"):
        target_logits(model)
    assert torch.equal(target_logits(model), reference)


def test_parameters_keep_their_places() -> None:
    model = streamed()
    before = {name: (id(p), p.data_ptr()) for name, p in model.model.named_parameters()}
    target_logits(model)
    assert {name: (id(p), p.data_ptr()) for name, p in model.model.named_parameters()} == before
    layers = model.model.model.layers
    assert layers[0].mlp.up_proj.weight.data_ptr() == layers[2].mlp.up_proj.weight.data_ptr()
    assert layers[0].mlp.up_proj.weight.data_ptr() % 16 == 0


@pytest.mark.parametrize("place", ["a block", "the device"])
def test_a_fault_while_weights_move_leaves_a_model_that_works(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model, memories = copy.deepcopy(whole()), []
    take, left = HostMemory.take, 3

    def short(self: HostMemory, shape: Any, dtype: torch.dtype) -> Tensor:
        nonlocal left
        memories.append(self)
        left -= 1
        if left == 0 and place == "a block":
            raise HostMemoryError("no more")
        return take(self, shape, dtype)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(HostMemory, "take", short)
    if place == "the device":
        monkeypatch.setattr(model, "to", full)
    with pytest.raises((HostMemoryError, torch.OutOfMemoryError), match="no more"):
        StreamedWeights(model, "cpu")
    assert len(memories) == (3 if place == "a block" else LAYERS)
    # Nothing stays locked.
    assert not memories[0]._blocks
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole()(ids).logits)


def test_every_layer_is_reported_and_ctrl_c_leaves_a_model_that_works() -> None:
    model, reported = copy.deepcopy(whole()), []

    def stop(size: int) -> None:
        reported.append(size)
        if len(reported) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StreamedWeights(model, "cpu", progress=stop)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole()(ids).logits)
    reported.clear()
    own = StreamedWeights(model, "cpu", progress=reported.append)
    assert len(reported) == LAYERS
    assert sum(reported) == own.bytes
    own.close()


def test_too_little_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available", lambda: (1 << 20, "the test"))
    with pytest.raises(
        HostMemoryError, match=r"streamed weights needs .* the test leaves 0.0 GiB; free host"
    ):
        streamed()


def test_models_that_cannot_be_streamed_are_refused() -> None:
    shared = copy.deepcopy(whole())
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"shares weights of a decoder layer.*\(offload_weights=False\)"):
        StreamedWeights(shared, "cpu")
    bare = copy.deepcopy(whole())
    bare.model.layers[2] = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"without a plain nn.Linear"):
        StreamedWeights(bare, "cpu")


def test_layers_may_differ() -> None:
    odd = copy.deepcopy(whole())
    mlp = odd.model.layers[3].mlp
    mlp.up_proj, mlp.gate_proj = torch.nn.Linear(32, 48, bias=False), torch.nn.Linear(32, 48, bias=False)
    mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        reference = odd(ids).logits
        weights = StreamedWeights(odd, "cpu")
        for _ in range(2):
            assert torch.equal(odd(ids).logits, reference)
    # Each layer crosses the bus with its own bytes; slots have room for the largest.
    assert weights.bytes < LAYERS * weights.slot_bytes // 2


def test_transferred_bytes_include_the_weights() -> None:
    on_device, on_host = HFModel(whole()), streamed()
    for plain in (False, True):
        whole_bytes, streamed_bytes = (
            program_of(m, 3).transferred_bytes(100, plain) for m in (on_device, on_host)
        )
        assert streamed_bytes - whole_bytes == weights_of(on_host).bytes
    # Tokens, layers, keys and values, heads, their dimension, bytes of an element.
    assert whole_bytes == 100 * LAYERS * 2 * 2 * 8 * 4


@pytest.mark.gpu
def test_real_copy_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    from triforce_tree.kv.offload.copy_stream import CopyStream

    monkeypatch.setattr(streamed_weights, "CopyStream", CopyStream)
    model = tiny(
        "llama-gqa", num_hidden_layers=LAYERS, hidden_size=1024, intermediate_size=4096, head_dim=64
    ).cuda()
    ids = torch.tensor([PROMPT], device="cuda")
    with torch.no_grad():
        reference = model(ids).logits
        weights = StreamedWeights(model, "cuda")
        for _ in range(20):
            assert torch.equal(model(ids).logits, reference)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        capture(weights, ids)


def capture(weights: StreamedWeights, ids: Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        ids.add_(0)
        weights.wait_for_layer(0)
