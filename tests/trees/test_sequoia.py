"""Sequoia's programme against brute force; topologies in files."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.expected_acceptances import every_tree, expectation, expected_acceptances
from triforce_tree.config import HierarchyConfig
from triforce_tree.trees import sequoia
from triforce_tree.trees.sequoia import Ranks, best_paths
from triforce_tree.trees.shapes import BestFirst, Static, load_shape, parse_shape, save_shape

MOST = 6


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
    assert [len(set(every_tree(size))) for size in range(1, MOST + 1)] == [1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("positional", [False, True])
def test_no_small_tree_is_better(seed: int, positional: bool) -> None:
    rng = np.random.default_rng([seed, positional])
    by_depth = vectors(rng, int(rng.integers(2, 5)) if positional else 1)
    acceptance: Any = by_depth if positional else by_depth[0]
    for size, depth in itertools.product(range(1, MOST + 1), range(1, MOST + 1)):
        best = max(
            expectation(tree, by_depth)
            for m in range(1, size + 1)
            for tree in every_tree(m)
            if _depth(tree) <= depth
        )
        paths = frozenset(best_paths(acceptance, size, depth))
        assert len(paths) <= size
        assert _depth(paths) <= depth
        assert expectation(paths, by_depth) == pytest.approx(best)
        if paths:
            assert expected_acceptances(Static(paths), acceptance) == pytest.approx(best)


def _depth(tree: frozenset[Ranks]) -> int:
    return max(map(len, tree), default=0)


def test_deeper_acceptance_decides_the_shape() -> None:
    sure_then_not, not_then_sure = [[0.9, 0.05], [0.1, 0.1]], [[0.4, 0.4], [0.9, 0.05]]
    assert sorted(best_paths(sure_then_not, 3, 3)) == [(0,), (0, 0), (0, 1)]
    assert sorted(best_paths(not_then_sure, 4, 2)) == [(0,), (0, 0), (1,), (1, 0)]


def test_impossible_acceptances_are_refused() -> None:
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
