"""The KV slots of a batch on the device: of one process, or its part of those that several ranks keep."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.stages import FullView
from triforce_tree.kv.parallel.split import SequenceSplit
from triforce_tree.kv.parallel.store import SplitStore, split_of
from triforce_tree.kv.parallel.views import SplitRetrievalView, SplitView, share_of
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import PagedRetrievalView, TreeAttentionView
from triforce_tree.kv.view import ChunkedView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.trees.device_shapes import PassLimits, tree_shapes


class DeviceSlots(NamedTuple):
    """Slots and views of them; see ``FullCache`` for each."""

    store: KVStore
    split: SplitStore | None
    view: FullView
    retrieval_view: ChunkedView | None


def device_slots(
    target: HFModel,
    config: HierarchyConfig,
    batch: int,
    max_seq_len: int,
    levels: int,
    store: KVStore | None,
    kept: KVStore | None,
) -> DeviceSlots:
    """The slots of a full cache on the device, and the views of its levels.

    Args:
        store: to work on; by default ``kept`` where it serves, else a new one.

    Raises:
        ValueError: a store that is too small, of other bits, or cannot be paged by chunks; settings under
            which several ranks cannot keep the slots.
    """
    split = split_of(target, config)
    if split is not None:
        return _over_ranks(target, config, batch, max_seq_len, levels, split)
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

    def view(queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> TreeAttentionView:
        return TreeAttentionView(own, queries, mask=mask, depths=depths)

    retrieval_view = None
    if levels == 3:
        shape = tree_shapes(config)[0]
        growth = limits.max_draft_tokens + 1 + limits.nodes - shape.nodes
        retrieval_view = PagedRetrievalView(own, shape.nodes, retrieval, growth, shape.depths)
    return DeviceSlots(own, None, view, retrieval_view)


def _over_ranks(
    target: HFModel, config: HierarchyConfig, batch: int, max_seq_len: int, levels: int, own: SequenceSplit
) -> DeviceSlots:
    retrieval, limits = config.retrieval, PassLimits.of(config, levels)
    least = share_of(retrieval, own.group.size).budget if levels == 3 else 0
    split = SplitStore(
        target.kv_layers, batch, max_seq_len, limits.scratch_slots, retrieval.chunk, least, own,
        target.device, target.dtype,
    )  # fmt: skip
    retrieval_view = None
    if levels == 3:
        shape = tree_shapes(config)[0]
        growth = limits.max_draft_tokens + 1 + limits.nodes - shape.nodes
        retrieval_view = SplitRetrievalView(split, shape.nodes, retrieval, growth, shape.depths)
    return DeviceSlots(split.whole, split, partial(SplitView, split), retrieval_view)
