"""The target's KV cache of a batch: which tokens its backend holds, and each level's views of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.stages import FullView
from triforce_tree.kv.backend import CacheSpec, KVBackend, PromptRun
from triforce_tree.kv.cached_tokens import CachedTokens, Reuse
from triforce_tree.kv.choose import make_backend
from triforce_tree.kv.kept_prefixes import KeptPrefixes
from triforce_tree.kv.marks import Marks, StoredSequences
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.kv.prefill import forward_end
from triforce_tree.kv.prefix_exchange import PrefixExchange
from triforce_tree.kv.recurrent_states import RecurrentStates, with_states
from triforce_tree.kv.view import RetrievalView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime import distributed
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import id_tensor

# Chunks are updated in multiples of this number, so that few kernels are compiled. Chunks after the text are
# not read.
_STEP = 64


class ChunkMeans:
    """Records which chunk means are up to date; passes without the retrieval level do not update them.

    Args:
        view: the view of the retrieval level; None without that level.
        cached: the tokens of each sequence.
        max_seq_len: the most tokens of a sequence.
        device: the device of the KV slots.
    """

    def __init__(
        self, view: RetrievalView | None, cached: CachedTokens, max_seq_len: int, device: torch.device
    ) -> None:
        self._view, self._cached, self._most, self._device = view, cached, max_seq_len, device
        # The number of tokens of each sequence that the means include.
        self._known = [0] * len(cached.held)

    def begin(self) -> None:
        """Starts from the sequences as they are now, which may have become shorter."""
        self._known = [min(pair) for pair in zip(self._known, self._cached.lengths, strict=True)]

    def updated(self, counts: Sequence[int]) -> None:
        """Records that a pass has updated the means, which were up to date before, of sequences that have so
        many more tokens since.
        """
        grown = zip(counts, self._cached.lengths, self._known, strict=True)
        self._known = [length if count else known for count, length, known in grown]

    def written(self, starts: Sequence[int]) -> None:
        """Updates the means after a prefill that wrote each sequence's KV slots from ``starts[b]`` on; the
        means of whole chunks before ``starts[b]`` stay as they are.
        """
        self._known = [min(pair) for pair in zip(self._known, starts, strict=True)]
        self.catch_up()

    def lost(self, b: int, start: int) -> None:
        """Records that sequence b has another text from position ``start`` on, whose means are unknown."""
        self._known[b] = min(self._known[b], start)

    def update_all(self) -> None:
        """Computes all means again, after something other than a pass has written KV slots."""
        if self._view is not None:
            self._update([0] * len(self._known), -(-self._most // self._view.config.chunk))
        self._known = [self._most] * len(self._known)

    def catch_up(self) -> None:
        """Computes the means of chunks with tokens that were committed by passes without the retrieval
        level.
        """
        lengths = self._cached.lengths
        pairs = list(zip(self._known, lengths, strict=True))
        if self._view is None or all(known >= length for known, length in pairs):
            return
        chunk = self._view.config.chunk
        first = [min(pair) // chunk for pair in pairs]
        behind = [length // chunk + 1 - known // chunk for known, length in pairs if known < length]
        self._update(first, max(behind))
        self._known = lengths

    def _update(self, first: Sequence[int], count: int) -> None:
        assert self._view is not None
        starts = id_tensor(first, self._device)
        self._view.update_chunk_means(starts, -(-count // _STEP) * _STEP)


class FullCache:
    """Holds keys and values of all committed tokens, followed by scratch slots that each pass overwrites.

    Args:
        target: the model that computes the keys and values.
        config: the retrieval settings, the shapes of the draft's trees, and the chunks of a prefill.
        batch: the number of sequences.
        max_seq_len: the most tokens of a sequence, new ones included.
        levels: 1, 2 or 3; with 3 there is a retrieval view.
        offload, pinned, pool: see ``kv.choose.make_backend``.
        kept: an earlier cache of the same target and bits, and of no larger batch, which must not be used any
            more. Its keys and values on the device are taken over, in place if this cache fits into its
            memory, else as a copy.

    Attributes:
        backend: stores the keys and values.
        cached: which tokens are in the cache.
        marks: where sequences can be continued; None if they can be at every length, because no layer has a
            ring of slots or a recurrent state.
        states: the states of the target's recurrent layers; None if it has none.
        view: makes views for the target's forwards; ``token_view`` for those of one token that is committed.
        retrieval: level 1's view; None with fewer than three levels.

    Raises:
        ValueError: settings that the backend does not serve.
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
        kept: "FullCache | None" = None,
        pool: PoolSize | None = None,
    ) -> None:
        self._target, self._batch, self._max_seq_len = target, batch, max_seq_len
        self._arrangement = target.streamed.arrangement if target.streamed is not None else 0
        spec = CacheSpec(target, config, batch, max_seq_len, levels)
        earlier = kept.backend if kept is not None else None
        self.backend: KVBackend = make_backend(spec, offload, pinned, pool, earlier)
        self.cached, self.retrieval = self.backend.cached, self.backend.retrieval
        self._scratch = spec.scratch
        self._computed_by: object = None
        self._exchange: PrefixExchange | None = None
        # Recurrent states of sequences whose prefill is interrupted by passes of the others.
        self._paused: dict[int, list[Tensor]] = {}
        # Tokens that their prompts share with kept texts.
        self._fork_of: dict[int, int] = {}
        self.means = ChunkMeans(self.retrieval, self.cached, max_seq_len, target.device)
        self.view = self.token_view = cast(FullView, self.backend.view)
        self.states: RecurrentStates | None = None
        if target.states is not None:
            self.states = RecurrentStates(target.states, batch, target.device, target.dtype)
            self.token_view = with_states(self.view, self.states, commits=True)
            self.view = with_states(self.view, self.states, commits=False)
        self.marks: Marks | None = None
        if self.states is not None or any(group.ring for group in self.backend.store.groups):
            self.marks = Marks(StoredSequences(self.backend.store, self.states), batch)
        if kept is not None:
            self.take_over(kept)

    def worth_keeping(
        self, config: HierarchyConfig, prompts: Sequence[Sequence[int]], reuse: Reuse, pool: PoolSize | None
    ) -> bool:
        """Returns whether another cache on the device may reuse what this one holds of these prompts.

        Args:
            config, pool: the settings and the pool of the other cache.
        """
        if distributed.current() is not None:
            return False
        return self.backend.gives(config.kv_bits, prompts, reuse, pool)

    def take_over(self, kept: "FullCache") -> None:
        """Takes over what another cache holds, see :meth:`KVBackend.take_over`."""
        self._computed_by = kept._computed_by
        if not self.backend.take_over(kept.backend):
            for b in range(self._batch):
                self.means.lost(b, 0)
            return
        if self.states is not None and kept.states is not None:
            self.states.take(kept.states)
        self.means.update_all()

    def _reusable(self, b: int, prompt: Sequence[int], reuse: Reuse, features: Features | None) -> int:
        """Returns how many tokens at the start of a prompt need no prefill, in sequence b.

        It is 0 if layers with a window, or recurrent layers, cannot be continued there (``Marks``). If hidden
        states of the newest tokens are missing, these tokens are computed again.
        """
        unit = self.backend.chunk if reuse == "chunks" else 1

        def common(newest: int) -> int:
            length = self.cached.common(b, prompt, reuse, newest)
            return length if self.marks is None else self.marks.start(b, length, unit)

        start = common(0)
        if features is None or features.first_known(b, start) <= max(0, len(prompt) - 1 - features.history):
            return start
        return common(features.history)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
        features: Features | None = None,
    ) -> list[int]:
        """Prefills all but the last token of the prompts of all sequences.

        Args:
            prompts: the prompt of each sequence.
            progress: called with numbers of tokens; those that the cache holds come first.
            reuse: which tokens that the cache holds are kept.
            features: where hidden states are kept for the drafter, if it reads any.

        Returns:
            how many tokens of each prompt the cache already held.
        """
        with self._forgets_on_error():
            computed_by = self._target.function_key()
            if self._current(reuse) == "none":
                self.backend.forget()
            for b in self.backend.place(prompts, None, features):
                self.means.lost(b, 0)
            starts, forks = self._resume(prompts, 0, progress, reuse, features)
            if _complete(prompts, starts):
                return starts
            with self._target.active():
                run = PromptRun(progress, self.states, features)
                begun = self._fork(prompts, starts, forks, run)
                reused = self.backend.prefill(prompts, 0, begun, run)
            self.means.written(starts)
            if reuse == "all" and self.marks is not None:
                for b, prompt in enumerate(prompts):
                    self.marks.add(b, len(prompt) - 1)
            self._computed_by = computed_by
            return reused if begun == starts else starts

    def place(
        self,
        b: int,
        prompt: Sequence[int],
        progress: Progress | None,
        reuse: Reuse,
        features: Features | None,
    ) -> int:
        """Gives KV slots to a prompt that replaces a sequence while the others continue.

        :meth:`prefill_chunk` then computes it.

        Args:
            b: the batch index of the sequence.
            progress, reuse, features: as for :meth:`prefill`.

        Returns:
            how many tokens of the prompt the cache already holds.
        """
        with self._forgets_on_error():
            self.backend.place([prompt], b, features)
            # The means are those of the text before.
            self.means.lost(b, 0)
            [start], [fork] = self._resume([prompt], b, progress, reuse, features)
            if not _complete([prompt], [start]):
                # Until they are prefilled, passes write after the tokens that the sequence has.
                self.cached.keep(b, start)
                self._paused.pop(b, None)
                self._fork_of[b] = fork
            return start

    def prefill_chunk(
        self,
        b: int,
        prompt: Sequence[int],
        start: int,
        reuse: Reuse,
        progress: Progress | None = None,
        features: Features | None = None,
    ) -> tuple[int, int]:
        """Prefills the next chunk of a prompt that :meth:`place` has given KV slots.

        The chunks are those of a prefill without interruption, so that keys and values are equal bit by bit.
        Passes of the other sequences may come between two chunks.

        Args:
            b: the batch index of the prompt.
            start: tokens of the prompt that the cache holds.
            reuse, progress, features: as for :meth:`prefill`.

        Returns:
            how many tokens of the prompt the cache holds now, and how many of the new ones another prompt has
            computed meanwhile.
        """
        with self._forgets_on_error():
            last = len(prompt) - 1
            stop, states = forward_end(start, last, self.backend.chunk), self.states
            fork = self._fork_of.get(b, 0)
            if self.marks is not None and self._exchange is not None and start < fork < stop:
                stop = fork
            if states is not None:
                # Passes of one token have changed the states of every sequence.
                for state, before in zip(states.buffers, self._paused.pop(b, ()), strict=False):
                    state[b] = before
            with self._target.active():
                run = PromptRun(progress, states, features)
                [found] = self.backend.prefill([prompt[: stop + 1]], b, [start], run)
            if states is not None and stop < last:
                self._paused[b] = [state[b].clone() for state in states.buffers]
            if self.marks is not None and (stop == fork if stop < last else reuse == "all"):
                self.marks.add(b, stop)
            self._computed_by = self._target.function_key()
            return stop, found - start

    def _current(self, reuse: Reuse) -> Reuse:
        """Returns ``reuse``, or "none" if weights or rotary frequencies have changed since the prefill."""
        return reuse if self._computed_by == self._target.function_key() else "none"

    @contextmanager
    def _forgets_on_error(self) -> Iterator[None]:
        """Is a context whose errors let no later prompt reuse the sequences."""
        try:
            yield
        except BaseException:
            # Chunks of a pool that were written before stay as they are.
            self._forget_sequences()
            raise

    def _resume(
        self,
        prompts: Sequence[Sequence[int]],
        first: int,
        progress: Progress | None,
        reuse: Reuse,
        features: Features | None,
    ) -> tuple[list[int], list[int]]:
        """Lets sequences continue what the cache, or host memory, holds of the beginnings of their prompts.

        Args:
            first: the batch index of the first prompt; the others follow it.
            progress, reuse, features: as for :meth:`prefill`.

        Returns:
            how many tokens of each prompt the cache holds, and how many the prompt shares with a kept text.
        """
        forks, current = [0] * len(prompts), self._current(reuse)
        if self._exchange is not None and reuse != "none":
            computed_by = self._target.function_key()
            for n, (b, prompt) in enumerate(enumerate(prompts, first)):
                if current == "none":
                    self.cached.keep(b, 0)
                self.means.lost(b, self.cached.common(b, prompt, "all"))
                held = self._reusable(b, prompt, reuse, features)
                forks[n] = self._exchange.bring(b, prompt, held, reuse, computed_by, features)
            current, self._computed_by = reuse, computed_by
        starts = distributed.agreed(
            [self._reusable(b, prompt, current, features) for b, prompt in enumerate(prompts, first)]
        )
        if progress and any(starts):
            progress(sum(starts))
        complete = _complete(prompts, starts)
        for b, start in enumerate(starts, first):
            if self.marks is not None:
                self.marks.restore(b, start)
            if features is not None and complete:
                features.begin(b, start)
        return starts, forks

    def _fork(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int], forks: Sequence[int], run: PromptRun
    ) -> list[int]:
        """Prefills prompts up to where they diverge from kept texts, so that later prompts can begin there.

        Only sequences that cannot be continued everywhere need it. The other arguments are those of
        ``KVBackend.prefill``.

        Args:
            forks: tokens that each prompt shares with a kept text.

        Returns:
            tokens of each prompt that the cache holds now.
        """
        begun = list(starts)
        if self.marks is None or self._exchange is None or not (self.backend.replaces or len(prompts) == 1):
            return begun
        for b, (prompt, fork) in enumerate(zip(prompts, forks, strict=True)):
            if begun[b] + self._exchange.block <= fork < len(prompt) - 1:
                self.backend.prefill([prompt[: fork + 1]], b, [begun[b]], run)
                self.marks.add(b, fork)
                begun[b] = fork
        return begun

    def exchange_with(self, prefixes: KeptPrefixes) -> None:
        """Lets the cache copy texts to host memory, and back, unless several ranks split them."""
        if distributed.current() is None:
            self._exchange = PrefixExchange(prefixes, self.backend, self.marks)

    def ended(self, b: int, tokens: Sequence[int], reuse: Reuse, features: Features | None) -> None:
        """Lets later prompts continue the text of a sequence that has ended.

        A pass may have committed more tokens than the text has. Recurrent states that went too far are then
        computed again from the end of the prompt on. If memory is short, less is kept.

        Args:
            tokens: the text; the keys and values of its last token are not computed.
            reuse: which tokens later prompts keep.
            features: hidden states that are kept for a drafter.
        """
        length, marks = min(len(tokens) - 1, len(self.cached.held[b])), self.marks
        if length < 1 or reuse == "none":
            return
        try:
            if reuse == "all" and marks is not None and not marks.continues(b, length):
                start = marks.start(b, length, 1)
                if not start or not (self.backend.replaces or self._batch == 1):
                    return
                marks.restore(b, start)
                with self._target.active():
                    self.backend.prefill(
                        [tokens[: length + 1]], b, [start], PromptRun(None, self.states, features)
                    )
                self.means.lost(b, start)
            if self._exchange is not None:
                self._exchange.keep(b, length, reuse, self._computed_by, features)
        except torch.OutOfMemoryError:
            self.cached.keep(b, 0)

    def restored(self, tokens: Sequence[int], whole: int) -> None:
        """Records that the keys and values of a sequence were read from a file.

        Args:
            tokens: the tokens of the only sequence; those of all but the last one were read.
            whole: see :class:`CachedTokens`.
        """
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
        """Lets no later prompt reuse what the cache holds."""
        self._forget_sequences()
        self.backend.forget()

    def _forget_sequences(self) -> None:
        self.cached.clear()
        if self.states is not None:
            self.states.invalidate()

    def end(self) -> None:
        """Releases the slots of all sequences at the end of a request."""
        self.backend.release(range(self._batch))

    def holds(self, lengths: Sequence[int]) -> bool:
        """Returns whether the sequences can be continued after their first ``lengths`` tokens.

        They cannot if rings have overwritten what is needed there, or if recurrent states are of later
        positions.
        """
        if self.states is not None and self.states.lengths != list(lengths):
            return False
        return self.backend.store.holds(lengths)

    def begin(self, prompts: Sequence[Sequence[int]], index: int | None = None) -> None:
        """Continues from the ends of prompts whose keys and values the cache holds.

        Args:
            index: the batch index of the only prompt, if the other sequences continue; None for all.
        """
        for b, prompt in enumerate(prompts, index or 0):
            self.cached.begin(b, prompt)
            if self.marks is not None:
                self.marks.prune(b, len(prompt) - 1)
        if index is not None:
            return
        self.means.begin()
        self.backend.begin(self.cached.lengths)

    def committed(self, tokens: Sequence[Sequence[int]], with_means: bool = False) -> None:
        """Records the tokens that the last pass of the target added to each sequence.

        Args:
            with_means: whether the pass has updated the chunk means, which were up to date before.
        """
        counts = [len(new) for new in tokens]
        self.cached.grown(tokens)
        if with_means:
            self.means.updated(counts)
        if self.states is not None:
            self.states.grown(counts)
        self.backend.committed(counts)

    @contextmanager
    def trial(self, length: int) -> Iterator[None]:
        """Is a context in which passes may write after made-up sequences of ``length`` tokens.

        What they write is undone. Afterwards the sequences must be prefilled again, or :meth:`begin` called.
        """
        states = self.states.saved() if self.states is not None else nullcontext()
        with self.backend.trial(length, self._scratch + 1), states:
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
        streamed = self._target.streamed
        return self.backend.closed or (streamed is not None and streamed.arrangement != self._arrangement)


def _complete(prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> bool:
    """Returns whether the cache holds all tokens of each prompt but the last, and at least one."""
    return all(0 < start == len(prompt) - 1 for start, prompt in zip(starts, prompts, strict=True))
