"""Tree shapes: chains, static topologies, Sequoia's dynamic programme, best-first.

A shape names a node by its *rank path*: the ranks among siblings from the root on, as in Medusa's lists, so
``(0, 1)`` is the second child of the first child. The number of children of a node may depend on the
distributions, but never on the draws of these children, which would bias the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from triforce_tree.option_checks import did_you_mean
from triforce_tree.trees.sequoia import Acceptance, Ranks, best_paths
from triforce_tree.trees.topology_files import SUFFIX, check_shape_file, read_topology, write_topology

# Limits of a tree. One forward verifies all nodes, and every depth takes a forward of the draft.
MOST_NODES, MOST_DEPTH = 1024, 128


class Static:
    """A fixed topology, given by the rank paths of its nodes (Medusa's form).

    A path implies all its prefixes and the earlier siblings of its nodes, which need not be listed.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        self.counts: dict[Ranks, int] = {}
        for path in paths:
            _check_size(max(path, default=0) + 1, len(path))
            if any(rank < 0 for rank in path):
                raise ValueError(f"path {list(path)} has a negative rank; the first sibling is 0")
            for depth, rank in enumerate(path):
                parent = tuple(path[:depth])
                self.counts[parent] = max(self.counts.get(parent, 0), rank + 1)
        if not self.counts:
            raise ValueError("a static tree needs at least one path, such as [[0], [0, 0], [1]]")
        _check_size(self.size, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.counts == other.counts

    def __hash__(self) -> int:
        return hash(frozenset(self.counts.items()))

    @property
    def size(self) -> int:
        """The number of nodes without the root."""
        return sum(self.counts.values())

    @property
    def paths(self) -> list[Ranks]:
        """The rank paths of all nodes; siblings are adjacent."""
        return [(*parent, rank) for parent, count in self.counts.items() for rank in range(count)]

    @property
    def name(self) -> str:
        """The name that :func:`parse_shape` reads. It lists the last child of each node."""
        last = [(*parent, count - 1) for parent, count in self.counts.items()]
        return "static:" + ";".join(".".join(map(str, path)) for path in last)


class BestFirst:
    """A tree whose depth d + 1 has the ``widths[d]`` continuations that are most likely to be accepted.

    The topology is chosen for each tree from the draft distributions: by path probability if the tokens are
    the most probable ones, as in DDTree and EAGLE-2, else by the chances of draws (``kernels.step.draws``).
    If acceptance by rank is the same at every node, it is Sequoia's optimum for the same widths.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        if not widths or min(widths) < 1:
            raise ValueError(f"widths={list(widths)} must be positive; use for example 6,5,4")
        _check_size(sum(widths), len(widths))
        self.widths = tuple(widths)

    @property
    def name(self) -> str:
        """The name that :func:`parse_shape` reads."""
        return f"best-first:{','.join(map(str, self.widths))}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BestFirst) and self.widths == other.widths

    def __hash__(self) -> int:
        return hash(self.widths)


class Lookup(Static):
    """A chain of at most ``length`` suffix-matched tokens, which followed an earlier occurrence of the newest
    tokens (see ``drafters.with_lookup``). A pass proposes it instead of a tree."""

    def __init__(self, length: int) -> None:
        _check_size(length, length)
        super().__init__([[0] * length])
        self.length = length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lookup) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash(("lookup", self.length))

    @property
    def name(self) -> str:
        """The name that :func:`parse_shape` reads."""
        return f"lookup:{self.length}"


Shape = Static | BestFirst


def shape_name(shape: str | Shape) -> str:
    """Returns the name that :func:`parse_shape` reads."""
    return shape if isinstance(shape, str) else shape.name


def chain_shape(length: int) -> Static:
    """Returns a shape of one proposed token per depth."""
    _check_size(length, length)
    return Static([[0] * length])


def sequoia(acceptance: Acceptance, size: int, depth: int) -> Static:
    """Returns the tree of ``size`` tokens and at most ``depth`` depths with most expected accepted tokens.

    Args:
        acceptance: probability that the child of rank r = 0, 1, ... is accepted given that its parent was; or
            such a vector for each depth (see :mod:`triforce_tree.trees.sequoia`).
        size: number of nodes without the root.
        depth: length of the longest path.

    Raises:
        ValueError: ``acceptance`` is not made of probabilities, or the size or depth is not allowed.
    """
    if size < 1 or depth < 1:
        raise ValueError(f"size={size} and depth={depth} must be at least 1")
    _check_size(size, depth)
    return Static(best_paths(acceptance, size, depth))


# Acceptance by rank of a distilled draft on long contexts in greedy decoding.
DEFAULT_ACCEPTANCE = (0.50, 0.13, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)


def parse_shape(text: str | Shape, option: str = "tree") -> Shape:
    """Returns the shape with a name; a shape object is returned unchanged.

    Args:
        text: ``chain:4`` | ``best-first:6,5,4`` (widths by depth) | ``sequoia:16x4`` (size x depth) |
            ``static:0;0.0;1`` (rank paths) | ``lookup:12`` | the path of a file ``tree.json``
            (:func:`read_topology`) | a :class:`Static` or :class:`BestFirst` object.
        option: the name of the user's option for error messages.

    Raises:
        ValueError: it is none of these, has more than ``MOST_NODES`` nodes, or is deeper than ``MOST_DEPTH``.
    """
    if not isinstance(text, str):
        if not isinstance(text, Static | BestFirst):
            raise ValueError(f"{option}={text!r} is neither a name like chain:4 nor a tree shape; {_KNOWN}")
        return text
    shown = text if len(text) < 60 else f"{text[:60]}..."
    try:
        shape = load_shape(text) if text.endswith(SUFFIX) else _named(text)
    except ValueError as error:
        raise ValueError(f"{option}={shown!r} cannot be read: {error}") from error
    if shape is None:
        more = "" if option == "tree" else ", lookup:12 for suffix-matched tokens, or none alone"
        raise ValueError(f"{option}={shown!r} is no known shape{_near(text)}; {_KNOWN}{more}")
    return shape


def _near(text: str) -> str:
    """Returns a hint with the kind of shape that a mistyped name may mean, or an empty string."""
    return did_you_mean(
        text.partition(":")[0], ("chain", "static", "sequoia", "best-first", "lookup", "none")
    )


MOST_OTHER_TREES, MOST_MATCHED = 2, 4
"""The most further tree shapes that the user may name, and the most chains of suffix-matched tokens."""


def other_shapes(given: str | Sequence[str | Shape]) -> tuple[str | Shape, ...]:
    """Returns the shapes that the option ``other_trees`` names.

    ``lookup:N`` (a chain of suffix-matched tokens) comes last. A file name is replaced by the shape in the
    file.

    Raises:
        ValueError: one is no shape, there are too many, or ``lookup`` is named too often.
    """
    if isinstance(given, str):
        given = () if given == "none" else given.split()
    parsed = [parse_shape(tree, "other_trees") for tree in given]
    # A file's name is replaced by its content, so that later changes of the file have no effect.
    both = list(zip(given, parsed, strict=True))
    named = [shape_name(shape) if isinstance(t, str) and t.endswith(SUFFIX) else t for t, shape in both]
    grown = [tree for tree, shape in zip(named, parsed, strict=True) if not isinstance(shape, Lookup)]
    matched = [shape.length for shape in parsed if isinstance(shape, Lookup)]
    if len(grown) > MOST_OTHER_TREES:
        raise ValueError(
            f"other_trees names {len(grown)} trees, and each needs memory and time to prepare; name at most "
            f"{MOST_OTHER_TREES}"
        )
    lengths = sorted(set(matched))
    if len(lengths) < len(matched) or len(matched) > MOST_MATCHED:
        times = "twice" if len(matched) <= MOST_MATCHED else f"{len(matched)} times"
        raise ValueError(
            f"other_trees={' '.join(map(shape_name, named))!r} asks for suffix-matched tokens {times}; name "
            f"at most {MOST_MATCHED} different lengths"
        )
    return (*grown, *(f"lookup:{length}" for length in lengths))


def grown_alone(shapes: Sequence[str | Shape]) -> tuple[str | Shape, ...]:
    """Returns the shapes that are no chains of suffix-matched tokens."""
    return tuple(shape for shape in shapes if not isinstance(parse_shape(shape), Lookup))


def matched_alone(shapes: Sequence[str | Shape]) -> tuple[str | Shape, ...]:
    """Returns the shapes that are chains of suffix-matched tokens."""
    return tuple(shape for shape in shapes if isinstance(parse_shape(shape), Lookup))


def tree_shape(tree: str | Shape) -> Shape:
    """Returns the shape with a name like :func:`parse_shape`, but raises ValueError for ``lookup:N``."""
    shape = parse_shape(tree)
    if isinstance(shape, Lookup):
        raise ValueError(
            f"tree={shape.name!r} is no tree but a chain of suffix-matched tokens; name it in other_trees, "
            "with a draft model"
        )
    return shape


_KNOWN = "use chain:4, best-first:6,5,4, sequoia:16x4, static:0;0.0;1 or a file tree.json"


def load_shape(path: str | Path) -> Shape:
    """Reads a shape from a JSON file.

    Raises:
        ValueError: there is no such file, or it holds no tree within the limits.
    """
    paths, widths = read_topology(path)
    return Static(paths) if paths is not None else BestFirst(widths or ())


def save_shape(path: str | Path, shape: str | Shape) -> None:
    """Writes a tree to a JSON file. The path of the file is then the name of a shape: ``tree="tree.json"``.

    Raises:
        ValueError: the path does not end in ``.json``, or the shape is not a tree.
        OSError: the file cannot be written.
    """
    check_shape_file(path)
    tree = tree_shape(shape)
    if isinstance(tree, Static):
        write_topology(path, tree.paths)
    else:
        write_topology(path, None, tree.widths)


@lru_cache(maxsize=64)
def _named(text: str) -> Shape | None:
    kind, _, rest = text.partition(":")
    if kind == "chain":
        return chain_shape(_positive(rest))
    if kind == "best-first":
        return BestFirst([_positive(w) for w in rest.split(",")])
    if kind == "sequoia":
        size, _, depth = rest.partition("x")
        return sequoia(DEFAULT_ACCEPTANCE, _positive(size), _positive(depth))
    if kind == "lookup":
        return Lookup(_positive(rest))
    if kind == "static":
        return Static([_whole(r) for r in path.split(".")] for path in rest.split(";"))
    return None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number; {_KNOWN}") from None


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise ValueError(f"{value} must be at least 1")
    return value


def _check_size(nodes: int, depth: int) -> None:
    if nodes > MOST_NODES or depth > MOST_DEPTH:
        raise ValueError(
            f"a tree has at most {MOST_NODES} proposed tokens and a depth of {MOST_DEPTH}, this one {nodes} "
            f"and {depth}; use a smaller one"
        )
