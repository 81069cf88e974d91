"""Buffers of forwards on a GPU: few sizes, one for all steps of a call."""

import pytest

from triforce_tree.branching.layout import MOST_QUERIES, Feed, Sizes, arranged
from triforce_tree.branching.node import Node


def leaves(count: int, depth: int) -> list[Feed]:
    """One token for each of ``count`` leaves, so many nodes below a prompt."""
    root = Node(None, [0] * 9)
    root.stored = 9
    found = []
    for _ in range(count):
        node = root
        for _ in range(depth):
            child = Node(node, [0])
            child.stored = 1
            node.children.append(child)
            node = child
        found.append(Feed(node, 0, 1))
    return found


@pytest.mark.parametrize("count", [1, 5, 8, 30, MOST_QUERIES])
def test_a_few_nodes_more_do_not_change_the_size(count: int) -> None:
    sizes = {Sizes.of(arranged(leaves(count, depth)), on_gpu=True) for depth in (1, 2, 3)}
    assert len({(own.queries, own.owners, own.tail) for own in sizes}) == 1
    [first, *_] = sizes
    assert first.queries >= count
    assert first.tail == 0


def test_runs_of_tokens_have_sizes_of_their_own() -> None:
    root = Node(None, [0] * 300)
    found = {Sizes.of(arranged([Feed(root, 0, count)]), on_gpu=True) for count in (3, 5, 8, 60, 64, 65, 256)}
    assert sorted((own.queries, own.tail) for own in found) == [(8, 64), (64, 64), (128, 256), (256, 256)]
    exact = Sizes.of(arranged([Feed(root, 0, 60)]), on_gpu=False)
    assert (exact.queries, exact.segments, exact.tail) == (60, 1, 60)
