"""The KV slots of one rank: its positions in layers that see all of them, and the windows of the others.

Positions go to ranks in blocks, in turn: position p is kept by rank ``p // block % size``. At every length
each rank holds the same number of positions to within a block, in ascending order, without gaps. Attention is
exact over any division of the keys, since partial results merge by their log-sum-exps (Tree Attention, arXiv
2408.04093).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig, RetrievalConfig
from triforce_tree.kv.backend import CacheSpec
from triforce_tree.kv.store import KVStore
from triforce_tree.models.attention import KVShape
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.tensor_parallel import shards_of
from triforce_tree.runtime import distributed
from triforce_tree.runtime.distributed import Group


@dataclass(frozen=True)
class SequenceSplit:
    """Holds the positions of one rank of a context group.

    Attributes:
        group: the ranks.
        block: consecutive positions of a rank, whole chunks of the retrieval.
    """

    group: Group
    block: int

    @property
    def has_tail(self) -> bool:
        """Returns whether this rank attends to the new tokens of a forward, which all ranks have.

        It is the last rank, which never has more positions than another. It also counts the attention sinks
        of a model, which must count once.
        """
        return self.group.rank == self.group.size - 1

    def count(self, length: int) -> int:
        """Returns how many of the first ``length`` positions this rank keeps."""
        cycle = self.block * self.group.size
        rest = length % cycle - self.group.rank * self.block
        return length // cycle * self.block + max(0, min(rest, self.block))

    def counts(self, lengths: Tensor) -> Tensor:
        """Returns :meth:`count` of each element."""
        cycle = self.block * self.group.size
        rest = lengths % cycle - self.group.rank * self.block
        return lengths // cycle * self.block + rest.clamp(0, self.block)

    def most(self, length: int) -> int:
        """Returns the most positions that any rank keeps of the first ``length``."""
        return -(-length // (self.block * self.group.size)) * self.block

    def keeps(self, positions: Tensor) -> Tensor:
        """Returns which positions this rank keeps, bool."""
        return positions // self.block % self.group.size == self.group.rank

    def kept(self, index: Tensor, start: Tensor) -> Tensor:
        """Returns those moves of a commit whose destinations this rank keeps.

        All ranks hold the new tokens of a forward in the slots after their own positions, in the same order.

        Args:
            index: int64 ``[B, R]``: new token ``index[b, i]`` becomes position ``start[b] + i``; -1 moves
                none.
            start: int64 ``[B]``, committed tokens.

        Returns:
            int64 ``[B, R]``: new token ``[b, j]`` goes to this rank's j-th slot after its own; -1 moves none.
        """
        moves = index.shape[1]
        own = self.keeps(start[:, None] + torch.arange(moves, device=index.device))
        # Entries that other ranks keep go to an additional column, which is cut off.
        place = torch.where(own, own.cumsum(1) - 1, moves)
        compact = index.new_full((index.shape[0], moves + 1), -1)
        return compact.scatter_(1, place, index)[:, :moves]


class SplitStore:
    """Stores K and V of B sequences, split over the ranks of a context group.

    Args:
        spec: what the slots of all ranks together are needed for. Each rank has as many scratch slots, and
            ``split.block`` is whole chunks of the retrieval, which are the pages.
        split: this rank's positions.

    Attributes:
        part: this rank's positions, in layers that see all of them. Slots count these alone.
        whole: all positions, in layers with a window, which are small; its slots are positions.
    """

    def __init__(self, spec: CacheSpec, split: SequenceSplit) -> None:
        self.split = split
        target, retrieval, length = spec.target, spec.config.retrieval, spec.max_seq_len
        parts: list[KVShape | None] = []
        others: list[KVShape | None] = []
        for shape in target.kv_layers:
            if shape is None or (shape.window is not None and shape.window < length):
                parts.append(None)
                others.append(shape)
            else:
                parts.append(replace(shape, window=None, chunked=False))
                others.append(None)
        least = share_of(retrieval, split.group.size).budget if spec.levels == 3 else 0
        slots = max(split.most(length) + spec.scratch, least)
        where = target.device, target.dtype, retrieval.chunk
        self.part = KVStore(parts, spec.batch, slots, *where)
        self.whole = KVStore(others, spec.batch, length + spec.scratch, *where, spec.scratch)
        self.part.attention = self.whole.attention = spec.attention

    def splits(self, layer: int) -> bool:
        """Returns whether the slots of a layer are split over the ranks."""
        return layer in self.part.layers


def share_of(config: RetrievalConfig, ranks: int) -> RetrievalConfig:
    """Returns the retrieval settings of one rank: its share of the tokens, rounded up to whole chunks."""
    chunk = config.chunk
    recent = -(-config.recent // (ranks * chunk)) * chunk
    selected = -(-(config.budget - config.recent) // (ranks * chunk)) * chunk
    return replace(config, recent=recent, budget=recent + selected)


def split_of(target: HFModel, config: HierarchyConfig) -> SequenceSplit | None:
    """Returns this rank's positions under some settings; None if every rank keeps all of them.

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
