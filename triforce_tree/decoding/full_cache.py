"""The target's KV cache of a batch: which tokens its backend holds, and each level's views of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.chunk_means import ChunkMeans
from triforce_tree.decoding.stages import FullView
from triforce_tree.kv.backend import CacheSpec, KVBackend, PromptRun
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.choose import make_backend
from triforce_tree.kv.kept_prefixes import Exchange, KeptPrefixes
from triforce_tree.kv.marks import Marks
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.kv.recurrent_states import RecurrentStates, with_states
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime import distributed
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.stats import Progress


class FullCache:
    """Holds keys and values of all committed tokens, followed by scratch slots that each pass overwrites.

    Args:
        target: the model that computes the keys and values.
        config: the retrieval settings, the shape of the draft's trees, and the chunks of a prefill.
        batch: the number of sequences.
        max_seq_len: most tokens of a sequence, new ones included.
        levels: 1, 2 or 3; with 3 there is a retrieval view.
        offload, pinned, store, pool: see ``kv.choose.make_backend``.
        kept: an earlier cache of the same target and bits, and of no larger batch, which must not be used any
            more. What it holds on the device is taken over: its memory where this cache fits into it, else a
            copy.

    Attributes:
        backend: stores the keys and values.
        cached, marks: which tokens are in the cache, and where it can be continued.
        states: the states of the target's recurrent layers; None if it has none.
        view: makes views for the target's forwards; ``token_view`` for those of one token that is committed.
        retrieval: level 1's view; None with fewer than three levels.

    Raises:
        ValueError: settings that the backend does not serve, or a store that does not fit.
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
        pool: PoolSize | None = None,
    ) -> None:
        self._target, self._batch, self._max_seq_len = target, batch, max_seq_len
        self._arrangement = self._weights_at()
        spec = CacheSpec(target, config, batch, max_seq_len, levels)
        earlier = kept.backend if kept is not None else None
        self.backend: KVBackend = make_backend(spec, offload, pinned, pool, store, earlier)
        self.cached, self.retrieval = self.backend.cached, self.backend.retrieval
        self._scratch = spec.scratch
        self._computed_by: object = None
        self._exchange: Exchange | None = None
        # A store that was given holds what is not known here.
        self._given = store is not None
        self.means = ChunkMeans(self.retrieval, batch, max_seq_len, target.device)
        self.view = self.token_view = cast(FullView, self.backend.view)
        self.states: RecurrentStates | None = None
        if target.states is not None:
            self.states = RecurrentStates(target.states, batch, target.device, target.dtype)
            self.token_view = with_states(self.view, self.states, commits=True)
            self.view = with_states(self.view, self.states, commits=False)
        self.marks = Marks(self.backend.store, self.states, batch)
        if kept is not None:
            self._take_over(kept)

    def worth_keeping(
        self, config: HierarchyConfig, prompts: Sequence[Sequence[int]], reuse: Reuse, pool: PoolSize | None
    ) -> bool:
        """Returns whether another cache on the device may reuse what this one holds of these prompts.

        ``pool``: the pool of the other cache.
        """
        if distributed.current() is not None:
            return False
        return self.backend.gives(config.kv_bits, prompts, reuse, pool)

    def _take_over(self, kept: "FullCache") -> None:
        """Take up what an earlier cache holds."""
        self._computed_by = kept._computed_by
        if not self.backend.take_over(kept.backend):
            return
        if self.states is not None and kept.states is not None:
            self.states.take(kept.states)
        self.means.update_all()

    def _reusable(self, prompts: Sequence[Sequence[int]], reuse: Reuse, newest: int, first: int) -> list[int]:
        """Returns how many tokens at the start of each prompt need no prefill; the ``newest`` are computed
        again.

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
        """Prefills all but each prompt's last token; returns how many tokens the cache already held.

        Args:
            progress: called with numbers of tokens; those that are in the cache already come first.
            reuse: which tokens that the cache holds are kept.
            features: where hidden states are kept for the drafter, if it reads any: those of new tokens.
            row: the index in the batch of the sequence that the only prompt replaces.
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
        # Nothing is kept where weights or rotary frequencies have changed.
        current: Reuse = reuse if self._computed_by == now else "none"
        if row is None:
            if current == "none":
                self.backend.forget()
            for b, count in enumerate(self.backend.place(prompts, None, features)):
                self.means.lost(b, count)
        else:
            self.backend.place(prompts, row, features)
        if self._exchange is not None and reuse != "none" and row is None:
            found = self._reusable(prompts, current, 0, 0)
            self._exchange.before(prompts, found, self._computed_by, now, features)
            current, self._computed_by = reuse, now
        starts = self._reusable(prompts, current, newest, first)
        if progress and any(starts):
            progress(sum(starts))
        for b, start in enumerate(starts, first):
            self.marks.restore(b, start)
        if all(n and n == len(p) - 1 for n, p in zip(starts, prompts, strict=True)):
            if features is not None:
                for b, start in enumerate(starts, first):
                    features.begin(b, start)
            return starts
        with self._target.active():
            used = self.backend.prefill(prompts, first, starts, PromptRun(progress, self.states, features))
        if row is None:
            self.means.written(starts, [len(prompt) - 1 for prompt in prompts])
        if reuse == "all":
            for b, prompt in enumerate(prompts, first):
                self.marks.add(b, len(prompt) - 1)
        self._computed_by = now
        return used

    def exchange_with(self, prefixes: KeptPrefixes) -> None:
        """From now on keep copies of texts before they are overwritten, where the backend can."""
        if self.states is None and distributed.current() is None:
            self._exchange = self.backend.exchange(prefixes, self.means)

    def keep_prefixes(self) -> None:
        """Keep copies of all texts: the cache is not used any more."""
        if self._exchange is not None:
            self._exchange.keep(self._computed_by)

    def restored(self, tokens: Sequence[int], whole: int) -> None:
        """All but the last token of the only sequence were written from a file; ``whole``: of the tokens."""
        length = len(tokens) - 1
        self.backend.restored(length)
        if self.states is not None:
            self.states.lengths = [length]
        self.cached.begin(0, tokens)
        self.cached.whole[0] = whole
        self._computed_by = self._target.function_key()
        self.means.update_all()

    def fits(self, max_seq_len: int, pool: PoolSize | None = None) -> bool:
        """Returns whether sequences of ``max_seq_len`` tokens fit into the pool, or into their own slots."""
        return max_seq_len <= self._max_seq_len and self.backend.serves(pool)

    def forget(self) -> None:
        """Reuse nothing of what the cache holds."""
        self._forget_sequences()
        self.backend.forget()

    def _forget_sequences(self) -> None:
        self.cached.clear()
        if self.states is not None:
            self.states.invalidate()

    def end(self) -> None:
        """The generation has ended, in whatever way: no sequence goes on."""
        self.backend.release(range(self._batch))

    def holds(self, lengths: Sequence[int]) -> bool:
        """Returns whether decoding may continue after the first ``lengths`` tokens of those written.

        Rings may have overwritten what is needed there, and recurrent layers keep no earlier states.
        """
        if self.states is not None and self.states.lengths != list(lengths):
            return False
        return self.backend.store.holds(lengths)

    def begin(self, prompts: Sequence[Sequence[int]], row: int | None = None) -> None:
        """Continues from the ends of prompts whose keys and values the cache holds.

        ``row`` is the batch index of the only prompt's sequence, while the others go on.
        """
        for b, prompt in enumerate(prompts, row or 0):
            self.cached.begin(b, prompt)
            self.marks.prune(b, len(prompt) - 1)
        lengths = [len(prompt) - 1 for prompt in prompts]
        if row is not None:
            self.means.replace(row, *lengths)
            return
        self.means.begin(lengths)
        self.backend.begin(lengths)

    def committed(
        self, counts: Sequence[int], tokens: Sequence[Sequence[int]] | None = None, with_means: bool = False
    ) -> None:
        """Records how many tokens the last pass of the target added to each sequence.

        Args:
            tokens: the added tokens of each sequence; None if they are not known.
            with_means: whether it has updated the chunk means, which were up to date before it.
        """
        self.means.committed(counts, with_means)
        self.cached.grown(tokens)
        if self.states is not None:
            self.states.grown(counts)
        self.backend.committed(counts)

    @contextmanager
    def trial(self, length: int) -> Iterator[None]:
        """Inside, passes may write after made-up sequences of ``length`` tokens; what they write is undone.
        Afterwards the sequences must be fed again, or :meth:`begin` called."""
        states = self.states.saved() if self.states is not None else nullcontext()
        with self.backend.trial(length, self._scratch + 1, self._given), states:
            yield
        if length < self._max_seq_len - 1:
            self.means.update_all()

    def close(self) -> None:
        """Releases host memory; the cache cannot be used afterwards."""
        self.backend.close()

    @property
    def closed(self) -> bool:
        """Returns whether the cache can no longer be used.

        This is so once its memory was released, or once streamed experts have moved, since CUDA graphs hold
        their addresses.
        """
        return self.backend.closed or self._arrangement != self._weights_at()

    def _weights_at(self) -> int:
        return self._target.streamed.arrangement if self._target.streamed is not None else 0
