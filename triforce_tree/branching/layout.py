"""The layout of a forward over a tree of texts: the tokens of each node, their order, and what each token
sees.
"""

from collections.abc import Sequence
from typing import NamedTuple

from triforce_tree.branching.node import Node
from triforce_tree.kernels.attention.segments import Segment


class Feed(NamedTuple):
    """Tokens of one node that a forward brings.

    Attributes:
        node: whose tokens they are.
        start: the first of them, counted in the node; all tokens before it are stored, or the forward's own.
        size: how many.
    """

    node: Node
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class Layout(NamedTuple):
    """Queries of a forward in depth-first order.

    Attributes:
        feeds: in the order of their queries.
        segments: what the queries see; ``Segment.node`` indexes ``nodes``.
        nodes: that hold tokens which some query sees.
        owners: pairs of a query and a segment that it sees.
    """

    feeds: list[Feed]
    segments: list[Segment]
    nodes: list[Node]
    owners: int


def arranged(feeds: Sequence[Feed]) -> Layout:
    """Returns the layout of a forward, with at most one feed per node.

    A token sees all tokens of the earlier nodes on its path, including those of this forward, and the tokens
    of its own node up to itself.
    """
    by_node = {feed.node: feed for feed in feeds}
    below: dict[Node, list[Node]] = {}
    roots: list[Node] = []
    known: set[Node] = set()
    for feed in feeds:
        node = feed.node
        while node not in known:
            known.add(node)
            if node.parent is None:
                roots.append(node)
                break
            below.setdefault(node.parent, []).append(node)
            node = node.parent
    order: list[Feed] = []
    segments: list[Segment] = []
    nodes: list[Node] = []
    queries = 0
    # (node, the first of its own queries and of those below it once it has been entered, else -1).
    stack: list[tuple[Node, int]] = [(root, -1) for root in reversed(roots)]
    while stack:
        node, first = stack.pop()
        own = by_node.get(node)
        if first < 0:
            stack.append((node, queries))
            stack += [(child, -1) for child in reversed(below.get(node, ()))]
            if own is not None:
                order.append(own)
                queries += own.size
            continue
        count = max(node.stored, own.stop if own is not None else 0)
        if count:
            segments += _segments(len(nodes), count, own, first, queries)
            nodes.append(node)
    return Layout(order, segments, nodes, sum(segment.queries for segment in segments))


def _segments(number: int, tokens: int, own: Feed | None, first: int, stop: int) -> list[Segment]:
    """Returns the segments of a node with ``tokens`` tokens, for the queries ``first`` to ``stop``. The first
    of these queries are the node's own.
    """
    count = 0 if own is None else own.size
    if own is not None and count == 1 and own.stop == tokens:
        count = 0  # Its only query sees what those below it see.
    found = []
    if own is not None and count == 1:
        found.append(Segment(number, own.stop, 0, first, 1))
    elif own is not None and count:
        found.append(Segment(number, own.start, count, first, count))
    if first + count < stop:
        found.append(Segment(number, tokens, 0, first + count, stop - first - count))
    return found
