"""Topology of token trees, and contexts with a look ahead."""

import random

import pytest
import torch

from triforce_tree.token_tree import Context, TokenTree, ancestor_mask, chain


def random_tree(size: int) -> TokenTree:
    parents = [-1, *(random.randrange(node) for node in range(1, size))]
    return TokenTree(list(range(100, 100 + size)), parents)


def ancestors(tree: TokenTree, node: int) -> set[int]:
    """From the definition: the node, its parent, the parent's parent, ..."""
    return {node} | (ancestors(tree, tree.parents[node]) if node else set())


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 65])
def test_every_view_of_a_topology_agrees(size: int) -> None:
    for _ in range(5):
        tree = random_tree(size)
        enter, leave = tree.intervals
        mask = ancestor_mask(tree.parents)
        for node in range(size):
            above = ancestors(tree, node)
            assert set(mask[node].nonzero().flatten().tolist()) == above
            assert {a for a in range(size) if enter[a] <= enter[node] < leave[a]} == above
            assert tree.path(node) == sorted(above)
            assert tree.depths[node] == len(above) - 1
            assert tree.children[node] == [c for c in range(size) if tree.parents[c] == node]
        assert sorted(enter) == list(range(size))
        assert tree.depth == max(len(ancestors(tree, node)) for node in range(size)) - 1
        assert len(tree) == size


def test_a_forest_has_a_root_for_every_parent_of_minus_one() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert ancestor_mask([-1, 0, -1, 2]).int().tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([], []),
        ([1], []),
        ([1, 2], [-1]),
        ([1], [0]),
        ([1, 2], [-1, 1]),
        ([1, 2], [-1, -1]),
        ([1, 2, 3], [-1, 2, 0]),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent"):
        TokenTree(tokens, parents)


def test_a_chain_reports_the_law_of_each_step() -> None:
    laws = torch.rand(2, 5).softmax(-1)
    tree = chain([7, 1, 2], laws)
    assert list(tree.parents) == [-1, 0, 1]
    assert torch.equal(tree.law(0), laws[0])
    assert torch.equal(tree.law(1), laws[1])
    assert chain([7, 1]).law(0) is None


def test_a_context_looks_like_one_list() -> None:
    tokens = list(range(10))
    context = Context(tokens, [10, 11]).plus([12]).plus([])
    flat = list(range(13))
    assert list(context) == flat
    assert len(context) == 13
    for start in range(14):
        assert context.since(start) == flat[start:]
    for index in range(-13, 13):
        assert context[index] == flat[index]
    for part in (
        slice(None),
        slice(2, 5),
        slice(8, 12),
        slice(11, None),
        slice(-3, None),
        slice(1, 13, 3),
    ):
        assert context[part] == flat[part]
    assert tokens == list(range(10)), "the shared part is left alone"
