"""One generation: its sequences in a decoding loop, their streamers, scores and outputs."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.planning.batch_size import fitting_batch
from triforce_tree.requests.batch_pool import BatchPool
from triforce_tree.requests.joining import Joining
from triforce_tree.requests.output import GenerateOutput, output_of
from triforce_tree.requests.request import Job
from triforce_tree.requests.scores import EmittedScores
from triforce_tree.requests.streamers import Streamers
from triforce_tree.runtime.stats import Progress
from triforce_tree.verify.draws import sequence_seed


@dataclass(frozen=True)
class RunOptions:
    """The arguments of :meth:`Engine.generate` that are not transformers' options; they are described
    there.
    """

    streamers: Streamers = field(default_factory=Streamers)
    progress: Progress | None = None
    seed: int | None = None
    seeds: list[int | None] | None = None
    pinned: Callable[[int], None] | None = None
    logprobs: bool = False
    max_batch: int | None = None
    joining: Joining | None = None

    def alone(self, number: int) -> "RunOptions":
        """Returns the options for decoding one of the sequences alone. Its seed is such that its draws stay
        the same.
        """
        seed = self.seed if self.seed is None else sequence_seed(self.seed, number)
        own = self.streamers.part(slice(number, number + 1))
        seeds = self.seeds and self.seeds[number : number + 1]
        return replace(self, streamers=own, seed=seed, seeds=seeds, joining=None)

    def ended(self, number: int, output: GenerateOutput | None) -> GenerateOutput:
        """Passes the output of a sequence that was decoded ``alone`` to ``joining``, and returns the
        output.
        """
        assert output is not None, "a single sequence is decoded"
        if self.joining is not None:
            self.joining.ended(number, output)
        return output

    def pool(
        self, hierarchy: Hierarchy, prompts: Sequences[Sequences[int]], new_tokens: int, reuse: Reuse
    ) -> BatchPool:
        """Returns the pool of KV slots for a batch of the prompts, and of prompts that join it.

        A session has its own slots, so its batch has no pool.
        """
        tokens = self.joining.tokens if self.joining is not None else None
        return BatchPool(
            hierarchy, prompts, new_tokens, self.max_batch or len(prompts), self.joining is not None, tokens,
            shares=reuse == "chunks" and self.max_batch != 1,
        )  # fmt: skip

    def rows(self, hierarchy: Hierarchy, most: int, prompt: int, new_tokens: int, pool: BatchPool) -> int:
        """Returns how many sequences to decode together: up to ``most``, or more if further prompts may join.

        Args:
            prompt, new_tokens: tokens of the longest sequence.
            pool: the pool that they share. It is made smaller if more sequences fit then.
        """
        if hierarchy.memory is not None or hierarchy.config.text_ranks > 1:
            # Planned for as many.
            return most
        if self.joining is not None and self.max_batch and hierarchy.target.device.type == "cuda":
            # A row without a sequence costs little there, and cannot be added later.
            most = self.max_batch
        freed, last = hierarchy.level_one.nbytes, hierarchy.last_program
        if last is not None:
            if last.batch == most and last.cache.fits(prompt + new_tokens, pool()):
                return most
            freed += last.cache.backend.bytes

        def fitting(slots: int, wanted: int) -> int:
            models, own = (hierarchy.target, hierarchy.draft), hierarchy.own_drafter
            return fitting_batch(*models, hierarchy.config, wanted, prompt, new_tokens, freed, slots, own)

        return pool.fitting(fitting, most)


class Batch:
    """Decodes the sequences of a job, and the sequences that join them, in one decoding loop.

    Args:
        job: the prompts and options.
        how: streamers, progress, and the source of joining prompts.
        loop: the decoding loop.
        scores: collects the requested logits, scores and log-probabilities; None if none are requested.
        tokenizer: decodes the texts of the output.
        hierarchy: the levels that decode.
        waiting: sequences of the job that are not in the loop yet, in the order in which they begin.
        pool: the pool of KV slots that the sequences share.
    """

    def __init__(
        self,
        job: Job,
        how: RunOptions,
        loop: DecodingLoop,
        scores: EmittedScores | None,
        tokenizer: PreTrainedTokenizerBase | None,
        hierarchy: Hierarchy,
        waiting: Sequences[Sequence],
        pool: BatchPool,
    ) -> None:
        self._job, self._how, self._loop, self._pool = job, how, loop, pool
        self._scores, self._tokenizer, self._hierarchy = scores, tokenizer, hierarchy
        self._waiting, self._count = deque(waiting), len(job.sequences)

    def decode(self) -> GenerateOutput:
        """Decode all sequences. Returns the output of the job's own sequences."""
        streamers, loop, scores = self._how.streamers, self._loop, self._scores
        observe = None if scores is None else scores.add
        streamers.begin(self._job.input_ids, self._job.sequences)
        try:
            while loop.running:
                fresh = loop.step(observe)
                for sequence, tokens in fresh:
                    if streamers.put(sequence.number, tokens, scores):
                        loop.end(sequence)
                if self._how.joining is not None:
                    self._grow(self._how.joining)
                for sequence, _ in fresh:
                    if sequence.finish_reason is not None:
                        self._ended(sequence)
                while loop.free and (following := self._next()) is not None:
                    loop.add(following)
        finally:
            loop.close()
        handed_over = self._how.joining is not None
        out = self._output(self._job.input_ids, self._job.sequences, handed_over)
        out.levels, out.prefill_seconds, out.decode_seconds = (
            loop.levels, loop.prefill_seconds, loop.decode_seconds
        )  # fmt: skip
        return out

    def _grow(self, joining: Joining) -> None:
        """Enlarge the batch to the wanted number of sequences, if it can grow and the memory suffices."""
        program = self._loop.program
        # First, as the question is asked for every prompt that waits, in each pass.
        if (
            program.device.type != "cpu"
            or not program.cache.backend.replaces
            or not self._job.to_probs.context_free
        ):
            return
        now = len(self._loop.sequences)
        if (wanted := joining.wanted(self._fits)) <= now:
            return
        rows = self._how.rows(self._hierarchy, wanted, program.max_seq_len, 0, self._pool)
        if rows > now:
            self._loop.grow(rows)

    def _next(self) -> Sequence | None:
        """Returns the next sequence that fits, first from the job and then from the joining prompts."""
        if self._waiting:
            return self._waiting.popleft() if self._has_slots(self._waiting[0]) else None
        joining = self._how.joining
        joined = joining.next(self._fits) if joining is not None else None
        if joined is None:
            return None
        sequence = self._job.joining(list(joined.prompt), joined.new_tokens, self._count, joined.seed)
        self._count += 1
        self._how.streamers.join(joined.streamer, sequence)
        if self._scores is not None:
            self._scores.begin(sequence.prompt)
        return sequence

    def _fits(self, prompt: list[int], new_tokens: int) -> bool:
        """Returns whether the buffers and levels of the batch can serve another prompt."""
        program, job = self._loop.program, self._job
        return (
            len(prompt) + new_tokens <= program.max_seq_len
            and self._hierarchy.levels(len(prompt), program.max_seq_len) <= program.levels
            and self._hierarchy.together(job.to_probs, [job.sequences[0].prompt, prompt])
            and self._has_slots(job.joining(prompt, new_tokens, 0, None))
            # A prompt that comes after a change of the models belongs to the next batch.
            and not self._hierarchy.changed
        )

    def _has_slots(self, coming: Sequence) -> bool:
        """Returns whether enough KV slots are free for a new sequence beside the running ones."""
        joining, begun = self._how.joining, self._loop.joining
        running = {each.index: each.prompt for each in self._loop.running if each not in begun}
        wanted = [(each.prompt, each.ending.max_new_tokens) for each in (coming, *begun)]
        tokens = joining.tokens if joining is not None else None
        backend = self._loop.program.cache.backend
        return backend.has_slots(running, wanted, self._how.max_batch or 0, tokens)

    def _ended(self, sequence: Sequence) -> None:
        self._how.streamers.end(sequence.number)
        if self._how.joining is not None:
            ids = self._job.input_ids.new_tensor([sequence.prompt])
            self._how.joining.ended(sequence.number, self._output(ids, [sequence]))

    def _output(
        self, input_ids: Tensor, sequences: Sequences[Sequence], handed_over: bool = False
    ) -> GenerateOutput:
        """Returns the output of some sequences, with prompts ``input_ids`` ``[B, W]``.

        Args:
            handed_over: whether the scores of each sequence have already been returned in a separate output.
        """
        scores: dict[str, Any] = {}
        if self._scores is not None and not handed_over:
            scores = self._scores.results([sequence.number for sequence in sequences])
        seconds = self._loop.program.capture_seconds
        return output_of(input_ids, sequences, self._job.pad_token, self._tokenizer, seconds, scores)
