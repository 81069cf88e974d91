"""The decoding loop: sequences join a batch, are prefilled, decoded in passes, and leave it."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequences
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.decoding.choice.chooser import PassChooser
from triforce_tree.decoding.choice.stage_costs import known_costs
from triforce_tree.decoding.chunked_prefill import ChunkedPrefill
from triforce_tree.decoding.out_of_memory import give_way
from triforce_tree.decoding.program import DecodingProgram, exhaust
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.kv.cached_tokens import Reuse, common_prefix
from triforce_tree.policy.costs import KnownCosts
from triforce_tree.policy.matched_tokens import LONGEST
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind, SpeculationLimit
from triforce_tree.runtime import distributed
from triforce_tree.runtime.devices import overwrite
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stage_clock import Mark, StageClock
from triforce_tree.runtime.stats import LevelStats, Progress, added
from triforce_tree.verify.draws import Draws
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits

_LOG = logging.getLogger(__name__)

Texts = Sequences[list[int]]
ByIndex = Sequences[Sequence | None]
"""The sequence at each batch index; None where there is none."""
Fresh = list[tuple[Sequence, list[int]]]
"""Sequences, and the new tokens of each."""
Observer = Callable[[Fresh, Callable[[int], Tensor]], None]
"""Receives the new tokens of a pass, and the function :meth:`DecodingLoop.emitted_logits`."""


class Programs(Protocol):
    """Makes the programs of a loop within the memory plan."""

    def make(self, texts: Texts) -> DecodingProgram:
        """Returns a program for a batch of these texts."""

    def shrink(self) -> bool:
        """Reduces the memory plan; returns False if it cannot be reduced further."""


class OneProgram:
    """Provides a single program, for loops that neither grow nor reduce their memory."""

    def __init__(self, program: DecodingProgram) -> None:
        self._program = program

    def make(self, texts: Texts) -> DecodingProgram:
        return self._program

    def shrink(self) -> bool:
        return False


def best_index(running: ByIndex, free: Sequences[int], prompt: Sequences[int]) -> int:
    """Returns the free batch index whose neighbours share the longest prefix with a prompt.

    A prefix that neighbouring sequences share is read once. If no neighbour shares a prefix, the index is one
    with few neighbours that have little in common, because a later prompt may share a prefix with them.

    Args:
        running: the running sequence at each batch index; None where there is none.
        free: the batch indices without a running sequence.
    """
    if len(free) == 1:
        return free[0]
    prompts = [[], *(sequence.prompt if sequence is not None else [] for sequence in running), []]

    def gain(b: int) -> tuple[int, int, int]:
        before, after = prompts[b], prompts[b + 2]
        alike = common_prefix(before, prompt) + common_prefix(prompt, after)
        return alike, -common_prefix(before, after), -bool(before) - bool(after)

    return max(free, key=gain)


class DecodingLoop:
    """Decodes a batch of sequences; each :meth:`step` makes one pass of the target.

    Prompts may differ in length. A sequence that has ended keeps its batch index until another sequence is
    prefilled there, in chunks between passes of the others (:class:`ChunkedPrefill`). The others keep their
    state, and all buffers and CUDA graphs stay as they are. If device memory runs out, the memory plan is
    reduced, a smaller program prefills all tokens so far, and the step is repeated with new random numbers.

    Args:
        programs: makes the program, and another one if memory runs out or the batch grows.
        sequences: the first sequences, by batch index; None for an index without a sequence.
        to_probs: maps logits to probabilities, for sequences without sampling options of their own.
        seed: the seed of all draws, 0 to 2**63 - 1.
        repeatable: whether the same seed gives the same tokens, see :class:`PassChooser`. Each sequence then
            has the draws that it has alone with the seed ``draws.sequence_seed``.
        by_position: whether sequences may have seeds of their own.
        masked: whether sequences may have grammars.
        limit: what passes may draft at most; None for no limit.
        progress: called with numbers of prompt tokens as they are prefilled.
        reuse: which tokens that the cache holds from earlier generations are kept.
        in_chunks: whether the first prompts are prefilled in chunks as well, if the backend ``replaces``.

    Attributes:
        sequences: the sequence at each batch index; None where there is none.
        joining: sequences without KV slots, in the order in which they joined.
        program: the program that decodes the sequences.
        passes: the number of passes of each kind.
        prefill_seconds, decode_seconds: the host's time for prompts and for passes.
        after_stage: called with the name of each stage after it was started, for measurements.
    """

    program: DecodingProgram
    draws: Draws
    _clock: StageClock
    _costs: KnownCosts | None
    _last_stage: str

    def __init__(
        self,
        programs: Programs,
        sequences: ByIndex,
        to_probs: ProbsFromLogits,
        seed: int,
        repeatable: bool = False,
        by_position: bool = False,
        progress: Progress | None = None,
        reuse: Reuse = "none",
        masked: bool = False,
        limit: SpeculationLimit | None = None,
        in_chunks: bool = False,
    ) -> None:
        self._programs, self._to_probs, self._seed, self._repeatable = programs, to_probs, seed, repeatable
        self._by_position, self._progress, self._reuse = by_position, progress, reuse
        self._masked, self._limit = masked, limit
        self.sequences: list[Sequence | None] = []
        self.joining: list[Sequence] = []
        self._chunked = ChunkedPrefill(reuse, progress)
        # Sequences that are prefilled after the present prefill of a larger batch.
        self._later: list[Sequence] = []
        # Sequences whose prefill the device may not have completed.
        self._launched: list[Sequence] = []
        self.passes: Counter[PassKind] = Counter()
        self.prefill_seconds = self.decode_seconds = 0.0
        self.after_stage: Callable[[str], None] | None = None
        self._attempts, self._after_plain = 0, False
        self._chooser: PassChooser | None = None
        # The last sequence at each batch index whose text was kept when it ended.
        self._kept: dict[int, Sequence] = {}
        # Whether there is a program, and whether its cache holds the sequences.
        self._made = self._prefilled = False
        # The number of places of the batch from the next pass on; None if it does not change.
        self._places: int | None = len(sequences) if in_chunks else None
        # Statistics of earlier programs, and of the present one.
        self._before: list[LevelStats] = []
        self._levels: list[LevelStats] = []
        self._place(sequences)

    @classmethod
    def over(
        cls,
        program: DecodingProgram,
        to_probs: ProbsFromLogits,
        seed: int,
        repeatable: bool = False,
        progress: Progress | None = None,
    ) -> "DecodingLoop":
        """Returns a loop over a given program; :meth:`begin` then gives it sequences."""
        nothing: ByIndex = [None] * program.batch
        loop = cls(OneProgram(program), nothing, to_probs, seed, repeatable, progress=progress)
        loop._make_program()
        exhaust(loop._preparation)
        return loop

    @property
    def chooser(self) -> PassChooser:
        """Returns the object that chooses the passes. It is made when the first pass is chosen."""
        if self._chooser is None:
            self._chooser = PassChooser(
                self.program, self._to_probs, self._repeatable, self._costs, self._limit
            )
        return self._chooser

    @property
    def policy(self) -> PassPolicy:
        return self.chooser.policy

    @property
    def levels(self) -> list[LevelStats]:
        """Returns the statistics of each level, level 0 first."""
        return added(self._before, self._levels)

    @property
    def running(self) -> list[Sequence]:
        """Returns the sequences that have not ended."""
        return [s for s in self.sequences if s is not None and s.finish_reason is None]

    @property
    def free(self) -> list[int]:
        """Returns the batch indices that a new sequence may take between two passes."""
        if not self.program.cache.backend.replaces:
            return []
        return [b for b, s in enumerate(self.sequences) if s is None or s.finish_reason is not None]

    @property
    def prefills(self) -> bool:
        """Returns whether the next step begins with prompts or another program, and not with a pass."""
        return self._places is not None or not self._prefilled or bool(self.unread)

    def wait_for_chunks(self) -> None:
        """Waits while the device has several chunks of prompts to compute.

        A prompt that comes meanwhile can then join before the next pass, which the host prepares beside the
        last chunks.
        """
        self._chunked.wait()

    def begin(self, sequences: ByIndex, cached: bool = False) -> None:
        """Begins with other sequences at these batch indices, and prefills their prompts.

        Args:
            cached: whether the cache holds their keys and values, as for ``DecodingProgram.rewind``.

        Raises:
            ValueError: a prompt is too short for the levels, or too long for the buffers.
        """
        self._place(sequences)
        self.program.prepare(*self._sampling(), masked=self._masks_tokens)
        if cached:
            self.program.rewind(self._texts(), self._lengths)
            self.joining, self._prefilled = [], True
            self._begin(range(len(sequences)))
        else:
            self._prefill()

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence join at one of the :attr:`free` indices; it is prefilled before the next pass."""
        self._keep_ended()
        running = [s if s is not None and s.finish_reason is None else None for s in self.sequences]
        sequence.index = best_index(running, self.free, sequence.prompt)
        self.sequences[sequence.index] = sequence
        self.joining.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence after its tokens so far, if it has not ended."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "stop"
            if sequence in self.joining:
                self.joining.remove(sequence)
                if not self.program.cache.backend.reclaims:
                    self.sequences[self.sequences.index(sequence)] = None
            self._update_active()

    def resize(self, places: int) -> None:
        """Changes the number of places of the batch before the next pass. More are possible if the backend
        ``replaces``, and fewer if it ``resizes`` and all sequences have places then.
        """
        self.sequences += [None] * (places - len(self.sequences))
        self._places = places

    def step(self, observe: Observer | None = None, meanwhile: Callable[[], None] | None = None) -> Fresh:
        """Prefills chunks of the sequences that have joined, makes a pass of the others, and appends its
        tokens.

        Args:
            observe: called after the pass. If memory runs out in it, the pass is repeated.
            meanwhile: called once a GPU computes the pass. A sequence that it ends gets no token of the pass.

        Returns:
            the sequences that got new tokens, and these tokens; nothing if no prompt is prefilled yet.

        Raises:
            ValueError: a prompt is too short for the levels, or too long for the buffers; or the model
                returned NaN.
            torch.OutOfMemoryError: memory is short, and the plan cannot be reduced.
        """
        self._keep_ended()
        while True:
            try:
                if self._places is not None:
                    self._resize(self._places)
                elif not self._prefilled:
                    self._prefill()
                self._join()
                running = self._decoding
                return self._pass(running, observe, meanwhile) if any(running) else []
            except torch.OutOfMemoryError as error:
                out_of_memory = error
            give_way(out_of_memory, self._shrink)

    def decode(self) -> Iterator[Fresh]:
        """Yields what each :meth:`step` returns until no sequence runs."""
        try:
            while self.running:
                yield self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Keeps what later requests may use: texts, and what was learnt from the passes."""
        self._keep_ended()
        self._keep_learnt()

    def _keep_learnt(self) -> None:
        if self._chooser is not None:
            self._chooser.close()

    def _keep_ended(self) -> None:
        """Lets later prompts continue the texts of sequences that have ended since the last call."""
        for b in self._ended if self._prefilled else ():
            sequence = self.sequences[b]
            if sequence is not None and self._kept.get(b) is not sequence and b not in self._chunked:
                self._kept[b] = sequence
                self.program.ended(b, sequence.tokens, self._reuse)

    def emitted_logits(self, count: int) -> Tensor:
        """Returns the logits by which the last pass chose the first ``count`` new tokens of each sequence.

        Returns:
            fp32 ``[B, count, V]``; arbitrary for tokens that a sequence did not emit.
        """
        return self.program.verifier(self._last_stage).emitted_logits(count)

    # Programs: the first one, and those after it

    def _make_program(self) -> None:
        """Makes a program for the batch, and its random draws; :attr:`_preparation` remains to be done."""
        known = [sequence for sequence in self.sequences if sequence is not None]
        program = self._programs.make([[0] if s is None else s.tokens for s in self.sequences])
        noise = program.use_seeds() if self._by_position else program.seeded
        lowest = [program.drafter.name] if program.drafter is not None else []
        retrieval = ["retrieval"] if program.levels == 3 else []
        self._levels = [LevelStats(name) for name in (*lowest, *retrieval, "target")]
        longest = max((len(sequence.tokens) for sequence in known), default=1)
        new = max((sequence.left for sequence in known), default=math.inf)
        self._preparation = self._prepared(program, longest, new)
        count = program.batch if self._repeatable else 1
        self.draws = Draws(self._seed, self._attempts, count, program.device, noise)
        self._clock, self._after_plain = StageClock(program.device), False
        self.program, self._made, self._attempts = program, True, self._attempts + 1

    def _prepared(self, program: DecodingProgram, longest: int, new: float) -> Iterator[None]:
        """Does everything before the first pass that needs no prompt, in parts.

        Args:
            longest: tokens of the longest prompt.
            new: most new tokens of a sequence.
        """
        yield from program.preparation(*self._sampling(), masked=self._masks_tokens)
        # Unknown costs are measured on made-up sequences, so a prefill ends after this.
        self._costs = known_costs(program, self._to_probs, longest, new)

    def _drop_program(self) -> None:
        """Drops the program and keeps its statistics."""
        if self._made:
            self._keep_learnt()
            self._before, self._levels = self.levels, []
            # They hold the program's buffers, whose memory the next program needs.
            del self.program, self.draws
            self._chooser = None
        self.joining = [*self._chunked.running.values(), *self._later, *self.joining]
        # The cache does not hold these texts. Another sequence may have joined at such an index.
        self._remove(b for b in self._ended if b in self._chunked)
        self._chunked.remove_all()
        self._later = []
        self._made = self._prefilled = False

    def _shrink(self) -> bool:
        """Drops the program; returns whether the memory plan could be reduced."""
        self._drop_program()
        return self._programs.shrink()

    def _resize(self, places: int) -> None:
        """Continues with a program for another number of places, which keeps the cache of the sequences that
        run.
        """
        self._places = None
        cache = self.program.cache if self._made else None
        if cache is not None and cache.backend.reclaims:
            # Prompts whose prefill is not complete find their whole chunks again.
            cache.backend.release([*self._ended, *self._chunked.running])
            self._remove(self._ended)
        self._drop_program()
        order = [b for b, sequence in enumerate(self.sequences) if sequence is not None]
        if len(order) <= places < len(self.sequences):
            assert cache is not None
            cache.backend.renumber(order)
            self.sequences = [self.sequences[b] for b in order] + [None] * (places - len(order))
            for b, sequence in enumerate(self.sequences):
                if sequence is not None:
                    sequence.index = b
        cache = None  # The next program may need its memory.
        self._later, self.joining = self.joining, []
        self._reuse, reuse = "all", self._reuse
        try:
            self._prefill()
        finally:
            self._reuse = reuse
        self.joining, self._later = self._later, []

    # Sequences

    def _place(self, sequences: ByIndex) -> None:
        """Puts sequences into the batch before the first prefill."""
        self.sequences, self._prefilled = list(sequences), False
        self.joining = [sequence for sequence in sequences if sequence is not None]
        for b, sequence in enumerate(sequences):
            if sequence is not None:
                sequence.index = b

    def _texts(self) -> list[list[int]]:
        """Returns the tokens at each batch index, of an incomplete prompt those that passes see.

        An index without a sequence holds a single token.
        """
        texts = [s.tokens if s is not None and s not in self._later else [0] for s in self.sequences]
        for b, seen in self._chunked.seen().items():
            texts[b] = texts[b][: seen + 1]
        return texts

    @property
    def _lengths(self) -> list[int]:
        """Returns the tokens of each running sequence."""
        return [len(sequence.tokens) for sequence in self.running]

    def _prefill(self) -> None:
        """Prefills all tokens so far on every level, of a new program if there is none."""
        if not self._made:
            self._make_program()
            if not self.program.prepares_beside(max(map(len, self._texts()))):
                exhaust(self._preparation)
        if self.program.cache.backend.reclaims:
            self._expect()
        start = time.perf_counter()
        reused = self.program.prefill(
            self._texts(), self._progress, self._reuse, self._lengths, self._preparation
        )
        for sequence in self.joining:
            assert sequence.index is not None
            sequence.reused = reused[sequence.index]
        if self.program.cache.backend.transfers:
            # The host reads parts of this cache.
            self._clock.synchronize()
        seconds = time.perf_counter() - start
        self.prefill_seconds += seconds
        for sequence in self.joining:
            sequence.prefill_seconds += seconds
        self._launched, self.joining, self._prefilled = self.joining, [], True
        self._begin(range(len(self.sequences)))

    def _join(self) -> None:
        """Gives KV slots to the sequences that have joined, and prefills chunks between two passes."""
        if self.joining or (self.program.cache.backend.reclaims and self._ended):
            self._admit()
        if not self._chunked.waits:
            return
        start = time.perf_counter()
        complete = self._chunked.run(self.program)
        if complete:
            for b in complete:
                self.program.begin(b, self._texts())
            self._begin(complete)
            self.chooser.joined()
        if any(self._decoding):
            self._chunked.rest(self.program, self._texts)
        self.prefill_seconds += time.perf_counter() - start

    def _admit(self) -> None:
        """Gives KV slots to the sequences that have joined, each in place of one that has ended."""
        program, ended = self.program, list[int]()
        others = program.prepare(*self._sampling(), masked=self._masks_tokens, running=True)
        if program.cache.backend.reclaims:
            ended = self._ended
            self._remove(ended)
            joining = [sequence.index for sequence in self.joining if sequence.index is not None]
            program.cache.backend.release([*joining, *ended])
            self._expect()
        for b in ended:
            self._chunked.clear(program, b)
        for sequence in self.joining:
            self._chunked.place(program, sequence)
        self.joining = []
        self._update_active()
        if others:
            for b, decoding in enumerate(self._decoding):
                if decoding is not None:
                    self._set_sampling(b, decoding)
        self.chooser.joined(others)

    @property
    def unread(self) -> list[Sequence]:
        """Returns the sequences whose prompts are not prefilled yet."""
        return [*self._chunked.running.values(), *self.joining]

    def _begin(self, indices: Iterable[int]) -> None:
        """Lets sequences run whose prompts are prefilled."""
        for b in indices:
            if (begun := self.sequences[b]) is not None:
                self.draws.begin(b, begun.number, begun.seed if self._by_position else None)
                self._set_sampling(b, begun)
            else:
                self.draws.begin(b, b)
        self._update_active()

    @property
    def _decoding(self) -> list[Sequence | None]:
        """Returns the sequence at each batch index that takes part in passes; None where there is none."""
        waits = [*self.joining, *self._later]
        return [
            s if s is not None and s.finish_reason is None and b not in self._chunked and s not in waits
            else None
            for b, s in enumerate(self.sequences)
        ]  # fmt: skip

    def _sampling(self) -> list[ProbsFromLogits]:
        """Returns the sampling options of the sequences that run; those of the loop if none runs."""
        return [sequence.to_probs or self._to_probs for sequence in self.running] or [self._to_probs]

    @property
    def _masks_tokens(self) -> bool:
        """Returns whether sequences have grammars."""
        return self._masked or any(sequence.matcher is not None for sequence in self.running)

    def _set_sampling(self, index: int, sequence: Sequence) -> None:
        """Lets the stages decode a sequence by its own sampling options."""
        own = sequence.to_probs or self._to_probs
        self.program.selected.to_probs.begin(index, own, sequence.tokens)

    @property
    def _ended(self) -> list[int]:
        """Returns the batch indices of sequences that have ended."""
        return [b for b, s in enumerate(self.sequences) if s is not None and s.finish_reason is not None]

    def _remove(self, indices: Iterable[int]) -> None:
        """Removes sequences from the batch."""
        for b in indices:
            self.sequences[b] = None
            self._chunked.remove(b)

    def _expect(self) -> None:
        """Tells the KV backend how many tokens may follow the sequences that are prefilled next."""
        coming = [s if s not in self._later else None for s in self.sequences]
        new_tokens = [max(1, s.left) if s is not None else 0 for s in coming]
        self.program.cache.backend.expect(new_tokens)

    def _update_active(self) -> None:
        """Tells the stages which sequences run."""
        running = [s is not None for s in self._decoding]
        overwrite(self.program.state.active, torch.tensor(running, device="cpu"))

    # A pass

    def _pass(
        self, running: ByIndex, observe: Observer | None, meanwhile: Callable[[], None] | None
    ) -> Fresh:
        """Makes one pass of the running sequences, and appends its tokens."""
        program, clock, chooser = self.program, self._clock, self.chooser
        try:
            start = time.perf_counter() - program.capture_seconds  # no decoding
            texts = [s.tokens if s is not None else None for s in running]
            longest = max(map(len, self._texts()))
            matchers = [s.matcher if s is not None else None for s in running]
            if program.masked and program.drafter is not None:
                program.drafter.force([[] if m is None else m.forced(LONGEST) for m in matchers])
            kind = chooser.choose(texts, longest, max(s.left for s in running if s is not None))
            clock.start()
            if kind != PLAIN:
                kind = self._prepare_levels(kind, texts, self._after_plain)
            if program.masked and program.masks is not None:
                program.masks.begin_pass(matchers)
            self.draws.before_pass([None if text is None else len(text) for text in texts])
            for name, level in program.stages_of_pass(kind):
                program.run(name, *self.draws.generators)
                self._last_stage = name
                if self.after_stage is not None:
                    self.after_stage(name)
                clock.mark(level)
            # Later work of the device is not waited for.
            results, copied = program.state.pass_results().to("cpu", non_blocking=True), Mark(program.device)
            if meanwhile is not None:
                meanwhile()
            ahead = self._chunked.run_ahead(program)
            # The device may have computed prompts, or chunks of them, before the pass.
            waited = clock.wait_for_start()
            self.prefill_seconds += waited + ahead
            for read in self._launched:
                read.prefill_seconds += waited
            self._launched = []
            copied.wait()
            # Of a plain pass, only the columns that it writes.
            report: list[list[int]] = (results[:, :5] if kind == PLAIN else results).tolist()
            if kind.levels == 3:
                program.state.retrieval_emitted.zero_()
            tokens = [row[4 : 4 + row[0]] for row in report]
            program.cache.committed(tokens, with_means=kind.levels == 3)
            self.passes[kind] += 1
            fresh = self._append(running, report, tokens, observe)
            seconds = clock.seconds()
            # The drafter catches up with the tokens of passes without its trees.
            without = kind == PLAIN or chooser.matched(kind)
            resumed, self._after_plain = self._after_plain and not without, without
            self._count(kind, report, fresh, seconds)
            taken = time.perf_counter() - program.capture_seconds - start - waited
            if ahead:
                # The device has worked meanwhile.
                taken = max(taken - ahead, sum(seconds.values()))
            self._chunked.note()
            chooser.observe(kind, report, taken, resumed)
        except BaseException:
            # An interrupted or failed pass may have left anything in the cache.
            program.cache.forget()
            raise
        self.decode_seconds += taken
        for sequence in running:
            if sequence is not None:
                sequence.decode_seconds += taken
        return fresh

    def _prepare_levels(self, kind: PassKind, texts: Sequences[list[int] | None], resumed: bool) -> PassKind:
        """Lets the drafter process what was committed, and updates the chunk means for the retrieval level.

        Returns:
            the pass to make. It has trees of the first shape if memory is short for the stages of another.
        """
        program, matched = self.program, self.chooser.matched(kind)
        if program.drafter is not None and not matched:
            program.drafter.prepare(texts, resumed)
        if kind.levels == 3:
            program.cache.means.catch_up()
        self._clock.mark("prepare")
        if kind.shape:
            try:
                program.prepare_shape(kind.shape)
            except torch.OutOfMemoryError:
                if distributed.current() is not None:
                    raise
                _LOG.warning("device memory is short for the stages of other_trees; passes do without them")
                free_memory()
                self.chooser.do_without_other_trees()
                kind = self._prepare_levels(kind._replace(shape=0), texts, resumed or matched)
            self._clock.mark("capture")
        return kind

    def _append(
        self, running: ByIndex, report: list[list[int]], tokens: Texts, observe: Observer | None
    ) -> Fresh:
        """Appends the tokens of a pass to the sequences that still run, each up to its end."""
        fresh: Fresh = []
        if report[0][3]:
            errors = {
                (each.to_probs or self._to_probs).nan_error(each.matcher is not None)
                for each in running
                if each is not None
            }
            raise ValueError(next(iter(errors - {NAN_LOGITS}), NAN_LOGITS))
        for sequence, new in zip(running, tokens, strict=True):
            if sequence is not None and new and sequence.finish_reason is None:
                fresh.append((sequence, sequence.append(new)))
        if observe is not None:
            try:
                observe(fresh, self.emitted_logits)
            except torch.OutOfMemoryError:
                for sequence, new in fresh:
                    sequence.take_back(len(new))
                raise
        self.program.selected.to_probs.committed(
            (sequence.index, new) for sequence, new in fresh if sequence.index is not None
        )
        if any(sequence.finish_reason is not None for sequence, _ in fresh):
            self._update_active()
        return fresh

    def _count(
        self, kind: PassKind, report: list[list[int]], fresh: Fresh, seconds: Mapping[str, float]
    ) -> None:
        """Adds a pass to the statistics of its sequences and levels.

        Args:
            seconds: the seconds of the stages of the pass, by name.
        """
        emitted = 0
        for sequence, new in fresh:
            assert sequence.index is not None
            committed, proposed, *_ = report[sequence.index]
            sequence.target.add(1, proposed, committed - 1, len(new), 0.0)
            emitted += len(new)
        ran = [row[:3] for row in report if row[0] > 0]
        count, proposed, gathered = map(sum, zip(*ran, strict=True)) if ran else (0, 0, 0)
        self._levels[-1].add(len(ran), proposed, count - len(ran), emitted, seconds["target"])
        if trees := kind.rounds * len(ran):
            forwards, tokens = (len(ran) * number for number in self.program.drafted(*kind))
            self._levels[0].add(forwards, 0, 0, tokens, seconds["prepare"] + seconds["draft"])
            if kind.levels == 3:
                verified = trees * self.program.shapes[kind.shape].depth
                self._levels[1].add(trees, verified, gathered - trees, gathered, seconds["retrieval"])
