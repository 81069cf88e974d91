"""Tree shapes: best-first against brute force, parsing of names; ``test_sequoia`` tests Sequoia's trees."""

import itertools

import pytest
import torch

from tests.support.expected_acceptances import every_tree, expectation, expected_acceptances
from triforce_tree.kernels import step
from triforce_tree.kernels.step.draws import draw_tokens
from triforce_tree.trees.shapes import (
    DEFAULT_ACCEPTANCE,
    BestFirst,
    Ranks,
    Static,
    chain_shape,
    parse_shape,
    sequoia,
)

ACCEPTANCE = [[0.5, 0.13, 0.06, 0.04], [0.9, 0.05], [0.3, 0.3, 0.3], [0.25], [0.4, 0.35, 0.2, 0.05]]


def test_sequoia_is_limited_by_depth_and_width() -> None:
    assert sequoia([0.5, 0.2], size=50, depth=2).size == 6


def placed(
    probs: torch.Tensor, values: list[float], width: int
) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Returns (parent, rank) and chance of new nodes. Draws are the most probable tokens."""
    count = len(values)
    draws, chances = draw_tokens(None, probs[None], width)
    nodes = count + width
    tokens, parents = torch.full((1, nodes), -1), torch.full((1, nodes), -1)
    path_chances = torch.tensor([[*values, *[0.0] * width]])
    mask_words = torch.ones(1, nodes, 1, dtype=torch.int64)
    ids = torch.zeros(1, width, dtype=torch.int64)
    step.place_nodes(
        tokens, parents, mask_words, path_chances, ids, None, draws, chances, None, 0, 0
    )  # fmt: skip
    made = [(int(parents[0, i]), int(tokens[0, i])) for i in range(count, nodes) if tokens[0, i] >= 0]
    used = tokens[0, count:] >= 0
    pairs = [(node, draws[0, node].tolist().index(token)) for node, token in made]
    return pairs, path_chances[0, count:][used]


def best_first_paths(shape: BestFirst, probs: torch.Tensor) -> list[Ranks]:
    """Returns the rank paths of a best-first tree if every node has the same distribution."""
    frontier: list[Ranks] = [()]
    values, paths = [1.0], []
    for width in shape.widths:
        pairs, path_chances = placed(probs.repeat(len(frontier), 1), values, width)
        frontier, values = [(*frontier[node], rank) for node, rank in pairs], path_chances.tolist()
        paths += frontier
    return paths


@pytest.mark.parametrize("widths", [(3,), (2, 2), (3, 2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("acceptance", [a for a in ACCEPTANCE if sum(a) >= 0.9 or len(a) == 4])
def test_best_first_is_optimal_if_acceptance_depends_on_rank(widths, acceptance) -> None:
    probs = torch.tensor([*acceptance, max(0.0, 1 - sum(acceptance)) / 2, 0.0])[: len(acceptance)]
    probs = probs[torch.randperm(len(probs))]
    paths = best_first_paths(BestFirst(widths), probs)
    sizes = [sum(len(path) == depth for path in paths) for depth in range(1, len(widths) + 1)]
    assert all(size <= width for size, width in zip(sizes, widths, strict=True))
    others = (
        expectation(other, [acceptance])
        for other in every_tree(len(paths))
        if [sum(len(p) == d for p in other) for d in range(1, len(widths) + 1)] == sizes
    )
    assert expectation(paths, [acceptance]) == pytest.approx(max(others))


def test_best_first_prefers_probable_paths() -> None:
    """A node with a peaked distribution gets the children; a flat one on an improbable path gets none."""
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.98, 0.01, 0.01]])
    assert placed(probs, [0.9, 0.1], 2)[0] == [(0, 0), (0, 1)]
    assert placed(probs, [0.3, 0.7], 2)[0] == [(0, 0), (1, 0)]
    assert len(placed(probs[:1], [1.0], 9)[0]) == 3, "never more than the vocabulary"


def test_a_static_path_implies_prefixes_and_earlier_siblings() -> None:
    shape = Static([[1, 2]])
    assert shape.counts == {(): 2, (1,): 3}
    assert shape.size == 5
    assert chain_shape(3).counts == {(): 1, (0,): 1, (0, 0): 1}


def test_names_of_shapes() -> None:
    assert parse_shape("chain:4").counts == chain_shape(4).counts
    assert parse_shape("best-first:6,5,4").widths == (6, 5, 4)
    assert parse_shape("sequoia:16x4").size == 16
    assert parse_shape("static:0;0.0;1").counts == {(): 2, (0,): 1}
    shape = BestFirst([2])
    assert parse_shape(shape) is shape


BAD = [
    "",
    "chain",
    "chain:0",
    "chain:x",
    "chain:-1",
    "best-first:",
    "best-first:3,0",
    "sequoia:16",
    "sequoia:0x4",
]
BAD += ["static:", "static:a", "bush:3", "sequoia:4x0", "static:-1"]


@pytest.mark.parametrize("text", BAD)
def test_errors_name_the_shape(text: str) -> None:
    with pytest.raises(ValueError, match="tree="):
        parse_shape(text)


@pytest.mark.parametrize("text, part", [("static:0;x", "'x'"), ("sequoia:16", "''"), ("chain:2.5", "'2.5'")])
def test_errors_name_what_is_no_number_and_the_forms(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=f"tree='{text}' .* {part} is not a whole number; use chain:4"):
        parse_shape(text)


TOO_LARGE = ["best-first:100000,100000", "best-first:" + ",".join(["1"] * 129), "chain:129"]
TOO_LARGE += [
    "chain:1000000000000",
    "sequoia:2000x50",
    "sequoia:16x129",
    "static:1024",
    "static:999999999999",
]
TOO_LARGE += ["static:" + ".".join(["0"] * 100_000), "static:" + ";".join(f"{n}.600" for n in range(3))]


@pytest.mark.parametrize("text", TOO_LARGE, ids=lambda text: text[:30])
def test_errors_of_too_large_shapes_name_the_limits(text: str) -> None:
    with pytest.raises(ValueError, match=r"tree=.* at most 1024 proposed tokens and a depth of 128") as error:
        parse_shape(text)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("tree", [5, None, ["chain:4"], {}])
def test_errors_name_the_object_that_is_no_shape(tree: object) -> None:
    with pytest.raises(ValueError, match="neither a name like chain:4 nor a tree shape"):
        parse_shape(tree)


def test_the_largest_shapes_are_parsed() -> None:
    assert parse_shape("chain:128").size == 128
    assert parse_shape("static:1023").size == 1024
    assert parse_shape("sequoia:1024x12").size == 1024
    deepest = parse_shape("sequoia:300x128")
    assert deepest.size == 300
    assert expected_acceptances(deepest, DEFAULT_ACCEPTANCE) > expected_acceptances(
        parse_shape("sequoia:300x5"), DEFAULT_ACCEPTANCE
    )


@pytest.mark.parametrize(
    ("acceptance", "size", "depth"),
    [([0.5], 0, 1), ([0.5], 1, 0), ([], 1, 1), ([-0.1], 1, 1), ([0.9, 0.2], 1, 1)],
)
def test_sequoia_refuses_invalid_arguments(acceptance, size, depth) -> None:
    with pytest.raises(ValueError, match=r"size|acceptance.*probabilities of sum at most 1"):
        sequoia(acceptance, size, depth)


def test_expected_acceptances_is_the_sum_over_paths() -> None:
    shape = Static([[0, 0], [1]])
    assert expected_acceptances(shape, [0.5, 0.2]) == pytest.approx(0.5 + 0.25 + 0.2)
    for a, b in itertools.pairwise([2, 4, 8, 16]):
        first, second = (expected_acceptances(sequoia(ACCEPTANCE[0], n, 4), ACCEPTANCE[0]) for n in (a, b))
        assert first < second


def test_shapes_of_the_same_nodes_are_equal() -> None:
    """Equal shapes make settings equal, which then share buffers and graphs."""
    assert chain_shape(3) == Static([[0], [0, 0], [0, 0, 0]]) != chain_shape(4)
    assert BestFirst([3, 2]) == BestFirst((3, 2)) != BestFirst([2, 3])
    assert len({chain_shape(3), chain_shape(3), BestFirst([1]), BestFirst([1])}) == 2
