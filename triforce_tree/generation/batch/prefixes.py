"""The common prefixes that the sequences of a batch store once, and the order in which they begin."""

from collections.abc import Callable, Sequence
from typing import Protocol

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.kv.shared.choice import prefixes_stored_once
from triforce_tree.kv.shared.tree import NO_PREFIX, PrefixSize, PrefixTree


class Prefixes(Protocol):
    """What a batch stores once, under the settings at the time of a call: memory planning may change them."""

    def __call__(self) -> PrefixTree:
        """What is stored once."""

    def fitting(self, rows: Callable[[PrefixSize, int], int], most: int) -> int:
        """How many sequences fit, up to ``most``, by ``rows`` of what is stored once and of ``most``.

        Less is stored once, or there is less room for it, where more fit then.
        """

    def beginning(self, prompts: Sequence[Sequence[int]], rows: int) -> tuple[list[int], list[Sequence[int]]]:
        """Numbers of the prompts in the order in which they begin, and those that the rows are made for.

        Rows that share a prefix are neighbours, so that it is read once for all of them. Rows without a
        sequence are made for one like the first.
        """


class BatchPrefixes:
    """Prefixes of prompts that are known before the batch begins.

    Args:
        hierarchy: which decodes them.
        prompts: of the whole batch; empty where copies are stored.
        rows: most sequences that are decoded together.
    """

    def __init__(self, hierarchy: Hierarchy, prompts: Sequence[Sequence[int]], rows: int) -> None:
        self._hierarchy, self._prompts, self._rows = hierarchy, prompts, rows
        self._found: dict[tuple[HierarchyConfig, int], PrefixTree] = {}

    def __call__(self) -> PrefixTree:
        """See :class:`Prefixes`."""
        key = config, rows = self._hierarchy.config, self._rows
        if key not in self._found:
            self._found[key] = prefixes_stored_once(self._hierarchy.target, config, self._prompts, rows)
        return self._found[key]

    def fitting(self, rows: Callable[[PrefixSize, int], int], most: int) -> int:
        """See :class:`Prefixes`."""
        while True:
            found = rows(self().size, most)
            if found >= self._rows or not self() or (copies := rows(NO_PREFIX, most)) <= found:
                return found
            self._rows = min(copies, self._rows - 1)

    def beginning(self, prompts: Sequence[Sequence[int]], rows: int) -> tuple[list[int], list[Sequence[int]]]:
        """See :class:`Prefixes`."""
        order = self().order(self._prompts) if self._prompts else list(range(len(prompts)))
        return order, [prompts[n] for n in [*order[:rows], *order[:1] * (rows - len(prompts))]]
