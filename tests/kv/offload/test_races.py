"""Accesses of an offloaded program's streams to the same memory are ordered; see ``races``.

All copies beside the computation run here: pieces streamed in, tokens evicted, the CPU's part of the
attention, hidden states on the host, streamed weights. Each fault leaves one kind of wait out.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.races import Event, Stream, Watch, watched
from tests.support.models.families import prompt_of, tiny
from tests.support.models.offloaded_cases import PIECE, program_of
from tests.support.models.program_cases import GREEDY, decoded
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.offload.copy_stream import BufferRing, CopyEvent, CopyStream
from triforce_tree.kv.offload.host_store import HostStore, Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.models.hf_model import HFModel

# A block of tokens is evicted while the new ones are decoded: where 105 and 113 are cached.
PROMPT, NEW = prompt_of(104), 10
pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Pieces of 16 slots, of which one of the first layer is resident.
STREAMED = Offload(PIECE // 2, PIECE // 2, 2, states_on_host=True)
SHARED = Offload(PIECE // 2, PIECE // 2, 3, host_share=0.5, plain_host_share=0.5)
# All slots of the second layer are resident, and one piece of the first.
LAST = Offload(7 * PIECE, PIECE // 2, 2, last_resident=True)
SPLITS = {"streamed": STREAMED, "shared with the CPU": SHARED}


def run(program: DecodingProgram) -> None:
    """Decodes a prompt, then the same again after a rewind, which copies tokens back from the host."""
    first, _ = decoded(program, [PROMPT], [NEW], GREEDY)
    assert decoded(program, [PROMPT], [NEW], GREEDY, again=True)[0] == first


def assert_no_races(watch: Watch, copy_streams: int) -> None:
    assert watch.races == []
    # There may be one more, which measures the bandwidth once a process.
    assert sorted(watch.seen)[: copy_streams + 1] == list(range(copy_streams + 1)), "a copy stream is unused"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("levels", [1, 3])
def test_an_offloaded_program_has_none(levels: int, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as watch:
        run(program_of(levels, split=SPLITS[split]))
    # Those of the ring, of evictions, and of hidden states or the CPU.
    assert_no_races(watch, 3)


@pytest.mark.parametrize("levels", [1, 3])
def test_a_prefill_in_the_resident_layers_memory_has_none(
    levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(levels, split=LAST)
    assert program.cache.backend.transfers
    assert program.cache.backend.cache.host.last_resident
    with watched(monkeypatch) as watch:
        run(program_of(levels, split=LAST))
    # Hidden states are kept on the device, so that there is no copy stream for them.
    assert_no_races(watch, 2)


@pytest.mark.parametrize("levels", [1, 3])
def test_streamed_weights_have_none(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as watch:
        run(_with_streamed_weights(levels))
    assert_no_races(watch, 3)


def test_a_layer_with_a_window_between_others_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not overwrite what the layer before it copies to the host, and the layer after it waits."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    target = HFModel(tiny("gemma3", num_hidden_layers=3, layer_types=kinds))
    config = HierarchyConfig.from_options(prefill_chunk=16)
    with watched(monkeypatch) as watch:
        run(DecodingProgram(target, None, config, 1, 200, 1, STREAMED))
    assert_no_races(watch, 3)


def _with_streamed_weights(levels: int) -> DecodingProgram:
    whole = tiny("llama-gqa")
    config = HierarchyConfig.from_options(
        retrieval_weight_bits=8 if levels == 3 else 16, budget=24, chunk=4, recent=8
    )
    # Before the copies: memory that is allocated for the drafter is none of theirs.
    drafter = TreeDrafter(HFModel(whole), config) if levels == 3 else None
    target = copy.deepcopy(whole)
    model = HFModel(target, StreamedWeights(target, "cpu"))
    return DecodingProgram(model, drafter, config, 1, 200, levels, Offload(0, PIECE, 2))


def _copy_at_once(copies: CopyStream, target: Tensor, source: Tensor) -> CopyEvent:
    with copies.as_current():
        target.copy_(source)
        return copies.record_event()


def _acquire_at_once(ring: BufferRing) -> Tensor:
    slot = ring._released % len(ring.buffers)
    return ring.buffers[slot][: ring._schedule[ring._released].shape[0]]


def _overwrite_at_once(stream: Stream, event: Event) -> None:
    if stream.number == 0:
        stream.watch.order_after(0, event.clock)


def _nothing(*_: Any) -> None: ...


FAULTS: dict[str, tuple[Offload, Any, str, Any]] = {
    "tokens are evicted before they are computed": (STREAMED, CopyStream, "copy", _copy_at_once),
    "the next layer overwrites what is being copied": (STREAMED, CopyEvent, "wait", _nothing),
    "the CPU's states are not waited for": (SHARED, CopyStream, "join", _nothing),
    "a piece is read before it is copied": (STREAMED, BufferRing, "acquire", _acquire_at_once),
    "a piece is copied to a buffer that is read": (STREAMED, Stream, "wait_event", _overwrite_at_once),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_is_missing_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split, owner, name, faulty = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    with watched(monkeypatch) as watch:
        run(program_of(1, split=split))
    assert watch.races


def test_pieces_that_are_read_before_they_are_written_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring must wait for the copy stream to the host, not for the computation alone."""
    prefetch = HostStore.prefetch

    def at_once(store: HostStore, share: float | None = None) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store.to_host, "join", _nothing)
            prefetch(store, share)

    def publish(cache: OffloadedCache) -> None:
        cache.base.copy_(torch.tensor(cache.host.base))
        cache.host.prefetch()

    monkeypatch.setattr(HostStore, "prefetch", at_once)
    monkeypatch.setattr(OffloadedCache, "publish", publish)
    with watched(monkeypatch) as watch:
        run(program_of(1, split=STREAMED))
    assert any({old.stream, new.stream} == {1, 2} for old, new in watch.races)


def test_weights_that_are_not_waited_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyEvent, "wait", _nothing)
    with watched(monkeypatch) as watch:
        run(_with_streamed_weights(1))
    assert any(old.write and old.stream == 1 and new.stream == 0 for old, new in watch.races)
