"""The KV backend of a batch whose prompts begin alike, and come and go while it runs."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from triforce_tree.kv.backend import CacheSpec, KVBackend, PromptRun
from triforce_tree.kv.pool.blocks import PoolFullError, PrefixPool, tail_of
from triforce_tree.kv.pool.size import PoolSize, page_of
from triforce_tree.kv.pool.store import PooledStore
from triforce_tree.kv.pool.views import PooledRetrievalView, PooledView, SharingView
from triforce_tree.kv.view import KVView
from triforce_tree.runtime.features import Features


class PooledBackend(KVBackend):
    """Stores chunks of prompts, and what each sequence has after them, in pages of a :class:`PrefixPool`.

    Args:
        spec: what the slots are needed for.
        size: the size of the pool.
        kept: an earlier backend. If it differs in the number of sequences alone, both have the same pages,
            and the one that took over last uses them (:meth:`take_over`).

    Attributes:
        pool: which pages hold what.
    """

    store: PooledStore
    pool: PrefixPool
    reclaims = resizes = True

    def __init__(self, spec: CacheSpec, size: PoolSize, kept: KVBackend | None = None) -> None:
        super().__init__(spec)
        page = page_of(size.unit, spec.config, spec.levels)
        beside = kept if isinstance(kept, PooledBackend) and kept._alike(spec, size, page) else None
        if beside is not None:
            self.pool, self.pool_slots = beside.pool, beside.pool_slots
            self.store = store = PooledStore(spec, self.pool_slots, page, beside.store)
        else:
            self.pool_slots = size.slots
            self.store = store = PooledStore(spec, self.pool_slots, page)
            self.pool = PrefixPool(store.total_slots, size.unit, page, spec.scratch)
            self.pool.place(self.batch)
        store.attention = spec.attention
        self.retrieval = spec.retrieval(PooledRetrievalView, store)
        self._new_tokens = [0] * self.batch
        # The first tokens of each sequence whose hidden states are kept, where a drafter reads any.
        self._leading: list[list[int]] = [[] for _ in range(self.batch)]
        # Tokens in ``cached`` of sequences whose chunks are hidden, and how many are in whole chunks.
        self._resting: dict[int, tuple[list[int], int]] = {}
        if beside is None:
            self._follow_pool()
        self.share(size)

    def _alike(self, spec: CacheSpec, size: PoolSize, page: int) -> bool:
        """Returns whether this backend's pages can serve other sequences with a pool of this size."""
        own, store = self.spec, self.store
        return (
            own.target is spec.target
            and (own.slots, own.scratch, store.bits) == (spec.slots, spec.scratch, spec.config.kv_bits)
            and (store.page, self.pool.unit) == (page, size.unit)
            and size.least <= store.total_slots
        )

    def view(self, queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> KVView:
        if self.spec.config.exact or not self.store.attention.can.prefixes:
            return PooledView(self.store, queries, mask, depths, exact=self.spec.config.exact)
        return SharingView(self.store, queries, mask, depths)

    def ready(self) -> None:
        """See :class:`KVBackend`."""
        self.store.update()

    def share(self, pool: PoolSize | None) -> None:
        assert pool is not None
        self.pool.tails = pool.tails

    def place(
        self, prompts: Sequence[Sequence[int]], index: int | None, features: Features | None
    ) -> list[int]:
        """See :class:`KVBackend`; sequences that are cached whole keep their slots."""
        if index is not None:
            self._place({index: prompts[0]}, features)
            return [index]
        cached = self.cached
        whole = [len(p) > 1 and cached.common(b, p, "all") == len(p) - 1 for b, p in enumerate(prompts)]
        # Their own slots were made for as many tokens to come.
        others = {b: prompt for b, prompt in enumerate(prompts) if not whole[b] or self._left(b, prompt) < 0}
        try:
            self._place(others, features)
        except PoolFullError:
            # Sequences that stay may have more slots of their own than they need now.
            others = dict(enumerate(prompts))
            self._place(others, features)
        return list(others)

    def _place(self, prompts: Mapping[int, Sequence[int]], features: Features | None) -> None:
        self._release(prompts)
        for b, prompt in prompts.items():
            self.pool.admit(b, prompt, self._new_tokens[b])
        self._follow_pool()
        for b, prompt in prompts.items():
            self._find(b, prompt, features)

    def _left(self, b: int, prompt: Sequence[int]) -> int:
        """Returns how many own slots sequence b has left after a prompt and the tokens to come."""
        path = self.pool.path(b)
        end = path[-1].stop if path else 0
        return self.pool.size(b) - (len(prompt) - end + self._new_tokens[b] + self.spec.scratch)

    def _find(self, b: int, prompt: Sequence[int], features: Features | None) -> None:
        """Notes which tokens of a prompt are in its chunks; those of its own slots are not known."""
        held, tail = self.pool.held(b), tail_of(self.pool.tails, prompt)
        # Chunks after a tail begin at other positions than those of a prefill of this prompt alone.
        self.cached.copied(b, prompt, held, min(held, tail or held))
        self.cached.ends[b] = [held]
        if features is None:
            return
        leading = list(prompt[: features.leading])
        if leading in self._leading:
            features.copy_leading(self._leading.index(leading), b)
        else:
            features.forget(b)
        self._leading[b] = leading

    def prefill(
        self, prompts: Sequence[Sequence[int]], first: int, starts: Sequence[int], run: PromptRun
    ) -> list[int]:
        """See :class:`KVBackend`; what earlier prompts have computed meanwhile is found."""
        used, newest = list(starts), run.features.history if run.features is not None else 0
        for n, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            b = first + n
            if b in self._resting:
                tokens, whole = self._resting.pop(b)
                self.cached.copied(b, tokens, len(tokens), whole)
                self._follow_pool()
            if self.pool.held(b) > len(self.cached.held[b]):
                self._find(b, prompt, run.features)
                used[n] = max(start, self.cached.common(b, prompt, "chunks", newest))
                if run.progress and used[n] > start:
                    run.progress(used[n] - start)
            super().prefill([prompt], b, [used[n]], run)
            self.pool.written(b, len(prompt) - 1)
        return used

    def rest(self, b: int, held: int) -> int:
        """See :class:`KVBackend`: a pass reads all chunks of a sequence, so the sequence has none until all
        their tokens are known to be there, and passes write to its own slots.
        """
        if held >= sum(len(block.tokens) for block in self.pool.path(b)):
            return held
        self._resting[b] = self.cached.held[b], self.cached.whole[b]
        self.cached.held[b] = []
        self.cached.keep(b, 0)
        self._follow_pool()
        return 0

    def expect(self, new_tokens: Sequence[int]) -> None:
        self._new_tokens = list(new_tokens)

    def release(self, sequences: Sequence[int]) -> None:
        self._release(sequences)
        for b in sequences:
            self.cached.keep(b, 0)

    def _release(self, sequences: Collection[int]) -> None:
        self.pool.release(sequences)
        for b in sequences:
            self._resting.pop(b, None)

    def has_slots(
        self,
        running: Mapping[int | None, Sequence[int]],
        coming: Sequence[tuple[Sequence[int], int]],
        most: int,
        tokens: int | None,
    ) -> bool:
        """See :class:`KVBackend`; the pool was made for ``tokens``."""
        empty = max(0, max(most, self.batch) - len(running) - len(coming))
        return (
            self.pool.needed([b for b in running if b is not None], coming, empty) <= self.store.total_slots
        )

    def forget(self) -> None:
        self.pool.forget()
        self._resting.clear()
        self.cached.clear()

    def serves(self, pool: PoolSize | None) -> bool:
        return pool is not None and pool.least <= self.store.total_slots

    def gives(self, bits: int, prompts: Sequence[Sequence[int]], reuse: str, pool: PoolSize | None) -> bool:
        return pool is not None and bits == self.store.bits

    def _filled(self, b: int, prompt: Sequence[int], start: int, length: int) -> None:
        super()._filled(b, prompt, start, length)
        self.pool.written(b, length)
        self.cached.ends[b] = [length]

    def take_over(self, kept: KVBackend) -> bool:
        """See :class:`KVBackend`: all chunks that fit, and the sequences of a pool where they fit as well."""
        if isinstance(kept, PooledBackend) and kept.pool is self.pool:
            held = kept.cached.held[: self.batch]
            lengths = [*map(len, held), *[0] * (self.batch - len(held))]
            self.pool.release(range(self.batch, kept.batch))
            try:
                self.pool.place(self.batch)
            except PoolFullError:
                self.pool.release(range(self.batch))
                self.pool.place(self.batch)
                lengths = [0] * self.batch
            self._resting.clear()
            self._leading = [[] for _ in range(self.batch)]
            self._continue(kept, lengths)
        elif isinstance(kept, PooledBackend):
            alike = (kept.store.page, kept.spec.scratch) == (self.store.page, self.spec.scratch)
            there, here, going_on = self.pool.take(kept.pool, self.batch, alike)
            self.store.copy_pages(kept.store, there, here)
            held = kept.cached.held[: self.batch]
            self._continue(kept, [len(tokens) if b in going_on else 0 for b, tokens in enumerate(held)])
        elif kept.chunk == self.chunk:
            self._take_sequences(kept)
        self._follow_pool()
        return False

    def _continue(self, kept: "PooledBackend", lengths: Sequence[int]) -> None:
        """Records that sequences have so many tokens of those with the same numbers in another backend."""
        self.cached.take(kept.cached, lengths[: kept.batch])
        for b, length in enumerate(lengths):
            self.cached.keep(b, length)
            self.store.fed(b, length)

    def renumber(self, order: Sequence[int]) -> None:
        for b in self._resting:
            self.cached.keep(b, 0)
        self.pool.renumber(order)
        self.cached.renumber(order)

    def _take_sequences(self, kept: KVBackend) -> None:
        """Copies whole chunks of sequences with their own slots into the pool while slots are free."""
        unit = self.pool.unit
        spare = (
            self.store.total_slots
            - self.batch * self.pool.own_size([0], 0)
            - self.pool.own_size([0] * unit, 0)
        )
        for b, tokens in enumerate(kept.cached.held):
            count = max(0, min(kept.cached.whole[b], spare)) // unit * unit
            self.pool.release([0])
            before = self.pool.taken
            self.pool.admit(0, [*tokens[:count], 0], 0)
            spare -= max(0, self.pool.taken - before)
            for block in self.pool.path(0):
                if not block.written:
                    self.store.copy_from(kept.store, b, block.start, block.pages)
            self.pool.written(0)

    def _follow_pool(self) -> None:
        batch = range(self.batch)
        shared = [[] if b in self._resting else self.pool.shared(b) for b in batch]
        self.store.set(shared, [self.pool.own(b) for b in batch])
