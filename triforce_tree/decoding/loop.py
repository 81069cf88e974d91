"""The loop around captured cycles: one wait a pass, then endings, statistics and the next draft length."""

import time
from collections.abc import Iterator, Sequence

import torch

from triforce_tree.decoding.cost_table import stage_costs
from triforce_tree.decoding.draft_length import DraftLengthController
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending, finish_reason
from triforce_tree.runtime.distributed import broadcast_object
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.runtime.stats import LevelStats, Progress
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits


class Decoder:
    """Decodes a batch of texts with one :class:`DecodingProgram`.

    Args:
        program: made for this batch size; one decoder uses it at a time.
        to_probs: logits to law.
        seed: of all draws, 0 to 2**63 - 1.
        repeatable: same seed, same tokens: draft lengths follow from the table of stage costs alone, and not
            from times measured while decoding, which differ from run to run.
    """

    def __init__(
        self, program: DecodingProgram, to_probs: ProbsFromLogits, seed: int, repeatable: bool = False
    ) -> None:
        self.program = program
        self._repeatable = repeatable
        program.prepare(to_probs)
        self._generator = torch.Generator(program.device)
        self._generator.manual_seed(seed)
        extent = PassLimits.of(program.config, program.levels)
        self._depth, self._nodes = extent.depth, extent.nodes
        lowest = [program.drafter.name] if program.drafter is not None else []
        retrieval = ["retrieval"] if program.levels == 3 else []
        self.levels = [LevelStats(name) for name in (*lowest, *retrieval, "target")]
        self.controller = DraftLengthController(
            program.levels, extent.depth, program.max_draft_tokens, program.config.rounds
        )
        self._costs = stage_costs(program, to_probs) if self.controller.fixed is None else None
        self.prefill_seconds = self.decode_seconds = 0.0
        self.finish_reasons: list[str | None] = []
        self._clock = StageClock(program.device)

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Feed the prompts to every level; all but their last tokens, which are the first roots."""
        start = time.perf_counter()
        self.program.prefill(prompts, progress)
        self._clock.synchronize()
        self.prefill_seconds += time.perf_counter() - start

    def decode(
        self, prompts: Sequence[Sequence[int]], endings: Sequence[Ending]
    ) -> Iterator[list[list[int]]]:
        """Yield each text's new tokens as passes of level 2 settle them; nothing for one that has ended.

        Raises:
            ValueError: the model returned NaN.
        """
        program, texts = self.program, [list(p) for p in prompts]
        before = [len(text) for text in texts]
        if self._costs is not None:
            self.controller.costs = self._costs.at(max(before))
        self.finish_reasons = [None] * len(texts)
        plain_before = False
        while None in self.finish_reasons:
            start = time.perf_counter()
            if self._costs is not None and self._repeatable:
                self.controller.costs = self._costs.at(max(map(len, texts)))
            rounds = self.controller.rounds()
            if rounds:
                self._prepare(texts, resumed=plain_before)
            report = self._pass(rounds)
            plain_before = rounds == 0
            fresh: list[list[int]] = []
            ended = False
            for b, (count, _, _, broken, *tokens) in enumerate(report):
                if broken:
                    raise ValueError(NAN_LOGITS)
                fresh.append([])
                for token in tokens[:count] if self.finish_reasons[b] is None else []:
                    fresh[b].append(token)
                    texts[b].append(token)
                    reason = finish_reason(texts[b], token, len(texts[b]) - before[b], endings[b])
                    if reason:
                        self.finish_reasons[b], ended = reason, True
                        break
            self._count(rounds, report, sum(map(len, fresh)))
            if ended:
                still = [reason is None for reason in self.finish_reasons]
                program.state.active.copy_(torch.tensor(still, device=program.device))
            self.decode_seconds += time.perf_counter() - start
            yield fresh

    def _pass(self, rounds: int) -> list[list[int]]:
        program, clock = self.program, self._clock
        clock.start()
        if rounds == 0:
            program.run("plain", self._generator)
            clock.mark("plain")
        else:
            for done in range(rounds):
                program.run("draft", self._generator)
                clock.mark("draft")
                if program.levels == 3:
                    name = "retrieval_refresh" if program.config.retrieval.chooses(done) else "retrieval"
                    program.run(name, self._generator)
                    clock.mark(name)
            program.run("target", self._generator)
            clock.mark("target")
        report: list[list[int]] = program.state.pass_results().tolist()
        program.committed([count for count, *_ in report])
        program.state.retrieval_emitted.zero_()
        return report

    def _count(self, rounds: int, report: list[list[int]], emitted: int) -> None:
        """Statistics of the sequences that were still running, and what the controller learns of them.

        ``emitted``: new tokens up to the end of each text; the report also counts those behind it.
        """
        # One clock for all ranks: whoever chose other rounds would wait for the others for ever.
        seconds = broadcast_object(self._clock.seconds())
        alive = [row for row in report if row[0] > 0]
        count, proposed, gathered = (sum(row[i] for row in alive) for i in range(3))
        target = self.levels[-1]
        target.forwards += len(alive)
        target.proposed += proposed
        target.accepted += count - len(alive)
        target.emitted += emitted
        target.seconds += seconds.get("target", 0.0) + seconds.get("plain", 0.0)
        if rounds and alive:
            draft = self.levels[0]
            drafter = self.program.drafter
            assert drafter is not None
            # One that reports no distributions proposes a whole tree at once.
            draft.forwards += rounds * (1 if drafter.deterministic else self._depth) * len(alive)
            draft.emitted += rounds * (self._nodes - 1) * len(alive)
            draft.seconds += seconds.get("draft", 0.0)
            if self.program.levels == 3:
                retrieval = self.levels[1]
                retrieval.forwards += rounds * len(alive)
                retrieval.proposed += rounds * self._depth * len(alive)
                retrieval.accepted += gathered - rounds * len(alive)
                retrieval.emitted += gathered
                retrieval.seconds += seconds.get("retrieval_refresh", 0.0) + seconds.get("retrieval", 0.0)
        if alive:
            refused = sum(row[0] <= row[1] for row in alive) if rounds else 0
            self.controller.observe(rounds, len(alive), gathered, count - len(alive), refused)
        if not self._repeatable:
            final = seconds["target" if rounds else "plain"]
            self.controller.refine(rounds, sum(seconds.values()) - final, final)

    def _prepare(self, texts: list[list[int]], resumed: bool) -> None:
        """Let the drafter catch up with what was committed."""
        if self.program.drafter is not None:
            going = [
                text if reason is None else None
                for text, reason in zip(texts, self.finish_reasons, strict=True)
            ]
            self.program.drafter.prepare(going, resumed)
