"""The attention mask of a tree, compared with its definition."""

import random

import pytest

from triforce_tree.trees.ancestors import ancestor_mask


def ancestors(parents: list[int], node: int) -> set[int]:
    """Yields the node, its parent, the parent's parent and so on."""
    return {node} | (ancestors(parents, parents[node]) if parents[node] >= 0 else set())


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 65])
def test_a_node_sees_itself_and_its_ancestors(size: int) -> None:
    for _ in range(5):
        parents = [-1, *(random.randrange(node) for node in range(1, size))]
        mask = ancestor_mask(parents)
        for node in range(size):
            assert set(mask[node].nonzero().flatten().tolist()) == ancestors(parents, node)


def test_every_node_with_parent_minus_one_is_a_root() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert ancestor_mask([-1, 0, -1, 2]).int().tolist() == expected
