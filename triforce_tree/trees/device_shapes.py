"""The layout of a tree's nodes in device buffers, and the most tokens that a pass drafts and writes.

A layout has a fixed number of nodes at each depth, so that trees are grown without waiting for the device.
Parents may vary from tree to tree: a child is a (parent, rank) pair, where rank r means the parent's r-th
draw. By the honesty rule of ``drafters/base.py`` the pairs depend on distributions alone, never on the draws
(``kernels.step.place_nodes``). A pass is one run of drafting, verification by the retrieval model (level 1),
and verification by the target (level 2).
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from triforce_tree.config import HierarchyConfig
from triforce_tree.trees.sequoia import Ranks
from triforce_tree.trees.shapes import BestFirst, Lookup, Shape, parse_shape

_TILE = 16
"""KV slots in host memory are read in tiles of this many."""
# Tokens of a pass from which on a device computes longer than it reads the weights.
_MANY_TOKENS = 512


@dataclass(frozen=True)
class DeviceTreeShape:
    """The number of nodes of a tree at each depth, and their parents if they are fixed.

    Attributes:
        widths: ``widths[d]`` is the number of nodes at depth d + 1.
        places: ``places[d]`` lists the (parent, rank) pairs of the nodes at depth d + 1 for a static topology
            (chains, Medusa's lists, Sequoia's trees), where parent is an index among the nodes at depth d.
            None for a best-first tree, which takes the continuations that are most likely to be accepted.
        matched: whether the tree is a chain of suffix-matched tokens (``shapes.Lookup``).
    """

    widths: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...] | None = None
    matched: bool = False

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.widths)

    @cached_property
    def nodes(self) -> int:
        """The number of nodes, including the root."""
        return 1 + sum(self.widths)

    @cached_property
    def depths(self) -> list[int]:
        """The depth of each node, the root first."""
        return [0, *(d + 1 for d, width in enumerate(self.widths) for _ in range(width))]

    @cached_property
    def parents(self) -> list[int]:
        """The parent of each node, -1 for the root. If parents vary, it is the first node one depth above."""
        parents, first = [-1], 0
        for d, width in enumerate(self.widths):
            above = [0] * width if self.places is None else [slot for slot, _ in self.places[d]]
            start = len(parents)
            parents += [first + slot for slot in above]
            first = start
        return parents

    def siblings(self, depth: int) -> int:
        """Returns the most children of a node at ``depth``."""
        if self.places is None:
            return self.widths[depth]
        return 1 + max(rank for _, rank in self.places[depth])


@lru_cache(maxsize=256)
def device_tree_shape(shape: Shape) -> DeviceTreeShape:
    """Returns the layout of a shape's nodes."""
    if isinstance(shape, BestFirst):
        return DeviceTreeShape(shape.widths)
    places = tuple(_places(shape.counts))
    return DeviceTreeShape(tuple(len(pairs) for pairs in places), places, matched=isinstance(shape, Lookup))


@lru_cache(maxsize=256)
def tree_shapes(config: HierarchyConfig) -> tuple[DeviceTreeShape, ...]:
    """Returns the layouts of ``config.shapes``."""
    return tuple(device_tree_shape(parse_shape(shape)) for shape in config.shapes)


def most_sequences(shape: DeviceTreeShape) -> int:
    """Returns the most sequences of a batch whose passes take a further shape: a pass of many tokens for many
    sequences seldom pays, and its stages take memory.
    """
    return max(1, _MANY_TOKENS // shape.nodes)


@dataclass(frozen=True)
class PassLimits:
    """The most tokens that the passes of a configuration draft and write.

    Attributes:
        depth, nodes: depth of the drafter's deepest tree, and most nodes of its trees including the root; 0
            and 1 without trees.
        max_draft_tokens: most tokens that can be proposed to the target on one path, without ``tail``.
        chain: most tokens of the retrieval model's chain; 0 without retrieval model.
        tail: nodes, without its root, of the tree that continues the chain; 0 without such a tree.
    """

    depth: int
    nodes: int
    max_draft_tokens: int
    chain: int = 0
    tail: int = 0

    def chain_nodes(self, runner_ups: bool = True) -> int:
        """Returns the most tokens per sequence in a forward of the target that verifies a chain.

        Args:
            runner_ups: whether the second choice at each position of the chain is verified too.
        """
        return 1 + self.max_draft_tokens * (2 if runner_ups else 1) + self.tail

    @property
    def extra(self) -> int:
        """The most tokens that one verification may write beyond ``chain``; at least 1."""
        return self.depth + 1 if self.chain else max(1, self.depth)

    @property
    def scratch_slots(self) -> int:
        """The most KV slots after a sequence's end that passes, or trial runs for capture, may write."""
        return 4 * (self.max_draft_tokens + self.depth + self.nodes) + 64


@lru_cache(maxsize=256)
def pass_limits(config: HierarchyConfig, levels: int) -> PassLimits:
    """Returns the most tokens that passes of up to ``levels`` levels draft and write."""
    shapes = tree_shapes(config) if levels > 1 else (DeviceTreeShape(()),)
    depth, nodes = max(shape.depth for shape in shapes), max(shape.nodes for shape in shapes)
    chain = config.gamma if levels == 3 else 0
    tail = shapes[0].nodes - 1 if levels == 3 and config.tail_tree else 0
    return PassLimits(depth, nodes, chain or depth, chain, tail)


def least_prompt(config: HierarchyConfig, levels: int) -> int:
    """Returns the fewest tokens that a prompt must have in an offloaded cache for this number of levels."""
    if levels < 3:
        return 1
    # The retrieval cache is filled with KV slots older than the recent window, in multiples of unit_slots.
    return config.retrieval.budget + unit_slots(config.retrieval.chunk) + 1


def unit_slots(chunk: int) -> int:
    """Returns the KV slots per unit of an offloaded cache, a multiple of ``chunk`` and the kernel's tile."""
    return math.lcm(chunk, _TILE)


def _places(counts: dict[Ranks, int]) -> list[tuple[tuple[int, int], ...]]:
    frontier: list[Ranks] = [()]
    places = []
    while pairs := [(slot, r) for slot, path in enumerate(frontier) for r in range(counts.get(path, 0))]:
        places.append(tuple(pairs))
        frontier = [(*frontier[slot], rank) for slot, rank in pairs]
    return places
