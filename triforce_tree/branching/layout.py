"""The layout of a forward over a tree of texts: the order of its tokens, and what each token sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triforce_tree.branching.node import Node
from triforce_tree.kernels.attention.blocks.plan import Segment

MOST_QUERIES = 256
"""Most tokens of one forward."""
# Least capacities on a GPU. A tree changes a little with every token, and its forward's sizes should not.
_LEAST_SEGMENTS, _LEAST_DEPTH = 16, 4


class Feed(NamedTuple):
    """Tokens of one node that a forward processes.

    Attributes:
        node: the node.
        start: index of the first token in the node. All earlier tokens of the text are stored, or are
            processed by the same forward.
        size: number of tokens.
    """

    node: Node
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class Layout(NamedTuple):
    """The queries of a forward in depth-first order, so that the queries that see a node are a range.

    Attributes:
        feeds: in the order of their queries.
        segments: what the queries see; ``Segment.node`` indexes ``nodes``.
        nodes: the nodes with tokens that some query sees.
    """

    feeds: list[Feed]
    segments: list[Segment]
    nodes: list[Node]


def arranged(feeds: Sequence[Feed]) -> Layout:
    """Returns the layout of a forward, with at most one feed per node.

    A token sees all tokens of the earlier nodes of its text, including those of this forward, and the tokens
    of its own node up to itself.
    """
    rank: dict[Node, int] = {}
    for feed in feeds:
        for node in feed.node.path:
            rank.setdefault(node, len(rank))
    order = sorted(feeds, key=lambda feed: [rank[node] for node in feed.node.path])
    # Maps each node to the range of the queries of itself and of the nodes below it. Its own queries come
    # first.
    spans: dict[Node, tuple[int, int]] = {}
    queries = 0
    for feed in order:
        stop = queries + feed.size
        for node in feed.node.path:
            spans[node] = spans.get(node, (queries, stop))[0], stop
        queries = stop
    own = {feed.node: feed for feed in feeds}
    segments: list[Segment] = []
    nodes: list[Node] = []
    for node, span in spans.items():
        tokens = max(node.stored, own[node].stop if node in own else 0)
        if tokens:
            segments += _segments(len(nodes), tokens, own.get(node), *span)
            nodes.append(node)
    return Layout(order, segments, nodes)


def _segments(number: int, tokens: int, own: Feed | None, first: int, stop: int) -> list[Segment]:
    """Returns the segments of a node with ``tokens`` tokens, for the queries ``first`` to ``stop``. The first
    of these queries are the node's own.
    """
    found = []
    # The query of a node's last token sees what the queries below the node see.
    if own is not None and not (own.size == 1 and own.stop == tokens):
        length, tail = (own.stop, 0) if own.size == 1 else (own.start, own.size)
        found.append(Segment(number, length, tail, first, own.size))
        first += own.size
    if first < stop:
        found.append(Segment(number, tokens, 0, first, stop - first))
    return found


@dataclass(frozen=True)
class Sizes:
    """Capacities of the buffers of a forward. On a GPU they are powers of two, so that few are captured.

    Attributes:
        queries, segments: most of each.
        owners: most pairs of a query and a segment that it sees.
        tail: most positions of a segment's tail.
    """

    queries: int
    segments: int
    owners: int
    tail: int

    @classmethod
    def of(cls, layout: Layout, on_gpu: bool) -> "Sizes":
        queries = sum(feed.size for feed in layout.feeds)
        segments = max(len(layout.segments), 1)
        owners = max(sum(segment.queries for segment in layout.segments), 1)
        tail = max((segment.tail for segment in layout.segments), default=0)
        if not on_gpu:
            return cls(queries, segments, owners, tail)
        queries = _power(queries, 8)
        tail = tail and (64 if tail <= 64 else MOST_QUERIES)
        return cls(queries, _power(segments, _LEAST_SEGMENTS), _power(owners, _LEAST_DEPTH * queries), tail)


def _power(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())
