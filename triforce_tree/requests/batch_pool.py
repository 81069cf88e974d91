"""How many sequences a batch decodes together, the KV slots that they share, and the order in which they
begin.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.hierarchy import Hierarchy
from triforce_tree.kv.pool.blocks import own_slots
from triforce_tree.kv.pool.size import PoolSize, SharedChunks, for_known, page_of, unit_of
from triforce_tree.planning.batch_size import fitting_batch
from triforce_tree.requests.joining import Joining
from triforce_tree.trees.device_shapes import pass_limits

# The most places without a pool; each of them has slots for the longest text, even while it is free.
_MOST_ALONE = 8
# Stages of several kinds of sampling, and for fewer places, take so many times the memory of one kind.
_WORKSPACES = 2
# A pool that does not fit is made smaller by this factor, again and again.
_SMALLER = 7 / 8


def sizes_of(most: int) -> list[int]:
    """Returns the numbers of places that a batch of up to ``most`` sequences has while it grows and shrinks.

    A pass computes all places, with a sequence or without, and each number needs stages of its own.
    """
    sizes = [most]
    while sizes[-1] > 2:
        sizes.append(-(-sizes[-1] // 2))
    return sizes[::-1]


class BatchPool:
    """Chooses the size of a batch's KV pool from the current settings, which memory planning may change.

    Args:
        hierarchy: the levels that decode the prompts.
        prompts: the prompts of the batch; those that do not fit at once begin later.
        new_tokens: the most new tokens of each sequence.
        max_batch: the most sequences that are decoded together; None if only memory limits them.
        joining: the source of prompts that may join while the batch runs; None without one.
        shares: whether prompts may share slots at all.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        max_batch: int | None = None,
        joining: Joining | None = None,
        shares: bool = True,
    ) -> None:
        self._hierarchy, self._prompts, self._new_tokens = hierarchy, prompts, new_tokens
        self._max_batch, self._shares, self._joins = max_batch, shares, joining is not None
        self._tokens = joining.tokens if joining is not None else None
        sequences = max_batch or len(prompts)
        self._sequences = sequences if self._joins else min(sequences, len(prompts))
        self._part, self._begun = 1.0, False
        self._found: dict[tuple[HierarchyConfig, int, float], PoolSize | None] = {}

    def __call__(self) -> PoolSize | None:
        """Returns the size of the pool, or None if each sequence has its own slots."""
        if not (self._shares and self._part) or (self._sequences < 2 and not self._joins):
            return None
        key = self._hierarchy.config, self._sequences, self._part
        if key not in self._found:
            self._found[key] = self._made()
        return self._found[key]

    def _made(self) -> PoolSize | None:
        hierarchy, config = self._hierarchy, self._hierarchy.config
        unit = unit_of(hierarchy.target, config)
        if unit is None:
            return None
        longest = hierarchy.rounded(max(map(len, self._prompts)) + self._new_tokens)
        shortest = min(map(len, self._prompts))
        if self._joins:
            longest, shortest = max(longest, hierarchy.held_by_pages(longest)), hierarchy.settled
        levels = hierarchy.levels(shortest, longest)
        scratch, page = pass_limits(config, levels).scratch_slots, page_of(unit, config, levels)
        # Trials of stages have sequences of any length, all of which begin with one prefix.
        trial = longest + self._sequences * (scratch + 2 * page + 1)
        if not self._joins:
            made = for_known(
                self._prompts, self._new_tokens, self._sequences, unit, page, scratch, config.exact
            )
            return made and replace(made, slots=max(made.slots, trial), least=max(made.slots, trial))
        # Memory is planned for the prompts that begin where something may be offloaded.
        if longest <= unit or config.offloads:
            return None
        most = copies = self._sequences * (longest + scratch + page)
        if self._tokens is not None:
            # A prompt of any length, and what others that share its chunks have after them.
            tokens = max(self._tokens, longest + (self._sequences - 1) * unit)
            most = min(copies, tokens + self._sequences * (self._new_tokens + scratch + page))
        first = SharedChunks(self._prompts[: self._sequences], unit)
        needed, _ = first.slots(self._sequences, self._new_tokens, scratch, page)
        least = max(trial, needed + self._sequences * own_slots(1, scratch, page))
        # No more than if all sequences had slots of their own.
        return PoolSize(max(least, int(self._part * most)), least, unit)

    @property
    def slots(self) -> int:
        """Returns the number of KV slots of the pool; 0 without a pool."""
        pool = self()
        return pool.slots if pool is not None else 0

    def batch_size(self, most: int, prompt: int, new_tokens: int) -> int:
        """Returns how many places a batch of ``most`` sequences gets: as many, or fewer if memory is short.
        If further prompts may join and share slots, it is one of :func:`sizes_of`.

        The pool is made smaller if more sequences fit then.

        Args:
            prompt, new_tokens: numbers of prompt tokens and of new tokens of the longest sequence.
        """
        hierarchy = self._hierarchy
        if hierarchy.memory is not None or hierarchy.config.text_ranks > 1:
            # The memory plan is for this many sequences.
            return most
        last = hierarchy.last_program
        serves = last is not None and last.cache.fits(prompt + new_tokens, self())
        if last is not None and last.batch == most and serves:
            return most
        freed = hierarchy.level_one.nbytes + (last.cache.backend.bytes if last is not None else 0)

        def fitting(slots: int, wanted: int) -> int:
            models, own = (hierarchy.target, hierarchy.draft), hierarchy.own_drafter
            several = _WORKSPACES if slots and self._joins else 1
            size = prompt, new_tokens, freed, slots
            return fitting_batch(*models, hierarchy.config, wanted, *size, own, several)

        if not (self._joins and self._max_batch):
            return self._fitting(fitting, most)
        on_cpu, pooled = hierarchy.target.device.type == "cpu", self() is not None
        if not on_cpu and not (pooled and hierarchy.own_drafter is None):
            # Stages for another number would have to be captured while sequences run.
            return self._fitting(fitting, min(self._max_batch, _MOST_ALONE))
        if last is not None and serves and last.cache.backend.resizes:
            found = fitting(last.cache.backend.pool_slots, self._max_batch)
        elif not pooled:
            # Places are added one by one where sequences have slots of their own.
            return self._fitting(fitting, most)
        else:
            found = self._fitting(fitting, self._max_batch)
        made = hierarchy.places if serves else set[int]()
        sizes = [size for size in sizes_of(self._max_batch) if size <= found or size in made]
        return next((size for size in sizes if size >= most), max(sizes, default=found))

    def _fitting(self, fits: Callable[[int, int], int], most: int) -> int:
        """Returns how many sequences to decode together, up to ``most``. Shares fewer slots if more sequences
        fit then.

        Args:
            fits: returns how many sequences fit into memory, given the slots of the pool and ``most``.
            most: the most sequences.
        """
        if not self._joins:
            return self._fitting_known(fits, most)
        if self._begun:
            # Sequences run in what there is; if their number was not known, more of them have more slots.
            self._sequences = max(self._sequences, most)
            return fits(self.slots, most)
        # Further sequences may join a batch of one.
        wanted = max(2, most)
        while slots := self.slots:
            if (found := fits(slots, wanted)) >= wanted:
                return most
            self._part *= _SMALLER
            if self.slots == slots:
                # The part cannot become smaller.
                if found >= fits(0, wanted):
                    return min(most, found)
                self._part = 0
        return fits(0, most)

    def _fitting_known(self, fits: Callable[[int, int], int], most: int) -> int:
        def holds(sequences: int) -> bool:
            self._sequences = sequences
            return self.slots > 0 and fits(self.slots, sequences) >= sequences

        if holds(most):
            return most
        low, high = fits(0, most), most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holds(middle) else (low, middle - 1)
        if not holds(low):
            self._part = 0
        return low

    def beginning(
        self, prompts: Sequence[Sequence[int]], sequences: int
    ) -> tuple[list[int], list[Sequence[int]]]:
        """Returns the indices of the prompts in the order in which they begin, and the prompts that size the
        buffers.

        Sequences that share a prefix are neighbours, so that a pass reads the prefix once for all of them. If
        there are fewer prompts than ``sequences``, the first prompt is repeated in the second result.
        """
        self._begun, order = True, list(range(len(prompts)))
        if len(prompts) > 1 and (pool := self()) is not None:
            order = SharedChunks(prompts, pool.unit, pool.tails).order()
        return order, [prompts[n] for n in [*order[:sequences], *order[:1] * (sequences - len(prompts))]]
