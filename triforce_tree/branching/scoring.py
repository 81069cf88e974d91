"""Log-probabilities of the tokens of nodes that were given, not generated."""

from collections.abc import Sequence

from triforce_tree.branching.forward import MOST_QUERIES
from triforce_tree.branching.layout import Feed
from triforce_tree.branching.node import Node
from triforce_tree.branching.slots import TreeSlots
from triforce_tree.verify.sampling import NAN_LOGITS


def fill_logprobs(slots: TreeSlots, nodes: Sequence[Node]) -> None:
    """Compute the log-probabilities of the nodes' own tokens that are not known.

    Nodes of one tree are scored together. Tokens that are already stored are fed again if their logits are
    needed, because logits are not kept.

    Raises:
        ValueError: NaN logits.
        TreeFullError: there are no slots for the tokens that are not stored yet.
    """
    unknown = [node for node in dict.fromkeys(nodes) if None in node.logprobs]
    slots.fill({parent: len(parent.tokens) for node in unknown for parent in node.path[:-1]})
    # By node, the first of its tokens whose logits are needed, and the end of them.
    ranges: dict[Node, tuple[int, int]] = {}
    after: dict[Node, list[Node]] = {}

    def add(node: Node, first: int, stop: int) -> None:
        low, high = ranges.get(node, (first, stop))
        ranges[node] = min(low, first), max(high, stop)

    for node in unknown:
        first, count = node.logprobs.index(None), len(node.tokens)
        if first == 0 and node.parent is not None:
            tip = node.parent.tip
            add(tip, len(tip.tokens) - 1, len(tip.tokens))
            after.setdefault(tip, []).append(node)
        if count > 1:
            add(node, min(node.stored, max(0, first - 1)), count - 1)
    slots.reserve({node: stop for node, (_, stop) in ranges.items()})
    feeds: list[Feed] = []
    free = MOST_QUERIES
    for node in sorted(ranges, key=lambda node: len(node.path)):
        start, stop = ranges[node]
        while start < stop:
            feeds.append(Feed(node, start, min(free, stop - start)))
            start, free = feeds[-1].stop, free - feeds[-1].size
            if not free:
                _read(slots, feeds, after)
                feeds, free = [], MOST_QUERIES
    _read(slots, feeds, after)


def _read(slots: TreeSlots, feeds: Sequence[Feed], after: dict[Node, list[Node]]) -> None:
    """Feed tokens, and note the log-probabilities of those that follow them.

    Args:
        after: by node, the nodes whose first tokens follow its last one.
    """
    if not feeds:
        return
    logprobs = slots.logits(feeds).float().log_softmax(-1)
    if bool(logprobs.isnan().any()):
        raise ValueError(NAN_LOGITS)
    places: list[tuple[int, Node, int]] = []
    row = 0
    for node, start, count in feeds:
        for index in range(start + 1, start + count + 1):
            inside = index < len(node.tokens)
            places += [(row, node, index)] if inside else [(row, n, 0) for n in after.get(node, ())]
            row += 1
    lines = [row for row, _, _ in places]
    found = logprobs[lines, [node.tokens[index] for _, node, index in places]].tolist()
    for (_, node, index), value in zip(places, found, strict=True):
        node.logprobs[index] = value
