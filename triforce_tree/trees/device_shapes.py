"""Tree shapes with a fixed number of nodes at each depth, grown without the host; how far passes reach.

What may vary from tree to tree is who follows whom: a child's place is a (parent, rank) pair, rank r
meaning the parent's r-th draw. The honesty rule of ``drafters/base.py`` holds as there: the pairs depend on
laws alone, never on the draws at hand (``kernels.step.place_nodes``).
"""

import math
from dataclasses import dataclass

from triforce_tree.config import HierarchyConfig
from triforce_tree.trees.shapes import BestFirst, Ranks, Shape, parse_shape

_TILE = 16
"""Rows of the host's cache are read by tiles of so many."""


@dataclass(frozen=True)
class DeviceTreeShape:
    """How trees grow.

    Attributes:
        widths: new nodes at depth d + 1.
        places: for each depth the (parent, rank) pairs of its new nodes, parents counted among the nodes
            above: a static topology (chains, Medusa's lists, Sequoia's trees). None: the likeliest
            continuations by the live laws (best-first as in EAGLE-2 and DDTree).
    """

    widths: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...] | None = None

    @property
    def depths(self) -> list[int]:
        """Of each node, the root first."""
        return [0, *(d + 1 for d, width in enumerate(self.widths) for _ in range(width))]

    @property
    def parents(self) -> list[int]:
        """The parent of each node, -1 for the root; where they vary, the first node of the depth above."""
        parents, first = [-1], 0
        for d, width in enumerate(self.widths):
            above = [0] * width if self.places is None else [slot for slot, _ in self.places[d]]
            start = len(parents)
            parents += [first + slot for slot in above]
            first = start
        return parents

    def siblings(self, depth: int) -> int:
        """Most children of one node at ``depth``."""
        if self.places is None:
            return self.widths[depth]
        return 1 + max(rank for _, rank in self.places[depth])


def device_tree_shape(shape: Shape) -> DeviceTreeShape:
    """The same shape for the device."""
    if isinstance(shape, BestFirst):
        return DeviceTreeShape(shape.widths)
    places = tuple(_places(shape.counts))
    return DeviceTreeShape(tuple(len(pairs) for pairs in places), places)


@dataclass(frozen=True)
class Extent:
    """How far the passes of a cycle reach behind a text.

    Attributes:
        depth, nodes: of level 0's trees; 0 and 1 without them.
        max_draft_tokens: most tokens that are proposed to level 2 in a line.
    """

    depth: int
    nodes: int
    max_draft_tokens: int

    @classmethod
    def of(cls, config: HierarchyConfig, levels: int) -> "Extent":
        shape = device_tree_shape(parse_shape(config.tree)) if levels > 1 else None
        depth, nodes = (len(shape.widths), 1 + sum(shape.widths)) if shape is not None else (0, 1)
        return cls(depth, nodes, config.gamma if levels == 3 else depth)

    @property
    def scratch_slots(self) -> int:
        """Rows and tokens behind a text's end that passes, and a capture's trial runs, may write."""
        return 4 * (self.max_draft_tokens + self.depth + self.nodes) + 64


def least_prompt(config: HierarchyConfig, levels: int, offloaded: bool) -> int:
    """Tokens that a text must have for so many levels."""
    if levels < 3 or not offloaded:
        return 1
    # The slots are filled from rows that have left the window, which they do in whole units.
    return config.retrieval.budget + unit_rows(config.retrieval.chunk) + 1


def unit_rows(chunk: int) -> int:
    """Rows that an offloaded cache is counted in: whole chunks, and whole tiles of the attention."""
    return math.lcm(chunk, _TILE)


def _places(counts: dict[Ranks, int]) -> list[tuple[tuple[int, int], ...]]:
    frontier: list[Ranks] = [()]
    places = []
    while pairs := [(slot, r) for slot, path in enumerate(frontier) for r in range(counts.get(path, 0))]:
        places.append(tuple(pairs))
        frontier = [(*frontier[slot], rank) for slot, rank in pairs]
    return places
