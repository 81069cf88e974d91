"""Tree shapes with a fixed number of nodes at each depth, grown without the host.

What may vary from tree to tree is who follows whom: a child's place is a (parent, rank) pair, rank r
meaning the parent's r-th draw. The honesty rule of ``drafters/base.py`` holds as there: the pairs depend on
laws alone, never on the draws at hand.
"""

from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.tree_search import BestFirst, Ranks, Shape, Static


class DeviceShape(Protocol):
    """``widths[d]`` new nodes at depth d + 1."""

    widths: tuple[int, ...]

    def siblings(self, depth: int) -> int:
        """Most children of one node at ``depth``."""

    def places(self, depth: int, laws: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """int64 ``[B, w]`` each: the parent (its place among the F of its depth) and rank of new nodes.

        Args:
            depth: of the parents.
            laws: fp32 ``[B, F, V]`` at the parents.
            values: fp32 ``[B, F]``, products of the draft's probabilities along the paths to them.
        """


class LivePlaces:
    """Best-first (EAGLE-2, DDTree): the likeliest continuations by the live laws."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths

    def siblings(self, depth: int) -> int:
        return self.widths[depth]

    def places(self, depth: int, laws: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        width = self.widths[depth]
        best = min(width, laws.shape[-1])
        # The i-th largest probability stands for the chance of the i-th draw, whatever it will bring.
        by_rank = laws.topk(best).values * values[..., None]
        chosen = by_rank.flatten(1).topk(width).indices.sort(dim=1).values
        parents = chosen // best
        # Draws come in order: a parent with n chosen places gets its first n draws.
        elder = torch.searchsorted(parents, parents)
        return parents, torch.arange(width, device=laws.device) - elder


class FixedPlaces:
    """A static topology (chains, Medusa's lists, Sequoia's trees)."""

    def __init__(self, counts: dict[Ranks, int]) -> None:
        frontier: list[Ranks] = [()]
        self._places: list[tuple[list[int], list[int]]] = []
        while True:
            pairs = [(slot, r) for slot, path in enumerate(frontier) for r in range(counts.get(path, 0))]
            if not pairs:
                break
            self._places.append(([slot for slot, _ in pairs], [rank for _, rank in pairs]))
            frontier = [(*frontier[slot], rank) for slot, rank in pairs]
        self.widths = tuple(len(parents) for parents, _ in self._places)
        self._tensors: dict[tuple[int, torch.device], Tensor] = {}

    def siblings(self, depth: int) -> int:
        return max(self._places[depth][1]) + 1

    def places(self, depth: int, laws: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        key = (depth, laws.device)
        if key not in self._tensors:
            # Made by the first, eager run: a graph under capture could not copy from the host.
            self._tensors[key] = torch.tensor(self._places[depth], device=laws.device)
        parents, ranks = self._tensors[key][:, None].expand(-1, laws.shape[0], -1)
        return parents, ranks


def device_shape(shape: Shape) -> DeviceShape | None:
    """The same shape for the device; None where it has no fixed number of nodes."""
    if isinstance(shape, BestFirst):
        return LivePlaces(shape.widths)
    if isinstance(shape, Static):
        return FixedPlaces(shape.counts)
    return None
