"""Assigns positions to ranks, and names the collective that merges the attention of all ranks.

Positions go to ranks in blocks, in turn: position p is kept by rank ``p // block % size``. At every length
each rank holds the same number of positions to within a block, in ascending order, without gaps. Attention is
exact over any division of the keys, since partial results merge by their log-sum-exps (Tree Attention, arXiv
2408.04093).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
        """:meth:`count` of each element."""
        cycle = self.block * self.group.size
        rest = lengths % cycle - self.group.rank * self.block
        return lengths // cycle * self.block + rest.clamp(0, self.block)

    def most(self, length: int) -> int:
        """Most positions that any rank keeps of the first ``length``."""
        return -(-length // (self.block * self.group.size)) * self.block

    def keeps(self, positions: Tensor) -> Tensor:
        """bool: which positions this rank keeps."""
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
        # What other ranks keep goes to a column that is cut off.
        place = torch.where(own, own.cumsum(1) - 1, moves)
        compact = index.new_full((index.shape[0], moves + 1), -1)
        return compact.scatter_(1, place, index)[:, :moves]
