"""The KV slots of one rank: its positions in layers that see all of them, and the windows of the others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.parallel.split import SequenceSplit
from triforce_tree.kv.store import KVStore
from triforce_tree.models.attention import KVShape
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.tensor_parallel import shards_of
from triforce_tree.runtime import distributed


class SplitStore:
    """Stores K and V of B sequences, split over the ranks of a context group.

    Args:
        layers: what each layer keeps; None for a layer without attention.
        batch: B.
        max_seq_len: most tokens of a sequence.
        scratch: most slots after the committed ones that forwards write; each rank has as many.
        page: slots of the unit that tables refer to, which ``split.block`` is a multiple of.
        least: fewest slots of ``part``.
        split: this rank's positions.

    Attributes:
        part: this rank's positions, in layers without a window. Slots count these alone.
        whole: all positions, in layers with a window, which are small; its slots are positions.
    """

    def __init__(
        self,
        layers: Sequence[KVShape | None],
        batch: int,
        max_seq_len: int,
        scratch: int,
        page: int,
        least: int,
        split: SequenceSplit,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.split = split
        full = [shape is not None and _sees_all(shape, max_seq_len) for shape in layers]
        parts = [
            replace(shape, window=None, chunked=False) if shape is not None and own else None
            for shape, own in zip(layers, full, strict=True)
        ]
        others = [None if own else shape for shape, own in zip(layers, full, strict=True)]
        rows = max(split.most(max_seq_len) + scratch, least)
        self.part = KVStore(parts, batch, rows, device, dtype, page)
        self.whole = KVStore(others, batch, max_seq_len + scratch, device, dtype, page, scratch)
        self._parts = frozenset(layer for layer, own in enumerate(full) if own)

    def splits(self, layer: int) -> bool:
        """Returns whether the slots of a layer are split over the ranks."""
        return layer in self._parts

    @contextmanager
    def saved(self, start: int, count: int) -> Iterator[None]:
        """Inside, ``count`` slots of ``part`` after ``start`` tokens may be overwritten."""
        with self.part.saved(self.split.count(start), count):
            yield


def _sees_all(shape: KVShape, max_seq_len: int) -> bool:
    return shape.window is None or shape.window >= max_seq_len


def split_of(target: HFModel, config: HierarchyConfig) -> SequenceSplit | None:
    """This rank's positions under some settings; None where every rank keeps all of them.

    Raises:
        ValueError: the target has recurrent layers, or was loaded for another number of ranks.
    """
    count = config.text_ranks
    if count == 1:
        return None
    if target.states is not None:
        raise ValueError(
            f"context_parallel={count} is not possible with {target.name}: its recurrent layers have a state "
            "for the whole text; leave it out"
        )
    grid = distributed.grid(count)
    if grid is None or shards_of(target.model) != grid.tensor.size:
        raise ValueError(
            f"context_parallel={count}, but the target was loaded for another number; load it with this one, "
            "under torchrun"
        )
    return SequenceSplit(grid.context, config.retrieval.chunk)
