"""What a program allocates on the device: KV slots, buffers of its sequences, level 1's own weights."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from triforce_tree.config import NO_OFFLOAD, HierarchyConfig
from triforce_tree.decoding.choice.tree_acceptance import MOST_RANKS
from triforce_tree.decoding.stages import FullView
from triforce_tree.drafters.base import Drafter, features_of
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kv.exact_view import ExactView
from triforce_tree.kv.offload.gathered_retrieval import GatheredRetrievalView
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_view import StreamedView
from triforce_tree.kv.parallel.prefill import SplitSequenceRows
from triforce_tree.kv.parallel.split import SequenceSplit
from triforce_tree.kv.parallel.store import SplitStore, split_of
from triforce_tree.kv.parallel.views import SplitRetrievalView, SplitView, share_of
from triforce_tree.kv.prefill import SequenceRows
from triforce_tree.kv.shared.choice import page_of
from triforce_tree.kv.shared.given import TreeStore
from triforce_tree.kv.shared.pooled import PooledStore
from triforce_tree.kv.shared.prefill import SharedSequenceRows
from triforce_tree.kv.shared.store import SharedStore, SlotLayout
from triforce_tree.kv.shared.tree import PrefixTree
from triforce_tree.kv.shared.views import SharedRetrievalView, SharedView
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import PagedRetrievalView, TreeAttentionView
from triforce_tree.kv.view import ChunkedView
from triforce_tree.models.few_row import low_bit_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.host.low_bits import has_int8_kernel
from triforce_tree.models.step_model import StepModel, int8_step_model
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape, PassLimits, tree_shapes


class DeviceSlots(NamedTuple):
    """Slots and views of them; see ``FullCache`` for each. ``rows`` makes a sequence's cache for prefill."""

    store: KVStore
    split: SplitStore | None
    view: FullView
    retrieval_view: ChunkedView | None
    rows: Callable[..., SequenceRows] = SequenceRows
    shared: SharedStore | None = None


def device_slots(
    target: HFModel,
    config: HierarchyConfig,
    batch: int,
    max_seq_len: int,
    levels: int,
    store: KVStore | None,
    kept: KVStore | None,
    prefix: PrefixTree | None = None,
) -> DeviceSlots:
    """The slots of a full cache on the device, and the views of its levels.

    Args:
        store: to work on; by default ``kept`` where it serves, else a new one.
        prefix: prefixes that are stored once, in a new store; None or an empty tree for none.

    Raises:
        ValueError: a store that is too small, of other bits, or cannot be paged by chunks; settings under
            which several ranks cannot keep the slots.
    """
    split = split_of(target, config)
    if split is not None:
        return _over_ranks(target, config, batch, max_seq_len, levels, split)
    if prefix:
        return _with_prefix(target, config, batch, max_seq_len, levels, prefix)
    retrieval, limits = config.retrieval, PassLimits.of(config, levels)
    page = retrieval.chunk if levels == 3 else 64
    scratch = limits.scratch_slots
    positions = max_seq_len + scratch
    if (
        store is None
        and kept is not None
        and kept.serves(batch, max(positions, retrieval.budget), scratch, page, config.kv_bits)
    ):
        store = kept
    if store is None:
        slots = max(positions, retrieval.budget if levels == 3 else 0)
        store = KVStore(
            target.kv_layers, batch, slots, target.device, target.dtype, page, scratch, bits=config.kv_bits
        )
    if store.bits != config.kv_bits:
        raise ValueError(f"kv_bits={config.kv_bits}, but the given store has {store.bits}; make another")
    store.check_room(batch, positions, scratch)
    own = store.in_pages(page)
    own.attention = chosen(config.attention_backend, target.device)

    def view(queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> TreeAttentionView:
        made = ExactView if config.exact else TreeAttentionView
        return made(own, queries, mask=mask, depths=depths)

    return DeviceSlots(own, None, view, _retrieval_view(PagedRetrievalView, own, config, levels))


def _retrieval_view(
    made: Callable[..., ChunkedView], store: KVStore | SplitStore, config: HierarchyConfig, levels: int
) -> ChunkedView | None:
    """Level 1's view of these slots, of the class ``made``; None without that level."""
    if levels < 3:
        return None
    limits, shape = PassLimits.of(config, levels), tree_shapes(config)[0]
    growth = limits.max_draft_tokens + 1 + limits.nodes - shape.nodes
    return made(store, shape.nodes, config.retrieval, growth, shape.depths)


def offloaded_slots(
    target: HFModel,
    config: HierarchyConfig,
    batch: int,
    max_seq_len: int,
    levels: int,
    offload: Offload,
    pinned: Callable[[int], None] | None,
) -> tuple[OffloadedCache, FullView, GatheredRetrievalView | None]:
    """An offloaded cache, and the views of its levels; arguments and errors as of ``FullCache``."""
    retrieval, limits = config.retrieval, PassLimits.of(config, levels)
    if config.kv_bits != 16:
        raise ValueError(f"kv_bits={config.kv_bits} is for a cache on the device; {NO_OFFLOAD}")
    recent = slots = page = 0
    if levels == 3:
        recent, page = retrieval.recent, retrieval.chunk
        slots = (retrieval.budget - recent) // page * page
    offloaded = OffloadedCache(
        target, batch, max_seq_len, recent, limits.scratch_slots, slots, page,
        retrieval.columns(target.heads.dim), offload, pinned,
    )  # fmt: skip
    gathered = None
    if levels == 3:
        shape = tree_shapes(config)[0]
        gathered = GatheredRetrievalView(offloaded, shape.nodes, retrieval, shape.depths)
    return offloaded, partial(StreamedView, offloaded), gathered


def _over_ranks(
    target: HFModel, config: HierarchyConfig, batch: int, max_seq_len: int, levels: int, own: SequenceSplit
) -> DeviceSlots:
    retrieval, limits = config.retrieval, PassLimits.of(config, levels)
    least = share_of(retrieval, own.group.size).budget if levels == 3 else 0
    split = SplitStore(
        target.kv_layers, batch, max_seq_len, limits.scratch_slots, retrieval.chunk, least, own,
        target.device, target.dtype,
    )  # fmt: skip
    split.part.attention = split.whole.attention = chosen(config.attention_backend, target.device)
    retrieval_view = _retrieval_view(SplitRetrievalView, split, config, levels)
    rows = partial(SplitSequenceRows, split)
    return DeviceSlots(split.whole, split, partial(SplitView, split), retrieval_view, rows)


def _with_prefix(
    target: HFModel, config: HierarchyConfig, batch: int, max_seq_len: int, levels: int, prefix: PrefixTree
) -> DeviceSlots:
    retrieval, limits = config.retrieval, PassLimits.of(config, levels)
    slots = max(max_seq_len + limits.scratch_slots, retrieval.budget if levels == 3 else 0)
    page = page_of(prefix.unit, config, levels)
    layout = SlotLayout(
        target.kv_layers,
        batch,
        slots,
        target.device,
        target.dtype,
        page,
        limits.scratch_slots,
        config.kv_bits,
    )
    store: SharedStore
    if prefix.room:
        store = PooledStore(layout, prefix.room, prefix.unit)
    else:
        store = TreeStore(layout, prefix.size.slots, slots - prefix.size.saved)

    store.attention = chosen(config.attention_backend, target.device)

    def view(queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> SharedView:
        return SharedView(store, queries, mask, depths)

    retrieval_view = _retrieval_view(SharedRetrievalView, store, config, levels)
    return DeviceSlots(store, None, view, retrieval_view, SharedSequenceRows, store)


def new_state(
    target: HFModel,
    drafter: Drafter | None,
    extent: PassLimits,
    batch: int,
    max_seq_len: int,
    levels: int,
    shapes: Sequence[DeviceTreeShape],
) -> SequenceState:
    """Buffers for ``batch`` sequences of at most ``max_seq_len`` tokens, with trees of these shapes."""
    vocabulary = target.vocab_size if levels == 3 else 0
    features = features_of(drafter, target, batch, extent.max_draft_tokens + extent.depth + 2)
    # Acceptance by rank is needed to compare shapes.
    depths = [len(shape.widths) for shape in shapes if not shape.matched]
    ranks = (max(depths), MOST_RANKS) if len(depths) > 1 else None
    return SequenceState(
        batch, max_seq_len + extent.scratch_slots, extent.chain, extent.extra, vocabulary,
        target.device, features, ranks, extent.tail,
    )  # fmt: skip


def low_bit_model(target: HFModel, bits: int, compiled: bool, features: Sequence[int]) -> StepModel:
    """The target on a copy of its weights in ``bits`` 8 or 4, for level 1."""
    if bits == 8 and target.streamed is None and has_int8_kernel(target.model):
        return int8_step_model(target, features)
    bring = target.streamed.bring if target.streamed is not None else None
    clone = low_bit_copy(target.model, bits, bring)
    step = StepModel(clone, compiled, target.length_rope, features, target.learned_positions)
    step.capturable = step.capturable and target.capturable is not False
    return step
