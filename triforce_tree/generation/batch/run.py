"""One generation: its sequences in a running batch, their streamers, scores and outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.decoding.oom_retry import OomRetryDecoder
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.generation.batch.joining import Joining
from triforce_tree.generation.batch.prefixes import BatchPrefixes, Prefixes
from triforce_tree.generation.batch.room import JoiningPrefixes
from triforce_tree.generation.batch.running_batch import BatchSequence, RunningBatch
from triforce_tree.generation.batch.scores import EmittedScores
from triforce_tree.generation.batch.streamers import Streamers
from triforce_tree.generation.output import GenerateOutput, output_of
from triforce_tree.generation.request import Job
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.shared.tree import PrefixSize
from triforce_tree.planning.batch_size import fitting_batch
from triforce_tree.runtime.stats import Progress
from triforce_tree.verify.draws import sequence_seed


@dataclass(frozen=True)
class RunOptions:
    """What :meth:`Engine.generate` takes beside transformers' own options; see there."""

    streamers: Streamers = field(default_factory=Streamers)
    progress: Progress | None = None
    seed: int | None = None
    seeds: list[int | None] | None = None
    pinned: Callable[[int], None] | None = None
    logprobs: bool = False
    max_batch: int | None = None
    joining: Joining | None = None

    def alone(self, number: int) -> "RunOptions":
        """Those of one of the sequences, which draws as it does in the batch, or would alone."""
        seed = self.seed if self.seed is None else sequence_seed(self.seed, number)
        own = self.streamers.part(slice(number, number + 1))
        seeds = self.seeds and self.seeds[number : number + 1]
        return replace(self, streamers=own, seed=seed, seeds=seeds, joining=None)

    def ended(self, number: int, output: GenerateOutput) -> GenerateOutput:
        """The output of a sequence that was decoded ``alone``, after ``joining`` has been told of it."""
        if self.joining is not None:
            self.joining.ended(number, output)
        return output

    def prefixes(
        self, hierarchy: Hierarchy, prompts: Sequence[Sequence[int]], new_tokens: int, reuse: Reuse
    ) -> Prefixes:
        """The common prefixes that a batch of the prompts stores once, and those that join it.

        A session goes on in slots of its own: there are none then.
        """
        rows = self.max_batch or len(prompts)
        if reuse == "chunks" and self.joining is not None and self.max_batch != 1:
            return JoiningPrefixes(hierarchy, prompts, new_tokens, rows, self.joining.tokens)
        copied = reuse != "chunks" or self.joining is not None or rows == 1
        return BatchPrefixes(hierarchy, [] if copied else prompts, rows)

    def rows(self, hierarchy: Hierarchy, most: int, prompt: int, new_tokens: int, prefixes: Prefixes) -> int:
        """How many sequences to decode together, up to ``most``, or more where further prompts may join.

        Args:
            prompt, new_tokens: of the longest sequence.
            prefixes: what is stored once; less of it where more sequences fit then.
        """
        if hierarchy.memory is not None or hierarchy.config.text_ranks > 1:
            # Planned for as many.
            return most
        if self.joining is not None and self.max_batch and hierarchy.target.device.type == "cuda":
            # A row without a sequence costs little there, and cannot be added later.
            most = self.max_batch
        freed, last = hierarchy.level_one.nbytes, hierarchy.last_program
        if last is not None:
            if last.batch == most and last.cache.fits(prompt + new_tokens, prefixes()):
                return most
            freed += last.store.memory.nbytes if last.offloaded is None else 0

        def fitting(size: PrefixSize, wanted: int) -> int:
            models, own = (hierarchy.target, hierarchy.draft), hierarchy.own_drafter
            return fitting_batch(*models, hierarchy.config, wanted, prompt, new_tokens, freed, size, own)

        return prefixes.fitting(fitting, most)


class BatchRun:
    """Decodes the sequences of a job, and those that join them.

    Args:
        job: the prompts and options.
        how: streamers and progress, and where further prompts come from.
        decoder: of ``rows`` sequences.
        scores: what is wanted of the target's logits; None for nothing.
        tokenizer: for the texts of the output.
        hierarchy: whose levels these are.
        order: numbers of the job's prompts in the order in which they begin.
        prefixes: what is stored once.
    """

    def __init__(
        self,
        job: Job,
        how: RunOptions,
        decoder: OomRetryDecoder,
        rows: int,
        scores: EmittedScores | None,
        tokenizer: PreTrainedTokenizerBase | None,
        hierarchy: Hierarchy,
        order: Sequence[int],
        prefixes: Prefixes,
    ) -> None:
        self._job, self._how, self._decoder, self._prefixes = job, how, decoder, prefixes
        self._scores, self._tokenizer, self._hierarchy = scores, tokenizer, hierarchy
        self._given = [
            BatchSequence(number, prompt, ending)
            for number, (prompt, ending) in enumerate(zip(job.prompts, job.endings, strict=True))
        ]
        self._order, self._begun = order, 0
        self._count = len(self._given)
        self._batch = RunningBatch(decoder, rows, self._next, self._ended)

    def decode(self, reuse: Reuse) -> GenerateOutput:
        """Decode all of them; returns the output of the job's own sequences."""
        streamers, batch, observe = self._how.streamers, self._batch, self._observe
        streamers.begin(self._job.input_ids, self._job.prompts, self._job.endings)
        batch.prefill(self._how.progress, reuse)
        for fresh in batch.decode(observe if self._scores is not None else None):
            for sequence, tokens in fresh:
                if streamers.put(sequence.number, tokens, self._scores):
                    batch.end(sequence)
            if self._how.joining is not None:
                self._grow(self._how.joining)
        out = self._output(self._job.input_ids, self._given, handed_over=self._how.joining is not None)
        out.levels, decoder = self._decoder.levels, self._decoder
        out.prefill_seconds, out.decode_seconds = decoder.prefill_seconds, decoder.decode_seconds
        return out

    def _grow(self, joining: Joining) -> None:
        """Have as many rows as are wanted, where rows can be added and memory holds them."""
        program = self._decoder.program
        # First, as the question is asked for every prompt that waits, in each pass.
        if program.device.type != "cpu" or not program.replaces or not self._job.to_probs.context_free:
            return
        if (wanted := joining.wanted(self._fits)) <= self._batch.rows:
            return
        rows = self._how.rows(self._hierarchy, wanted, program.max_seq_len, 0, self._prefixes)
        if rows > self._batch.rows:
            self._batch.grow(rows)

    def _observe(
        self,
        rows: Sequence[BatchSequence | None],
        new: list[list[int]],
        logits_of: Callable[[int], Tensor],
    ) -> None:
        assert self._scores is not None
        self._scores.add([row.number if row is not None else None for row in rows], new, logits_of)

    def _next(self) -> BatchSequence | None:
        """The next sequence: of the job, then of those that join."""
        if self._begun < len(self._given):
            following = self._given[self._order[self._begun]]
            if self._decoder.report and not self._has_room([(following.prompt, following.ending)]):
                return None
            self._begun += 1
            return following
        joining = self._how.joining
        # Between passes alone, when the decoder is running.
        joined = joining.next(self._fits) if joining is not None and self._decoder.report else None
        if joined is None:
            return None
        sequence = BatchSequence(
            self._count, list(joined.prompt), self._job.ending(joined.prompt, joined.new_tokens)
        )
        self._count += 1
        if self._how.seeds is not None:
            self._how.seeds.append(joined.seed)
        self._how.streamers.join(joined.streamer, sequence.number, sequence.prompt, sequence.ending)
        if self._scores is not None:
            self._scores.begin(sequence.prompt)
        return sequence

    def _fits(self, prompt: list[int], new_tokens: int) -> bool:
        """Whether the buffers and levels of the batch serve another prompt."""
        program, job = self._decoder.program, self._job
        return (
            len(prompt) + new_tokens <= program.max_seq_len
            and self._hierarchy.levels(len(prompt), program.max_seq_len) <= program.levels
            and self._hierarchy.together(job.to_probs, [job.prompts[0], prompt])
            and self._has_room([(prompt, self._job.ending(prompt, new_tokens))])
            # A prompt that comes after a change of the models belongs to the next batch.
            and not self._hierarchy.changed
        )

    def _has_room(self, coming: list[tuple[list[int], Ending]]) -> bool:
        """Whether there are KV slots for prompts to come, beside those that are decoded."""
        joining, pooled = self._how.joining, self._decoder.program.cache.pooled
        running, begun = self._batch.running, self._batch.begun
        if pooled is not None:
            coming = coming + [(each.prompt, each.ending) for each in begun]
            wanted = [(prompt, ending.max_new_tokens) for prompt, ending in coming]
            return pooled.room(list(running), wanted, self._how.max_batch or 0)
        beside = [each.prompt for each in (*running.values(), *begun)]
        if joining is None or joining.tokens is None or not beside:
            return True
        return sum(map(len, [*beside, *(prompt for prompt, _ in coming)])) <= joining.tokens

    def _ended(self, sequence: BatchSequence) -> None:
        self._how.streamers.end(sequence.number)
        if self._how.joining is not None:
            ids = self._job.input_ids.new_tensor([sequence.prompt])
            self._how.joining.ended(sequence.number, self._output(ids, [sequence]))

    def _output(
        self, input_ids: Tensor, sequences: Sequence[BatchSequence], handed_over: bool = False
    ) -> GenerateOutput:
        """The output of some sequences, ``input_ids`` ``[B, W]``.

        Args:
            handed_over: each of them has had its scores in an output of its own.
        """
        scores: dict[str, Any] = {}
        if self._scores is not None and not handed_over:
            scores = self._scores.results([sequence.number for sequence in sequences])
        return output_of(
            input_ids, sequences, self._job.pad_token, self._tokenizer, self._decoder.capture_seconds, scores
        )
