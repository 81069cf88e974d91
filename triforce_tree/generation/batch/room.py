"""The room for prefixes of a batch that further prompts join while it runs."""

import sys
from collections.abc import Callable, Sequence

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.kv.shared.choice import page_of, prefix_tokens
from triforce_tree.kv.shared.pool import PrefixPool
from triforce_tree.kv.shared.tree import NO_PREFIX, PrefixRoom, PrefixSize, PrefixTree
from triforce_tree.trees.device_shapes import PassLimits


class JoiningPrefixes:
    """Slots for what rows share and for what each has alone: no more than if all of them stored copies.

    Args:
        hierarchy: which decodes them.
        prompts: with which the batch begins.
        new_tokens: most of them in each of these.
        rows: most sequences that are decoded together, as far as that is known.
        tokens: most tokens of all prompts together, where there is such a limit.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        rows: int,
        tokens: int | None,
    ) -> None:
        self._hierarchy, self._prompts, self._new_tokens = hierarchy, prompts, new_tokens
        self._longest = max(map(len, prompts)) + new_tokens
        self._rows, self._tokens, self._share, self._begun = rows, tokens, 1.0, False
        self._found: dict[tuple[HierarchyConfig, int, float], PrefixTree] = {}

    def __call__(self) -> PrefixTree:
        """See ``Prefixes``; copies where prompts are too short to have a prefix, or memory is, and where
        something may be offloaded: memory is then planned for the prompts that begin, and rows are not added.
        """
        key = self._hierarchy.config, self._rows, self._share
        if key not in self._found:
            self._found[key] = self._made()
        return self._found[key]

    def _made(self) -> PrefixTree:
        hierarchy = self._hierarchy
        config, unit = hierarchy.config, prefix_tokens(hierarchy.target, hierarchy.config)
        longest = hierarchy.rounded(self._longest)
        if unit is None or longest <= unit or not self._share or config.offloads:
            return PrefixTree()
        levels = hierarchy.levels(min(map(len, self._prompts)), longest)
        scratch, page = PassLimits.of(config, levels).scratch_slots, page_of(unit, config, levels)
        most = copies = self._rows * (longest + scratch + page)
        if self._tokens is not None:
            # A prompt of any length, and what others that share its chunks have after them.
            tokens = max(self._tokens, longest + (self._rows - 1) * unit)
            most = min(copies, tokens + self._rows * (self._new_tokens + scratch + page))
        pool = PrefixPool(sys.maxsize, unit, page, scratch, sys.maxsize, lambda stored: None)
        for row, prompt in enumerate(self._prompts[: self._rows]):
            pool.admit(row, prompt, self._new_tokens)
        # Trials of stages have sequences of any length, all of which begin with one prefix.
        trial = longest + self._rows * (scratch + 2 * page + 1)
        least = max(trial, pool.taken + self._rows * pool.own_size([0], 0))
        return PrefixRoom(max(least, int(self._share * most)), least, self._longest, unit)

    def fitting(self, rows: Callable[[PrefixSize, int], int], most: int) -> int:
        """See ``Prefixes``."""
        if self._begun:
            # Sequences run in what there is; where the number of rows was not known, there is more for more.
            self._rows = max(self._rows, most)
            return rows(self().size, most)
        # A batch of one row gets others.
        wanted = max(2, most)
        while self():
            size = self().size
            if (found := rows(size, wanted)) >= wanted:
                return most
            self._share /= 2
            if self().size == size:
                # There is no less.
                if found >= rows(NO_PREFIX, wanted):
                    return min(most, found)
                self._share = 0
        return rows(NO_PREFIX, most)

    def beginning(self, prompts: Sequence[Sequence[int]], rows: int) -> tuple[list[int], list[Sequence[int]]]:
        """See ``Prefixes``."""
        self._begun = True
        order = list(range(len(prompts)))
        if (unit := self().unit) and len(prompts) > 1:
            # As in a tree whose nodes are numbered as they are found.
            found: dict[tuple[int, ...], int] = {}
            paths = []
            for prompt in prompts:
                path: list[int] = []
                for stop in range(unit, len(prompt), unit):
                    key = (path[-1] if path else -1, *prompt[stop - unit : stop])
                    path.append(found.setdefault(key, len(found)))
                paths.append(path)
            order.sort(key=lambda n: [*paths[n], len(found) + n])
        return order, [prompts[n] for n in [*order[:rows], *order[:1] * (rows - len(prompts))]]
