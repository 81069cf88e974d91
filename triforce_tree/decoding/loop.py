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
from triforce_tree.trees.device_shapes import Extent
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits


class Decoder:
    """Decodes a batch of texts with one :class:`DecodingProgram`.

    Args:
        cycle: made for this batch size; one decoder uses it at a time.
        law: logits to law.
        seed: of all draws, 0 to 2**63 - 1.
        repeatable: same seed, same tokens: draft lengths follow from the table of stage costs alone, and not
            from times measured while decoding, which differ from run to run.
    """

    def __init__(
        self, cycle: DecodingProgram, law: ProbsFromLogits, seed: int, repeatable: bool = False
    ) -> None:
        self.cycle = cycle
        self._repeatable = repeatable
        cycle.prepare(law)
        self._generator = torch.Generator(cycle.device)
        self._generator.manual_seed(seed)
        extent = Extent.of(cycle.config, cycle.levels)
        self._depth, self._nodes = extent.depth, extent.nodes
        lowest = [cycle.drafter.name] if cycle.drafter is not None else []
        middle = ["retrieval"] if cycle.levels == 3 else []
        self.levels = [LevelStats(name) for name in (*lowest, *middle, "target")]
        self.controller = DraftLengthController(cycle.levels, extent.depth, cycle.reach, cycle.config.rounds)
        self._costs = stage_costs(cycle, law) if self.controller.fixed is None else None
        self.prefill_seconds = self.decode_seconds = 0.0
        self.finish_reasons: list[str | None] = []
        self._clock = StageClock(cycle.device)

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Feed the prompts to every level; all but their last tokens, which are the first roots."""
        start = time.perf_counter()
        self.cycle.prefill(prompts, progress)
        self._clock.synchronize()
        self.prefill_seconds += time.perf_counter() - start

    def decode(
        self, prompts: Sequence[Sequence[int]], endings: Sequence[Ending]
    ) -> Iterator[list[list[int]]]:
        """Yield each text's new tokens as passes of level 2 settle them; nothing for one that has ended.

        Raises:
            ValueError: the model returned NaN.
        """
        cycle, texts = self.cycle, [list(p) for p in prompts]
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
                cycle.texts.active.copy_(torch.tensor(still, device=cycle.device))
            self.decode_seconds += time.perf_counter() - start
            yield fresh

    def _pass(self, rounds: int) -> list[list[int]]:
        cycle, clock = self.cycle, self._clock
        clock.start()
        if rounds == 0:
            cycle.run("plain", self._generator)
            clock.mark("plain")
        else:
            for done in range(rounds):
                cycle.run("grow", self._generator)
                clock.mark("grow")
                if cycle.levels == 3:
                    name = "choose" if cycle.config.retrieval.chooses(done) else "middle"
                    cycle.run(name, self._generator)
                    clock.mark(name)
            cycle.run("full", self._generator)
            clock.mark("full")
        report: list[list[int]] = cycle.texts.report().tolist()
        cycle.settled([count for count, *_ in report])
        cycle.texts.gathered.zero_()
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
        target.seconds += seconds.get("full", 0.0) + seconds.get("plain", 0.0)
        if rounds and alive:
            draft = self.levels[0]
            drafter = self.cycle.drafter
            assert drafter is not None
            # One that reports no distributions proposes a whole tree at once.
            draft.forwards += rounds * (1 if drafter.deterministic else self._depth) * len(alive)
            draft.emitted += rounds * (self._nodes - 1) * len(alive)
            draft.seconds += seconds.get("grow", 0.0)
            if self.cycle.levels == 3:
                middle = self.levels[1]
                middle.forwards += rounds * len(alive)
                middle.proposed += rounds * self._depth * len(alive)
                middle.accepted += gathered - rounds * len(alive)
                middle.emitted += gathered
                middle.seconds += seconds.get("choose", 0.0) + seconds.get("middle", 0.0)
        if alive:
            refused = sum(row[0] <= row[1] for row in alive) if rounds else 0
            self.controller.observe(rounds, len(alive), gathered, count - len(alive), refused)
        if not self._repeatable:
            final = seconds["full" if rounds else "plain"]
            self.controller.refine(rounds, sum(seconds.values()) - final, final)

    def _prepare(self, texts: list[list[int]], resumed: bool) -> None:
        """Let the drafter catch up with what was committed."""
        if self.cycle.drafter is not None:
            going = [
                text if reason is None else None
                for text, reason in zip(texts, self.finish_reasons, strict=True)
            ]
            self.cycle.drafter.prepare(going, resumed)
