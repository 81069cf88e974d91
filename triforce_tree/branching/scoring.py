"""Log-probabilities of the tokens of nodes that were given, not generated."""

from collections.abc import Iterator, Mapping, Sequence

from triforce_tree.branching.layout import Feed
from triforce_tree.branching.node import Node
from triforce_tree.branching.slots import TreeSlots
from triforce_tree.verify.sampling import NAN_LOGITS

Place = tuple[Node, int]
"""A node, and the index of one of its tokens."""


def fill_logprobs(slots: TreeSlots, nodes: Sequence[Node]) -> None:
    """Computes the log-probabilities of the nodes' own tokens that are not known, for all nodes together.

    Tokens that are stored already are processed again where their logits are needed, because logits are not
    kept.

    Raises:
        ValueError: logits are NaN.
        TreeFullError: there are no KV slots for the tokens that are not stored yet.
    """
    unknown = [node for node in dict.fromkeys(nodes) if None in node.logprobs]
    slots.fill({parent: len(parent.tokens) for node in unknown for parent in node.path[:-1]})
    # Maps the place of a token to the tokens whose log-probabilities are read from its logits.
    following: dict[Place, list[Place]] = {}
    # Maps each node to the range of its tokens that are processed.
    ranges: dict[Node, tuple[int, int]] = {}
    for node in unknown:
        for index, known in enumerate(node.logprobs):
            if known is not None:
                continue
            before, last = node, index - 1
            if not index:
                assert node.parent is not None, "nothing predicts the first token of the whole text"
                before = node.parent.tip
                last = len(before.tokens) - 1
            following.setdefault((before, last), []).append((node, index))
            first, stop = ranges.get(before, (before.stored, 0))
            ranges[before] = min(first, last), max(stop, last + 1)
    slots.pages.reserve({node: stop for node, (_, stop) in ranges.items()})
    for feeds in _parts(ranges, slots.most_queries):
        logprobs = slots.logits(feeds).float().log_softmax(-1)
        if bool(logprobs.isnan().any()):
            raise ValueError(NAN_LOGITS)
        places = [(feed.node, index) for feed in feeds for index in range(feed.start, feed.stop)]
        found = [(n, after) for n, place in enumerate(places) for after in following.get(place, ())]
        tokens = [node.tokens[index] for _, (node, index) in found]
        values = logprobs[[n for n, _ in found], tokens].tolist()
        for (_, (node, index)), value in zip(found, values, strict=True):
            node.logprobs[index] = value


def _parts(ranges: Mapping[Node, tuple[int, int]], most: int) -> Iterator[list[Feed]]:
    """Yields the feeds of forwards of at most ``most`` tokens. Parents precede their children."""
    feeds: list[Feed] = []
    for node in sorted(ranges, key=lambda node: len(node.path)):
        start, stop = ranges[node]
        while start < stop:
            free = most - sum(feed.size for feed in feeds)
            feeds.append(Feed(node, start, min(free, stop - start)))
            start = feeds[-1].stop
            if feeds[-1].size == free:
                yield feeds
                feeds = []
    if feeds:
        yield feeds
