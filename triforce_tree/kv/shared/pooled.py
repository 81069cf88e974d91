"""KV slots of a batch that prompts join while it runs: what they begin with is found among what is stored."""

from collections.abc import Mapping, Sequence

import torch

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.shared.pool import PoolFullError, PrefixPool
from triforce_tree.kv.shared.store import SharedStore, SlotLayout
from triforce_tree.kv.shared.tree import DEPTH, PrefixTree, Run
from triforce_tree.kv.store import KVStore
from triforce_tree.runtime.features import Features


class PooledStore(SharedStore):
    """Slots that a :class:`PrefixPool` gives to whole chunks of prompts and to what each row has after them.

    Args:
        layout: of the batch.
        slots: of each KV head.
        unit: tokens of a chunk, a multiple of the page.

    Attributes:
        pool: which slots hold what.
        new_tokens: how many may follow the sequence in each row that is prefilled next.
    """

    def __init__(self, layout: SlotLayout, slots: int, unit: int) -> None:
        batch = layout.batch
        depth = max(DEPTH, batch.bit_length())
        super().__init__(layout, slots, depth)
        self.pool = PrefixPool(self.slots, unit, layout.page, layout.scratch, depth, self._move)
        self.new_tokens = [0] * batch
        # What the hidden states of each row's first positions are of, where a drafter reads any.
        self._leading: list[list[int]] = [[] for _ in range(batch)]
        for b in range(batch):
            self.pool.admit(b, [0], 0)
        self._follow_pool()

    def share(
        self,
        tree: PrefixTree,
        cached: CachedTokens,
        prompts: Sequence[Sequence[int]],
        features: Features | None = None,
    ) -> list[int]:
        """See :class:`SharedStore`; rows whose whole sequence is cached keep their slots."""
        whole = [len(p) > 1 and cached.common(b, p, "all") == len(p) - 1 for b, p in enumerate(prompts)]
        # Their own slots were made for as many tokens to come.
        others = [b for b, kept in enumerate(whole) if not kept or self._left(b, prompts[b]) < 0]
        try:
            self._admit({b: prompts[b] for b in others})
        except PoolFullError:
            # Rows that stay may have more slots of their own than they need now.
            others = list(range(self.batch))
            self._admit(dict(enumerate(prompts)))
        self._follow_pool()
        for b in others:
            self._begin(b, prompts[b], cached, features)
        return [0 if b in others else len(prompt) - 1 for b, prompt in enumerate(prompts)]

    def _admit(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Give rows the slots of other prompts."""
        self.pool.release(prompts)
        for b, prompt in prompts.items():
            self.pool.admit(b, prompt, self.new_tokens[b])

    def _left(self, b: int, prompt: Sequence[int]) -> int:
        """Own slots that row b has left after a sequence and the tokens to come."""
        path, scratch = self.pool.path(b), self.scratch
        assert scratch is not None
        end = path[-1].stop if path else 0
        return self.pool.size(b) - (len(prompt) - end + self.new_tokens[b] + scratch)

    def join(
        self, b: int, prompt: Sequence[int], cached: CachedTokens, features: Features | None = None
    ) -> None:
        """See :class:`SharedStore`."""
        self._admit({b: prompt})
        self._follow_pool()
        self._begin(b, prompt, cached, features)

    def _begin(self, b: int, prompt: Sequence[int], cached: CachedTokens, features: Features | None) -> None:
        held = self.pool.held(b)
        cached.copied(b, prompt, held, held)
        if features is None:
            return
        leading = list(prompt[: features.leading])
        if leading in self._leading:
            features.copy_leading(self._leading.index(leading), b)
        else:
            features.begin(b, 0)
        self._leading[b] = leading

    def release(self, rows: Sequence[int], cached: CachedTokens) -> None:
        """These rows' sequences have ended; others are prefilled into the rows before the next pass."""
        self.pool.release(rows)
        for row in rows:
            cached.keep(row, 0)

    def room(self, rows: Sequence[int], coming: Sequence[tuple[Sequence[int], int]], most: int) -> bool:
        """Whether prompts to come fit beside the sequences in some rows.

        Args:
            coming: prompts, and most new tokens of each.
            most: rows that there will be.
        """
        empty = max(0, max(most, self.batch) - len(rows) - len(coming))
        return self.pool.needed(rows, coming, empty) <= self.slots

    def fed(self, sequence: int, length: int) -> None:
        """See :class:`KVStore`."""
        super().fed(sequence, length)
        self.pool.written(sequence)

    def forget(self) -> None:
        """See :class:`SharedStore`."""
        self.pool.forget()

    def fits(self, max_seq_len: int, tree: PrefixTree) -> bool:
        """See :class:`SharedStore`."""
        return 0 < tree.least <= self.slots

    def keeps(self, prefix: PrefixTree) -> bool:
        """See :class:`SharedStore`."""
        return prefix.room > 0

    def take_over(self, source: KVStore, b: int, kept: CachedTokens, cached: CachedTokens) -> None:
        """See :class:`SharedStore`: all that such a store holds, else the sequence's whole chunks."""
        if isinstance(source, PooledStore):
            alike = (source.page, source.scratch) == (self.page, self.scratch)
            copies, going_on = self.pool.take(source.pool, self.batch, alike)
            for group, other in zip(self.whole, source.whole, strict=True):
                for new, old in zip(group.parts, other.parts, strict=True):
                    for start, size, place in copies:
                        new[:, 0, :, place : place + size] = old[:, 0, :, start : start + size]
            lengths = [
                len(held) if row in going_on else 0 for row, held in enumerate(kept.held[: self.batch])
            ]
            cached.take(kept, lengths)
            for row, length in enumerate(lengths):
                super().fed(row, length)
        elif kept.chunk == cached.chunk:
            unit = self.pool.unit
            room = self.slots - (self.batch + 1) * self.pool.own_size([0] * unit, 0)
            count = max(0, min(kept.whole[b], room)) // unit * unit
            tokens = [*kept.held[b][:count], 0]
            self.pool.release([0])
            self.pool.admit(0, tokens, 0)
            for run in self.pool.runs(0):
                self.copy_from(source, b, run.start, run.stop, run.place)
            self.pool.written(0)
        self._follow_pool()

    def layout_of_trial(self, start: int) -> tuple[list[list[Run]], list[int]]:
        """See :class:`SharedStore`."""
        assert self.scratch is not None
        own = -(-(self.page + self.scratch + 1) // self.page) * self.page
        length = min(self.slots - self.batch * own, start) // self.page * self.page
        places = [self.slots // self.page * self.page - (b + 1) * own for b in range(self.batch)]
        return [[Run(0, length, 0)] if length else []] * self.batch, places

    def _follow_pool(self) -> None:
        rows = range(self.batch)
        self._set([self.pool.runs(b) for b in rows], [self.pool.place(b) for b in rows])

    def _move(self, stored: Sequence[tuple[int, int]]) -> None:
        """Put runs of slots, given by place and size, one after the other."""
        total = sum(size for _, size in stored)
        for part in self._parts:
            for (slots,) in part:
                slots[:, :total] = torch.cat([slots[:, at : at + size] for at, size in stored], 1)
