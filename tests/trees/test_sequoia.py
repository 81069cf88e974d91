"""Sequoia's programme and the choice of sizes against brute force; topologies in files."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triforce_tree.config import HierarchyConfig
from triforce_tree.trees import sequoia
from triforce_tree.trees.sequoia import Ranks, best_paths
from triforce_tree.trees.shapes import (
    BestFirst,
    Static,
    WithChain,
    chain_shape,
    expected_acceptances,
    load_shape,
    parse_shape,
    save_shape,
)
from triforce_tree.trees.sizes import best_gains, best_size, measured_seconds

MOST = 6


def every_tree(size: int) -> list[frozenset[Ranks]]:
    """Returns all ordered trees of ``size`` nodes below a root, as sets of rank paths."""

    def below(path: Ranks, nodes: int, rank: int = 0) -> Iterator[list[Ranks]]:
        if nodes == 0:
            yield []
            return
        child = (*path, rank)
        for inside in range(nodes):
            for deeper in below(child, inside):
                for later in below(path, nodes - inside - 1, rank + 1):
                    yield [child, *deeper, *later]

    return [frozenset(tree) for tree in below((), size)]


EVERY = {size: every_tree(size) for size in range(1, MOST + 1)}


def expectation(tree: frozenset[Ranks], by_depth: list[list[float]]) -> float:
    total = 0.0
    for path in tree:
        chance = 1.0
        for depth, rank in enumerate(path):
            vector = by_depth[min(depth, len(by_depth) - 1)]
            chance *= vector[rank] if rank < len(vector) else 0.0
        total += chance
    return total


def vectors(rng: np.random.Generator, count: int) -> list[list[float]]:
    """Returns random acceptance vectors, not ordered by rank and with zeros."""
    made = []
    for _ in range(count):
        ranks = int(rng.integers(1, MOST + 2))
        shares = rng.dirichlet(np.full(ranks, 0.7)) * rng.uniform(0.1, 1)
        shares[rng.random(ranks) < 0.1] = 0
        made.append(shares.tolist())
    return made


def test_there_are_as_many_trees_as_catalan_numbers_say() -> None:
    assert [len(set(EVERY[size])) for size in EVERY] == [1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("positional", [False, True])
def test_no_small_tree_is_better(seed: int, positional: bool) -> None:
    rng = np.random.default_rng([seed, positional])
    by_depth = vectors(rng, int(rng.integers(2, 5)) if positional else 1)
    acceptance: Any = by_depth if positional else by_depth[0]
    gains = best_gains(acceptance, MOST, MOST)
    for size, depth in itertools.product(range(1, MOST + 1), range(1, MOST + 1)):
        best = max(
            expectation(tree, by_depth)
            for m in range(1, size + 1)
            for tree in EVERY[m]
            if _depth(tree) <= depth
        )
        paths = frozenset(best_paths(acceptance, size, depth))
        assert len(paths) <= size
        assert _depth(paths) <= depth
        if paths:
            assert expectation(paths, by_depth) == pytest.approx(best)
            assert expected_acceptances(Static(paths), acceptance) == pytest.approx(best)
        assert gains[depth - 1][size] == pytest.approx(best)


def _depth(tree: frozenset[Ranks]) -> int:
    return max(map(len, tree), default=0)


def test_deeper_acceptance_decides_the_shape() -> None:
    sure_then_not, not_then_sure = [[0.9, 0.05], [0.1, 0.1]], [[0.4, 0.4], [0.9, 0.05]]
    assert sorted(best_paths(sure_then_not, 3, 3)) == [(0,), (0, 0), (0, 1)]
    assert sorted(best_paths(not_then_sure, 4, 2)) == [(0,), (0, 0), (1,), (1, 0)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("positional", [False, True])
def test_the_size_with_most_tokens_per_second_is_found(seed: int, positional: bool) -> None:
    """The result is the best of all trees up to the limits, for random seconds of each size."""
    rng = np.random.default_rng([seed, positional])
    by_depth = vectors(rng, int(rng.integers(2, 5)) if positional else 1)
    acceptance: Any = by_depth if positional else by_depth[0]
    draft, verify, each = rng.uniform(0.01, 1, 3)
    steps = rng.uniform(0, 2, MOST + 1)

    def seconds(nodes: int, depth: int) -> float:
        return float(depth * draft + verify + nodes * each + steps[nodes])

    for most_size, most_depth in ((MOST, MOST), (MOST, 2), (4, 3), (1, 1)):
        best = max(
            (1 + expectation(tree, by_depth)) / seconds(size, depth)
            for size in range(1, most_size + 1)
            for depth in range(1, most_depth + 1)
            for tree in EVERY[size]
            if _depth(tree) <= depth
        )
        found = best_size(acceptance, seconds, most_size, most_depth)
        assert found.rate == pytest.approx(best)
        assert found.seconds == seconds(found.size, found.depth)
        assert found.size <= most_size
        assert found.depth <= most_depth
        paths = best_paths(acceptance, found.size, found.depth)
        assert (1 + expectation(frozenset(paths), by_depth)) / found.seconds == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_size_by_measured_times_is_that_of_brute_force(seed: int) -> None:
    """Seconds of few sizes are interpolated; a pass verifies three tokens besides the tree."""
    rng = np.random.default_rng(seed)
    by_depth = vectors(rng, 3)
    verified = [(tokens, float(rng.uniform(0.5, 2))) for tokens in (3, 5, 9)]
    drafted = [(4, float(rng.uniform(0.01, 0.2))), (9, float(rng.uniform(0.2, 0.4)))]
    tokens = np.array([t for t, _ in verified])
    ascending = np.maximum.accumulate([s for _, s in verified])

    def took(tree: frozenset[Ranks]) -> float:
        rows = len(tree) + 3
        return float(
            np.interp(rows, tokens, ascending)
            + _depth(tree) * np.interp(rows, *map(list, zip(*drafted, strict=True)))
        )

    best = max(
        (1 + expectation(tree, by_depth)) / took(tree) for size in range(1, MOST + 1) for tree in EVERY[size]
    )
    seconds = measured_seconds(verified, drafted, beside=3)
    assert best_size(by_depth, seconds, MOST, MOST).rate == pytest.approx(best)
    with pytest.raises(ValueError, match="10 tokens are more than 9, the most that were measured"):
        seconds(7, 1)


def test_measured_times_are_linear_between_sizes_and_never_fall() -> None:
    points = [(1, 10.0), (2, 12.0), (4, 11.0), (8, 20.0), (32, 40.0)]
    seconds = measured_seconds(points, [(1, 2.0)])
    found = [seconds(nodes, depth) for nodes, depth in ((0, 0), (1, 1), (3, 1), (5, 0), (31, 4))]
    assert found == pytest.approx([10, 14, 14, 16, 48])


def test_where_verification_costs_nothing_more_trees_grow_and_else_they_do_not() -> None:
    vector = [0.6, 0.2, 0.1]
    flat = best_size(vector, lambda nodes, depth: 1 + 0.1 * depth, 32, 8)
    dear = best_size(vector, lambda nodes, depth: 1 + 0.1 * depth + 0.5 * nodes, 32, 8)
    assert (flat.size, dear.size, dear.depth) == (32, 1, 1)
    chain = 1 + expected_acceptances(chain_shape(flat.depth), vector)
    assert flat.tokens > 1.5 * chain


def test_impossible_costs_and_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"seconds\(1, 1\)=0.0 must be above 0 and finite"):
        best_size([0.5], lambda nodes, depth: 0.0, 4, 2)
    with pytest.raises(ValueError, match="most_size=0 and most_depth=2 must be at least 1"):
        best_size([0.5], lambda nodes, depth: 1.0, 0, 2)
    for bad in ([], [[0.5], []], [0.7, 0.6], [0.5, float("nan")], [-0.1]):
        with pytest.raises(ValueError, match="must be probabilities of sum at most 1"):
            sequoia.vectors_by_depth(bad)


@pytest.mark.parametrize(
    ("shape", "content"),
    [
        (Static([[0, 0, 1], [2]]), {"paths": [[0, 0, 1], [2]]}),
        (parse_shape("chain:3"), [[0], [0, 0], [0, 0, 0]]),
        (BestFirst([4, 3]), {"widths": [4, 3]}),
    ],
)
def test_shapes_from_files(shape: Static | BestFirst, content: object, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(content))
    again = parse_shape(str(path))
    assert again.name == load_shape(path).name == shape.name
    config = HierarchyConfig(tree=str(path))
    path.write_text("[[0]]")
    assert config.tree == shape.name, "settings keep what they have read"
    assert config == HierarchyConfig(tree=shape.name)
    assert parse_shape(str(path)).name == "static:0"


@pytest.mark.parametrize(
    "name", ["sequoia:16x4", "chain:128", "static:0;0.0;0.0.1;2", "best-first:6,5,4", "best-first:1000,24"]
)
def test_what_was_saved_is_read_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    save_shape(path, name)
    assert parse_shape(str(path)) == parse_shape(name)
    assert HierarchyConfig(tree=str(path)) == HierarchyConfig(tree=parse_shape(name).name)
    save_shape(path, parse_shape(str(path)))
    assert parse_shape(str(path)) == parse_shape(name)


def test_best_trees_are_saved_with_all_their_nodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(20):
        tree = Static(best_paths(vectors(rng, 3), 40, 6) or [[0]])
        save_shape(tmp_path / f"{number}.json", tree)
        again = load_shape(tmp_path / f"{number}.json")
        assert isinstance(again, Static)
        assert sorted(again.paths) == sorted(tree.paths)


@pytest.mark.parametrize(
    ("file", "shape", "why"),
    [
        ("tree.txt", "chain:3", "'.*tree.txt' cannot be read as a tree later; use a name that ends in .json"),
        ("tree.json", "lookup:4", "tree='lookup:4' is no tree but a chain"),
        ("tree.json", WithChain("chain:2", 3), r"'chain:2 \+ 3' has a chain beside its tree"),
        ("tree.json", "chain:129", "a depth of 128"),
        ("tree.json", "best-first:1025", "at most 1024 proposed tokens"),
        ("tree.json", "nonsense", "is no known shape"),
    ],
)
def test_what_cannot_be_saved_is_refused_in_one_line(file: str, shape: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        save_shape(tmp_path / file, shape)
    assert len(str(raised.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there is no such file"),
        ("{", "the file must hold"),
        ('{"tree": 1}', "the file must hold"),
        ('{"paths": [[0]], "widths": [1]}', "the file must hold"),
        ('{"paths": [[0, "1"]]}', "the file must hold"),
        ('{"paths": [0]}', "the file must hold"),
        ('{"paths": [[-1]]}', "has a negative rank"),
        ('{"paths": []}', "at least one path"),
        ('{"widths": []}', "must be positive"),
        ('{"widths": [true]}', "the file must hold"),
        ('{"widths": [2000]}', "at most 1024 proposed tokens"),
        (json.dumps([[0] * 129]), "a depth of 128"),
    ],
)
def test_what_is_no_topology_ends_in_one_line(content: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"^tree='.*' cannot be read: ") as raised:
        HierarchyConfig(tree=str(path))
    assert why in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
