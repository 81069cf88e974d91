"""The common prefixes of prompts as a tree: which tokens are stored once, and for which sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triforce_tree.kv.cached_tokens import common_prefix

DEPTH = 4
"""Most prefixes, one after the other, that a sequence begins with."""


class PrefixSize(NamedTuple):
    """What the prefixes of a batch take and save.

    Attributes:
        slots: KV slots of all prefixes.
        saved: KV slots that each sequence has fewer of its own.
    """

    slots: int = 0
    saved: int = 0


NO_PREFIX = PrefixSize()


@dataclass(frozen=True, eq=False, repr=False)
class PrefixNode:
    """Tokens that some prompts have in common after those of the parent.

    Attributes:
        tokens: from position ``start`` on.
        place: KV slot of the first of them.
    """

    tokens: list[int]
    start: int
    place: int
    children: list["PrefixNode"]

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def run(self) -> "Run":
        """Where the tokens are stored."""
        return Run(self.start, self.stop, self.place)


class Run(NamedTuple):
    """Positions ``start`` to ``stop`` of a sequence, in KV slots from ``place`` on."""

    start: int
    stop: int
    place: int


class PrefixTree:
    """Prefixes that a batch stores once: each in its own slots, a child's after those of its parent.

    The slots of the first path are its positions. A tree without nodes is false.

    Args:
        roots: no two of them begin alike, nor do two children of a node.
        saved: see :class:`PrefixSize`.

    Attributes:
        room: KV slots of a head for prompts that come later, and for all that rows need; 0 where none do.
        least: of these, what the first prompts need.
        unit: what the tokens of such a prompt's prefix are a multiple of.
    """

    room = least = unit = 0

    def __init__(self, roots: Sequence[PrefixNode] = (), saved: int = 0) -> None:
        self.roots = list(roots)
        self.size = PrefixSize(sum(len(node.tokens) for node in self._nodes(self.roots)), saved)

    def __bool__(self) -> bool:
        return bool(self.roots)

    def _nodes(self, nodes: Sequence[PrefixNode]) -> Iterator[PrefixNode]:
        for node in nodes:
            yield node
            yield from self._nodes(node.children)

    def path(self, prompt: Sequence[int]) -> list[PrefixNode]:
        """The nodes that a prompt begins with, its last token not counted."""
        found: list[PrefixNode] = []
        nodes = self.roots
        while nodes:
            start = found[-1].stop if found else 0
            for node in nodes:
                if node.stop < len(prompt) and list(prompt[start : node.stop]) == node.tokens:
                    found.append(node)
                    nodes = node.children
                    break
            else:
                break
        return found

    def order(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Numbers of the prompts such that those which share a node follow the first of them."""
        paths = [[node.place for node in self.path(prompt)] for prompt in prompts]
        first: dict[int, int] = {}
        for number, path in enumerate(paths):
            for place in path:
                first.setdefault(place, number)
        return sorted(range(len(prompts)), key=lambda n: [*(first[place] for place in paths[n]), n])


class PrefixRoom(PrefixTree):
    """Room for the prefixes of prompts that are not known yet, and for what each row has after them.

    Args:
        room, least, unit: see :class:`PrefixTree`.
        longest: most tokens of a sequence.
    """

    def __init__(self, room: int, least: int, longest: int, unit: int) -> None:
        super().__init__()
        self.room, self.least, self.unit = room, least, unit
        # Rows have no slots beside these.
        self.size = PrefixSize(room, longest)

    def __bool__(self) -> bool:
        return True


def common_prefixes(
    prompts: Sequence[Sequence[int]], unit: int, rows: int, least: int | None = None, spared: int = 0
) -> PrefixTree:
    """The prefixes that take least memory when they are stored once, up to a tenth; none where copies do, or
    nearly.

    Args:
        prompts: token ids.
        unit: prefixes have whole multiples of so many tokens.
        rows: sequences that are decoded together, if memory holds them.
        least: tokens of the shortest node, a multiple of ``unit``; by default one of them.
        spared: fewest KV slots that prefixes must spare all rows together.
    """
    longest = max(map(len, prompts))
    best, taken = PrefixTree(), rows * longest
    most = taken - spared
    for depth, alone in [(depth, False) for depth in range(1, DEPTH + 1)] + [(DEPTH, True)]:
        tree = _tree(prompts, unit, least or unit, depth, alone)
        if not tree:
            break  # Nothing is common.
        slots = tree.size.slots + rows * (longest - tree.size.saved)
        # More segments take time of their own, and so do the first ones.
        if slots < 0.9 * taken and slots <= most:
            best, taken = tree, slots
    return best


def _tree(prompts: Sequence[Sequence[int]], unit: int, least: int, depth: int, alone: bool) -> PrefixTree:
    """The tree of prefixes up to ``depth``.

    Args:
        alone: whether what a single prompt goes on with is a node, too, so that its sequence needs no more
            slots of its own than the others.
    """
    # The last token of a prompt is the root of the first pass.
    limits = [(len(prompt) - 1) // unit * unit for prompt in prompts]
    ends = [0] * len(prompts)
    place = 0

    def grown(members: list[int], start: int, left: int) -> list[PrefixNode]:
        nonlocal place
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in members:
            if limits[number] >= start + least:
                groups.setdefault(tuple(prompts[number][start : start + least]), []).append(number)
        made = []
        for group in groups.values():
            if not left or (len(group) == 1 and not alone):
                continue
            first = prompts[group[0]][start : min(limits[number] for number in group)]
            count = min((common_prefix(first, prompts[n][start:]) for n in group[1:]), default=len(first))
            node = PrefixNode(list(first[: count // unit * unit]), start, place, [])
            place += len(node.tokens)
            for number in group:
                ends[number] = node.stop
            made.append(node)
            if len(group) > 1:
                node.children.extend(grown(group, node.stop, left - 1))
        return made

    roots = grown(list(range(len(prompts))), 0, depth)
    longest = max(map(len, prompts))
    return PrefixTree(roots, longest - max(len(p) - end for p, end in zip(prompts, ends, strict=True)))
