"""The target's KV cache of a batch, on the device or split with the host, and each level's views of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.chunk_means import ChunkMeans
from triforce_tree.decoding.device_slots import device_slots, offloaded_slots
from triforce_tree.decoding.stages import FullView
from triforce_tree.kv.cached_tokens import CachedTokens, Reuse
from triforce_tree.kv.kept_prefixes import KeptPrefixes, PrefixExchange
from triforce_tree.kv.marks import Marks
from triforce_tree.kv.offload.gathered_retrieval import GatheredRetrievalView
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.parallel.store import SplitStore
from triforce_tree.kv.prefill import chunk_tokens, prefill
from triforce_tree.kv.recurrent_states import RecurrentStates, with_states
from triforce_tree.kv.shared.pooled import PooledStore
from triforce_tree.kv.shared.store import SharedStore
from triforce_tree.kv.shared.tree import PrefixTree
from triforce_tree.kv.shared_prefix import copy_prefix
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.view import ChunkedView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime import distributed
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.stats import Progress
from triforce_tree.trees.device_shapes import PassLimits


class FullCache:
    """Keys and values of every committed token, and scratch slots after them that passes overwrite.

    Args:
        target: whose keys and values these are.
        config: the retrieval settings, the shape of the draft's trees, and the chunks of a prefill.
        batch: sequences.
        max_seq_len: most tokens of a sequence, new ones included.
        levels: 1, 2 or 3; with 3 there is a retrieval view.
        offload: how to split the cache between device and host; None keeps it on the device.
        pinned: called with bytes of host memory as they are taken.
        store: KV slots on the device to work on, with whatever they hold; by default new ones.
        kept: an earlier cache of the same target and bits, and of no larger batch, which must not be used any
            more. What it holds on the device is taken over: its memory where this cache fits into it, else a
            copy.
        prefix: common prefixes that are stored once, of these sizes at most; None or an empty tree for none.

    Attributes:
        prefix: the common prefixes of the prompts of the next prefill, where any are stored once.
        cached, marks: which tokens are in the cache, and where it can be continued.
        store: the slots on the device; None where the cache is offloaded.
        split: slots that several ranks keep (``store`` has layers with a window alone); None without ranks.
        pooled: the store, where prompts join a batch and share what is stored; None otherwise.
        offloaded: None where the cache is on the device.
        states: of the target's recurrent layers; None where it has none.
        view: makes views for the target's forwards; ``token_view`` for those of one token that is committed.
        retrieval_view, gathered_view: level 1's views of slots on the device, and of an offloaded cache.

    Raises:
        ValueError: a store that is too small, of other bits, or cannot be paged by chunks; an offloaded cache
            in 8 bits.
        HostMemoryError: host memory is short.
    """

    def __init__(
        self,
        target: HFModel,
        config: HierarchyConfig,
        batch: int,
        max_seq_len: int,
        levels: int,
        offload: Offload | None = None,
        pinned: Callable[[int], None] | None = None,
        store: KVStore | None = None,
        kept: "FullCache | None" = None,
        prefix: PrefixTree | None = None,
    ) -> None:
        self._target, self._batch, self._max_seq_len = target, batch, max_seq_len
        self._arrangement = self._weights_at()
        self._prefill_chunk = chunk_tokens(config.prefill_chunk, target.device)
        self._limits = PassLimits.of(config, levels)
        self.cached = CachedTokens(batch, self._prefill_chunk)
        self._computed_by: object = None
        self._exchange: PrefixExchange | None = None
        self._given = store is not None
        self.store: KVStore | None = None
        self.offloaded: OffloadedCache | None = None
        self.split: SplitStore | None = None
        self._shared: SharedStore | None = None
        self.prefix, self._offered = prefix or PrefixTree(), 0
        self.retrieval_view: ChunkedView | None = None
        self.gathered_view: GatheredRetrievalView | None = None
        self.states: RecurrentStates | None = None
        self.view: FullView
        if offload is not None:
            made = offloaded_slots(target, config, batch, max_seq_len, levels, offload, pinned)
            self.offloaded, self.view, self.gathered_view = made
        else:
            taken = kept.store if kept is not None else None
            slots = device_slots(target, config, batch, max_seq_len, levels, store, taken, prefix)
            self.store, self.split, self.view, self.retrieval_view, self._rows, self._shared = slots
        self.pooled = self._shared if isinstance(self._shared, PooledStore) else None
        self.means = ChunkMeans(self.retrieval_view, batch, max_seq_len, target.device)
        self.token_view = self.view
        if target.states is not None:
            self.states = RecurrentStates(target.states, batch, target.device, target.dtype)
            self.token_view = with_states(self.view, self.states, commits=True)
            self.view = with_states(self.view, self.states, commits=False)
        self.marks = Marks(self._on_device, self.states, batch)
        if kept is not None and offload is None:
            self._take_over(kept)

    def worth_keeping(
        self, config: HierarchyConfig, prompts: Sequence[Sequence[int]], reuse: Reuse, prefix: PrefixTree
    ) -> bool:
        """Whether another cache, on the device, may take over what this one holds of these prompts.

        ``prefix``: as for that cache. If it stores any, it takes over the beginning of the first prompt,
        of the sequence that holds most of it.
        """
        if self.store is None or self.store.bits != config.kv_bits or distributed.current() is not None:
            return False
        if prefix:
            found = [self.cached.common(b, prompts[0], "chunks") for b in range(self._batch)]
            self._offered = max(range(self._batch), key=found.__getitem__)
            return found[self._offered] > 0 or (self._shared is not None and self._shared.keeps(prefix))
        if self._shared is not None or self._batch > len(prompts):
            return False
        return any(self.cached.common(b, prompt, reuse) for b, prompt in enumerate(prompts[: self._batch]))

    def _take_over(self, kept: "FullCache") -> None:
        """Take up what an earlier cache holds."""
        assert self.store is not None
        assert kept.store is not None
        self._computed_by = kept._computed_by
        if self._shared is not None:
            self._shared.take_over(kept.store, kept._offered, kept.cached, self.cached)
            return
        lengths = [len(tokens) for tokens in kept.cached.held]
        if self.store.memory is not kept.store.memory:
            copied = [self.store.take(kept.store, b, length) for b, length in enumerate(lengths)]
            lengths = [n if done else 0 for n, done in zip(lengths, copied, strict=True)]
        if self.states is not None and kept.states is not None:
            self.states.take(kept.states)
        self.cached.take(kept.cached, lengths)
        self.means.update_all()

    @property
    def _on_device(self) -> KVStore:
        """Slots on the device: all of them, or those of an offloaded cache's layers with a window."""
        if self.offloaded is not None:
            return self.offloaded.rings
        assert self.store is not None
        return self.store

    def _reusable(self, prompts: Sequence[Sequence[int]], reuse: Reuse, newest: int, first: int) -> list[int]:
        """How many tokens at the beginning of each prompt need no prefill; the ``newest`` are fed anew.

        It is 0 where layers with a window or recurrent ones have gone on too far (``Marks``).
        """
        starts = [self.cached.common(b, prompt, reuse, newest) for b, prompt in enumerate(prompts, first)]
        starts = [self.marks.start(b, n, copies=reuse == "all") for b, n in enumerate(starts, first)]
        return distributed.agreed(starts)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
        features: Features | None = None,
        row: int | None = None,
    ) -> list[int]:
        """Compute keys and values of all but each prompt's last token; return how many there were already.

        Args:
            progress: called with numbers of tokens; those that are in the cache already come first.
            reuse: which tokens that the cache holds are kept.
            features: where hidden states are kept for the drafter, if it reads any: those of new tokens.
            row: of the only prompt, where the other sequences go on (in a cache on the device).
        """
        try:
            return self._prefill(prompts, progress, reuse, features, row)
        except BaseException:
            # Chunks of a pool that were written before are as they were.
            self._forget_sequences()
            raise

    def _prefill(
        self,
        prompts: Sequence[Sequence[int]],
        progress: Progress | None,
        reuse: Reuse,
        features: Features | None,
        row: int | None,
    ) -> list[int]:
        first, now = row or 0, self._target.function_key()
        newest = features.history if features is not None else 0
        if self._shared is not None and row is None:
            if self._computed_by != now:
                self.forget()
            for b, count in enumerate(self._shared.share(self.prefix, self.cached, prompts, features)):
                self.means.lost(b, count)
        elif self._shared is not None and row is not None:
            self._shared.join(row, prompts[0], self.cached, features)
        # What other sequences hold of other weights is not to be copied.
        shares = reuse != "none" and self.states is None and self.split is None
        shares = shares and self._computed_by in (None, now)
        if self._exchange is not None and reuse != "none" and row is None:
            found = self._reusable(prompts, reuse if self._computed_by == now else "none", 0, 0)
            self._exchange.before(prompts, found, self._computed_by, now, features)
            self._computed_by = now
        # Nothing is kept where weights or rotary frequencies have changed.
        starts = self._reusable(prompts, reuse if self._computed_by == now else "none", newest, first)
        if progress and any(starts):
            progress(sum(starts))
        for b, start in enumerate(starts, first):
            self.marks.restore(b, start)
        if all(n and n == len(p) - 1 for n, p in zip(starts, prompts, strict=True)):
            if features is not None:
                for b, start in enumerate(starts, first):
                    features.begin(b, start)
            return starts
        own = list(starts)
        with self._target.active():
            if self.offloaded is not None:
                self.offloaded.prefill(prompts, self._prefill_chunk, progress, starts, features, self.states)
                for b, (prompt, start) in enumerate(zip(prompts, starts, strict=True), first):
                    self.cached.fed(b, prompt, start)
            else:
                assert self.store is not None
                for b, prompt in enumerate(prompts, first):
                    start = own[b - first]
                    if shares:
                        start = copy_prefix(self.store, self.cached, b, prompt, start, features, progress)
                        starts[b - first] = start
                    prefill(
                        self._target, self.store, b, list(prompt[:-1]), self._prefill_chunk, progress,
                        self.states, start, features, self._rows,
                    )  # fmt: skip
                    self.cached.fed(b, prompt, start)
        if row is None:
            self.means.written(own, [len(prompt) - 1 for prompt in prompts])
        if reuse == "all":
            for b, prompt in enumerate(prompts, first):
                self.marks.add(b, len(prompt) - 1)
        self._computed_by = now
        return starts

    def exchange_with(self, prefixes: KeptPrefixes) -> None:
        """From now on keep copies of texts before they are overwritten, where :class:`PrefixExchange` can."""
        if self.states is None and self._shared is None and distributed.current() is None:
            self._exchange = PrefixExchange.of(prefixes, self.store, self.cached, self.means)

    def keep_prefixes(self) -> None:
        """Keep copies of all texts: the cache is not used any more."""
        if self._exchange is not None:
            self._exchange.keep(self._computed_by)

    def restored(self, tokens: Sequence[int], whole: int) -> None:
        """All but the last token of the only sequence were written from a file; ``whole``: of the tokens."""
        length = len(tokens) - 1
        self._on_device.fed(0, length)
        if self.states is not None:
            self.states.lengths = [length]
        if self.offloaded is not None:
            self.offloaded.host.ring.invalidate()
            self.offloaded.lengths[0], unit = length, self.offloaded.host.unit
            self.offloaded.host.base[0] = length // unit * unit
            self.offloaded.set_lengths([length])
        self.cached.begin(0, tokens)
        self.cached.whole[0] = whole
        self._computed_by = self._target.function_key()
        self.means.update_all()

    def fits(self, max_seq_len: int, prefix: PrefixTree) -> bool:
        """Whether sequences of so many tokens fit, with these prefixes stored once."""
        once = self._shared is not None and self._shared.fits(max_seq_len, prefix)
        return max_seq_len <= self._max_seq_len and (once or (not prefix and self._shared is None))

    def forget(self) -> None:
        """Reuse nothing of what the cache holds."""
        self._forget_sequences()
        if self._shared is not None:
            self._shared.forget()

    def _forget_sequences(self) -> None:
        self.cached.clear()
        if self.states is not None:
            self.states.invalidate()

    def end(self) -> None:
        """The generation has ended, in whatever way: no sequence goes on."""
        if self.pooled is not None:
            self.pooled.release(range(self._batch), self.cached)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether decoding may continue after the first ``lengths`` tokens of what was written.

        Rings may have overwritten what is needed there, and recurrent layers keep no earlier states.
        """
        if self.states is not None and self.states.lengths != list(lengths):
            return False
        return self._on_device.holds(lengths)

    def begin(self, prompts: Sequence[Sequence[int]], row: int | None = None) -> None:
        """Continue from the ends of prompts, whose keys and values the cache holds.

        ``row``: that of the only prompt, where the other sequences go on.
        """
        for b, prompt in enumerate(prompts, row or 0):
            self.cached.begin(b, prompt)
            self.marks.prune(b, len(prompt) - 1)
        lengths = [len(prompt) - 1 for prompt in prompts]
        if row is not None:
            self.means.replace(row, *lengths)
            return
        self.means.begin(lengths)
        if self.offloaded is not None:
            self.offloaded.set_lengths(lengths)
        if self.gathered_view is not None:
            self.gathered_view.fill()

    def committed(
        self, counts: Sequence[int], tokens: Sequence[Sequence[int]] | None = None, with_means: bool = False
    ) -> None:
        """The last pass of the target made each sequence so many tokens longer.

        Args:
            tokens: those of each sequence; None where they are not known.
            with_means: whether it has updated the chunk means, which were up to date before it.
        """
        self.means.committed(counts, with_means)
        self.cached.grown(tokens)
        self._on_device.grown(counts)
        if self.states is not None:
            self.states.grown(counts)
        if self.offloaded is not None:
            self.offloaded.committed(counts)

    @contextmanager
    def trial(self, length: int) -> Iterator[None]:
        """Inside, passes may write after made-up sequences of ``length`` tokens; what they write is undone.
        Afterwards the sequences must be fed again, or :meth:`begin` called."""
        held = [len(tokens) for tokens in self.cached.held]
        # A store that was given holds what is not known here; where positions are split over ranks, slots are
        # not those of the positions.
        unknown = self._given or (self.split is not None and any(held))
        self._on_device.initialise([None] * len(held) if unknown else held)
        offloaded = self.offloaded.trial(length, held) if self.offloaded is not None else nullcontext()
        states = self.states.saved() if self.states is not None else nullcontext()
        count = self._limits.scratch_slots + 1
        split = self.split.saved(length, count) if self.split is not None else nullcontext()
        with self._on_device.saved(length, count), states, offloaded, split:
            yield
        if length < self._max_seq_len - 1:
            self.means.update_all()

    def close(self) -> None:
        """Give an offloaded cache's host memory back; the cache cannot be used afterwards."""
        if self.offloaded is not None:
            self.offloaded.close()

    @property
    def closed(self) -> bool:
        """Whether host memory was given back, or streamed experts have moved, whose places graphs keep."""
        freed = self.offloaded is not None and self.offloaded.closed
        return freed or self._arrangement != self._weights_at()

    def _weights_at(self) -> int:
        return self._target.streamed.arrangement if self._target.streamed is not None else 0
