"""Tree shapes with a fixed number of nodes at each depth, grown on the device alone; the limits of a pass.

The parents of nodes may vary from tree to tree: a child is a (parent, rank) pair, rank r meaning the parent's
r-th draw. By the honesty rule of ``drafters/base.py`` the pairs depend on distributions alone, never on the
draws of these children (``kernels.step.place_nodes``).
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from triforce_tree.config import HierarchyConfig
from triforce_tree.trees.sequoia import Ranks
from triforce_tree.trees.shapes import BestFirst, Lookup, Shape, WithChain, parse_shape

_TILE = 16
"""KV slots in host memory are read in tiles of this many."""


@dataclass(frozen=True)
class DeviceTreeShape:
    """The nodes of a tree, depth by depth.

    Attributes:
        widths: ``widths[d]`` nodes at depth d + 1.
        places: ``places[d]`` are the (parent, rank) pairs of the nodes at depth d + 1, parents counted among
            the nodes at depth d: a static topology (chains, Medusa's lists, Sequoia's trees). None: the most
            probable continuations by the draft distributions (best-first as in EAGLE-2 and DDTree).
        chain: nodes of a chain beside the tree, after all of its own; the first at depth 1.
        matched: whether it is a chain of tokens that followed the newest ones earlier (``shapes.Lookup``).
    """

    widths: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...] | None = None
    chain: int = 0
    matched: bool = False

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(len(self.widths), self.chain)

    @property
    def tree_nodes(self) -> int:
        """Nodes of the tree, without those of the chain."""
        return 1 + sum(self.widths)

    @property
    def nodes(self) -> int:
        """All nodes, the root included."""
        return self.tree_nodes + self.chain

    @property
    def depths(self) -> list[int]:
        """The depth of each node, the root first."""
        tree = (d + 1 for d, width in enumerate(self.widths) for _ in range(width))
        return [0, *tree, *range(1, self.chain + 1)]

    @property
    def parents(self) -> list[int]:
        """The parent of each node, -1 for the root; if parents vary, the first node of the depth above."""
        parents, first = [-1], 0
        for d, width in enumerate(self.widths):
            above = [0] * width if self.places is None else [slot for slot, _ in self.places[d]]
            start = len(parents)
            parents += [first + slot for slot in above]
            first = start
        start = len(parents)
        return parents + [0, *range(start, start + self.chain)][: self.chain]

    def siblings(self, depth: int) -> int:
        """Most children of a node at ``depth``."""
        if self.places is None:
            return self.widths[depth]
        return 1 + max(rank for _, rank in self.places[depth])


@lru_cache(maxsize=256)
def device_tree_shape(shape: Shape) -> DeviceTreeShape:
    """The layout of a shape's nodes."""
    if isinstance(shape, WithChain):
        return replace(device_tree_shape(parse_shape(shape.tree)), chain=shape.length)
    if isinstance(shape, BestFirst):
        return DeviceTreeShape(shape.widths)
    places = tuple(_places(shape.counts))
    return DeviceTreeShape(tuple(len(pairs) for pairs in places), places, matched=isinstance(shape, Lookup))


def tree_shapes(config: HierarchyConfig) -> list[DeviceTreeShape]:
    """The layouts of ``config.shapes``."""
    return list(_layouts(config.shapes))


@lru_cache(maxsize=256)
def _layouts(shapes: tuple[str | Shape, ...]) -> tuple[DeviceTreeShape, ...]:
    return tuple(device_tree_shape(parse_shape(shape)) for shape in shapes)


@dataclass(frozen=True)
class PassLimits:
    """The most tokens that the passes of a configuration draft and write.

    Attributes:
        depth, nodes: most of level 0's trees, the root included in ``nodes``; 0 and 1 without trees.
        max_draft_tokens: most tokens of a path that is proposed to level 2.
        chain: the same of level 1's chain; 0 without level 1.
        tail: nodes of the tree at the end of a chain, without its root; 0 without one.
    """

    depth: int
    nodes: int
    max_draft_tokens: int
    chain: int = 0
    tail: int = 0

    @classmethod
    def of(cls, config: HierarchyConfig, levels: int) -> "PassLimits":
        shapes = tree_shapes(config) if levels > 1 else [DeviceTreeShape(())]
        depth, nodes = max(shape.depth for shape in shapes), max(shape.nodes for shape in shapes)
        chain = config.gamma if levels == 3 else 0
        tail = shapes[0].nodes - 1 if levels == 3 and config.tail_tree else 0
        return cls(depth, nodes, chain or depth, chain, tail)

    def chain_nodes(self, runner_ups: bool = True) -> int:
        """Most tokens of a sequence in the target's forward over a chain, runner-ups and tail included."""
        return 1 + self.max_draft_tokens * (2 if runner_ups else 1) + self.tail

    @property
    def extra(self) -> int:
        """Most tokens that one verification may write beyond ``chain``; at least 1."""
        return self.depth + 1 if self.chain else max(1, self.depth)

    @property
    def scratch_slots(self) -> int:
        """KV slots and tokens after a sequence's end that passes and trial runs of a capture may write."""
        return 4 * (self.max_draft_tokens + self.depth + self.nodes) + 64


def least_prompt(config: HierarchyConfig, levels: int, offloaded: bool) -> int:
    """Fewest tokens of a prompt for this number of levels."""
    if levels < 3 or not offloaded:
        return 1
    # Retrieval slots are filled from KV slots that have left the recent window, in multiples of unit_slots.
    return config.retrieval.budget + unit_slots(config.retrieval.chunk) + 1


def unit_slots(chunk: int) -> int:
    """KV slots per unit of an offloaded cache: whole chunks, and whole tiles of the attention kernel."""
    return math.lcm(chunk, _TILE)


def _places(counts: dict[Ranks, int]) -> list[tuple[tuple[int, int], ...]]:
    frontier: list[Ranks] = [()]
    places = []
    while pairs := [(slot, r) for slot, path in enumerate(frontier) for r in range(counts.get(path, 0))]:
        places.append(tuple(pairs))
        frontier = [(*frontier[slot], rank) for slot, rank in pairs]
    return places
