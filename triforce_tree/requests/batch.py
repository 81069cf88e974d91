"""The sequences of a request in a decoding loop, with their streamers, scores and outputs."""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from triforce_tree.decoding.hierarchy import Hierarchy
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.origins import Origins
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.requests.batch_pool import BatchPool, sizes_of
from triforce_tree.requests.joining import Joining
from triforce_tree.requests.output import GenerateOutput, output_of
from triforce_tree.requests.request import Request
from triforce_tree.requests.scores import EmittedScores
from triforce_tree.runtime.devices import before_queued_work
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.text.vocabulary import Vocabulary

# A batch is made smaller after this number of passes in a row for which fewer places would do.
_PATIENCE = 32


class _Asked(NamedTuple):
    """A prompt that may join, with its options.

    Attributes:
        sequence: its sequence, without number, seed and grammar; None if the options are wrong.
    """

    prompt: list[int]
    new_tokens: int
    options: Mapping[str, Any] | None
    sequence: Sequence | None


class Batch:
    """Decodes the sequences of a request, and the sequences that join them, in one decoding loop.

    Args:
        request: the prompts and options.
        loop: the decoding loop.
        tokenizer: decodes the texts of the output.
        hierarchy: the levels that decode.
        waiting: sequences of the request that are not in the loop yet, in the order in which they begin.
        pool: chooses the number of sequences if others may join; None for a single sequence.
    """

    def __init__(
        self,
        request: Request,
        loop: DecodingLoop,
        tokenizer: PreTrainedTokenizerBase | None,
        hierarchy: Hierarchy,
        waiting: Sequences[Sequence],
        pool: BatchPool | None,
    ) -> None:
        self._request, self._how, self._loop, self._pool = request, request.how, loop, pool
        self._vocabulary = None if tokenizer is None else Vocabulary(tokenizer)
        self._hierarchy = hierarchy
        self._waiting, self._count = deque(waiting), len(request.sequences)
        wanted = request.outputs or self._how.joining is not None
        self._scores = EmittedScores(request, hierarchy.offloads) if wanted else None
        # The sequences that have begun and whose outputs are not made yet.
        self._begun = [each for each in request.sequences if each not in self._waiting]
        # New tokens that their streamers have not received yet, and what proposed them.
        self._unsent: list[tuple[Sequence, list[int], list[str]]] = []
        # Prompts that were asked for since the last pass, and between the two passes before, by the ids of
        # prompt and options.
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._asked_before: dict[tuple[int, int], _Asked] = {}
        # Whether the models have changed; None if this was not asked since the last pass. And a function that
        # returns whether the weights are the same once the device has done what it was given before.
        self._changed: bool | None = None
        self._still_same: Callable[[], bool] | None = None
        # The number of passes in a row for which fewer places would do, and the last number of places that
        # could not grow because memory was short.
        self._passes_with_fewer, self._full = 0, 0

    def decode(self) -> GenerateOutput:
        """Decodes all sequences. Returns the output of the request's own sequences."""
        streamers, loop, scores = self._how.streamers, self._loop, self._scores
        observe = None if scores is None else scores.add
        origins = Origins(loop)
        streamers.begin(self._request.input_ids, self._request.sequences)
        try:
            while loop.running:
                loop.after_stage = origins if streamers.want_origins else None
                fresh = loop.step(observe, self._send)
                self._asked_before, self._asked = self._asked, {}
                self._check_models()
                names = origins.take()
                self._unsent = [
                    (each, new, names[each.index][: len(new)] if names and each.index is not None else [])
                    for each, new in fresh
                ]
                if loop.prefills or not self._may_send_later():
                    self._send()
                loop.wait_for_chunks()
                for sequence in loop.unread:
                    if streamers.wants_end(sequence.number):
                        loop.end(sequence)
                if self._how.joining is not None:
                    self._resize(self._how.joining)
                if loop.prefills:
                    self._send()
                for sequence in [each for each in self._begun if each.finish_reason is not None]:
                    self._begun.remove(sequence)
                    self._ended(sequence)
                while loop.free and (following := self._next()) is not None:
                    self._begun.append(following)
                    loop.add(following)
                if loop.prefills:
                    self._send()
        finally:
            loop.close()
        # The scores of each sequence were passed to ``joining``.
        scores = scores if self._how.joining is None else None
        out = self._output(self._request.given_ids, self._request.sequences, scores, self._vocabulary)
        out.levels, out.prefill_seconds, out.decode_seconds = (
            loop.levels, loop.prefill_seconds, loop.decode_seconds
        )  # fmt: skip
        return out

    def _may_send_later(self) -> bool:
        """Returns whether streamers may receive the new tokens while a GPU computes the next pass, which then
        begins earlier. A sequence that its streamer ends makes one pass more, so a single one does not wait.
        """
        go_on = all(sequence.finish_reason is None for sequence, _, _ in self._unsent)
        return go_on and len(self._loop.running) > 1 and self._loop.program.device.type == "cuda"

    def _send(self) -> None:
        """Sends new tokens to the streamers, and ends the sequences whose streamers demand it."""
        streamers, newest = self._how.streamers, None if self._scores is None else self._scores.newest
        unsent, self._unsent = self._unsent, []
        for sequence, tokens, names in unsent:
            if names:
                streamers.put_origins(sequence.number, names)
            if streamers.put(sequence.number, tokens, newest):
                self._loop.end(sequence)

    def _resize(self, joining: Joining) -> None:
        """Gives the batch as many places as are wanted, if memory suffices; fewer ones only after a while."""
        program, now, most = self._loop.program, len(self._loop.sequences), self._how.max_batch
        backend, on_cpu = program.cache.backend, program.device.type == "cpu"
        # Programs are kept that have the same pages. On a GPU others would have to capture their stages now.
        kept = most is not None and backend.resizes and self._hierarchy.own_drafter is None
        if not backend.replaces or not self._request.to_probs.in_stages or not (kept or on_cpu):
            return
        wanted = max(joining.wanted(self._has_room), len(self._loop.running) + len(self._waiting))
        size = wanted = min(wanted, most or wanted)
        if most is not None and kept:
            size = next(each for each in sizes_of(most) if each >= wanted)
        self._passes_with_fewer = self._passes_with_fewer + 1 if size < now else 0
        if size > now and self._full != now:
            assert self._pool is not None, "prompts that join have a pool"
            size = self._pool.batch_size(wanted, program.max_seq_len, 0)
            if size > now:
                self._loop.resize(size)
            else:
                self._full = now
        elif kept and self._passes_with_fewer >= _PATIENCE:
            self._loop.resize(size)

    def _next(self) -> Sequence | None:
        """Returns the next sequence that fits, first from the request and then from the joining prompts."""
        if self._waiting:
            first = self._waiting[0]
            fits = self._has_slots(first.prompt, first.ending.max_new_tokens)
            return self._waiting.popleft() if fits else None
        joining = self._how.joining
        joined = joining.next(self._fits) if joining is not None else None
        if joined is None:
            return None
        sequence = self._prepared(joined.prompt, joined.new_tokens, joined.options).sequence
        assert sequence is not None, "the prompt fits"
        seed = None if (sequence.to_probs or self._request.to_probs).greedy else joined.seed
        matcher = self._how.matcher(joined.grammar, sequence.ending.stop_tokens)
        sequence = replace(sequence, number=self._count, seed=seed, matcher=matcher)
        self._count += 1
        self._how.streamers.join(joined.streamer, sequence)
        if self._scores is not None:
            self._scores.begin(sequence)
        return sequence

    def _fits(self, prompt: list[int], new_tokens: int, options: Mapping[str, Any] | None = None, /) -> bool:
        """Returns whether another prompt can join the batch. See ``Joined``."""
        # A prompt that comes after a change of the models belongs to the next batch.
        return self._has_room(prompt, new_tokens, options) and not self._models_changed()

    def _models_changed(self) -> bool:
        """Returns whether the models have changed since the beginning of the batch.

        The device may still have to compute chunks of other prompts. Nothing waits for these: weights are
        read before them, and once more behind them for :meth:`_check_models`.
        """
        if self._changed is None:
            self._changed = self._hierarchy.changed
            if not self._changed and self._loop.program.device.type == "cuda":
                self._still_same = self._hierarchy.begin_reading()
        return self._changed

    def _check_models(self) -> None:
        """Raises RuntimeError if prompts have joined although a change of weights was queued on the device,
        behind chunks of other prompts.
        """
        still_same, self._changed, self._still_same = self._still_same, None, None
        if still_same is not None and not still_same():
            raise RuntimeError(
                "the weights of a model were changed while texts were generated with it; generate them again"
            )

    def _has_room(
        self, prompt: list[int], new_tokens: int, options: Mapping[str, Any] | None = None, /
    ) -> bool:
        """Returns whether the buffers and levels of the batch can serve another prompt. See ``Joined``."""
        program, request = self._loop.program, self._request
        return (
            len(prompt) + new_tokens <= program.max_seq_len
            and self._hierarchy.levels(len(prompt), program.max_seq_len) <= program.levels
            and self._hierarchy.together([request.to_probs], [request.sequences[0].prompt, prompt])
            and self._has_slots(prompt, new_tokens)
            and self._alike(prompt, new_tokens, options)
        )

    def _alike(self, prompt: list[int], new_tokens: int, options: Mapping[str, Any] | None) -> bool:
        """Returns whether a sequence with other options of ``PER_PROMPT`` can be decoded with the others."""
        asked = self._prepared(prompt, new_tokens, options)
        self._asked[id(prompt), id(options)] = asked
        probs = None if asked.sequence is None else asked.sequence.to_probs
        return probs is not None and probs.others_key == self._request.to_probs.others_key

    def _prepared(self, prompt: list[int], new_tokens: int, options: Mapping[str, Any] | None) -> _Asked:
        """Returns another prompt as a sequence. Preparing it takes milliseconds, so what was prepared when
        somebody asked for it is kept until a pass after which nobody asks again.
        """
        key = id(prompt), id(options)
        for asked in (self._asked.pop(key, None), self._asked_before.pop(key, None)):
            if asked is not None and (asked.prompt, asked.new_tokens) == (prompt, new_tokens):
                return asked
        sequence = None
        # transformers waits for the device. A ValueError is that of this prompt alone, in a batch of its own.
        with suppress(ValueError), before_queued_work(self._loop.program.device):
            sequence = self._request.sequence(list(prompt), new_tokens, options=options)
        return _Asked(list(prompt), new_tokens, options, sequence)

    def _has_slots(self, prompt: list[int], new_tokens: int) -> bool:
        """Returns whether enough KV slots are free for a new sequence beside the running ones."""
        joining, placed_later = self._how.joining, self._loop.joining
        running = {each.index: each.prompt for each in self._loop.running if each not in placed_later}
        later = [(each.prompt, each.ending.max_new_tokens) for each in placed_later]
        tokens = joining.tokens if joining is not None else None
        backend = self._loop.program.cache.backend
        return backend.has_slots(running, [(prompt, new_tokens), *later], self._how.max_batch or 0, tokens)

    def _ended(self, sequence: Sequence) -> None:
        self._how.streamers.end(sequence.number)
        if self._how.joining is not None:
            ids = id_tensor(sequence.prompt)[None]
            self._how.joining.ended(sequence.number, self._output(ids, [sequence], self._scores))

    def _output(
        self,
        input_ids: Tensor,
        sequences: Sequences[Sequence],
        scores: EmittedScores | None,
        vocabulary: Vocabulary | None = None,
    ) -> GenerateOutput:
        """Returns the output of some sequences, which begins with their prompts ``input_ids`` ``[B, W]``."""
        found = scores.results([sequence.number for sequence in sequences]) if scores is not None else {}
        seconds = self._loop.program.capture_seconds
        return output_of(input_ids, sequences, self._request.pad_token, vocabulary, seconds, found)
