"""Times of the stages while decoding, beside those of the table of stage costs: what of the table is wrong.

A table that was measured while the machine was busy would else stay as it is, and requests with a seed follow
it without measuring. An entry is changed only on clear evidence, since choices, and with them the tokens of a
seed, depend on it.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping

from triforce_tree.decoding.choice.passes import OF_SHAPE, CostFactors, PassKind, StageSeconds

LEAST_PASSES, LEAST_REQUESTS = 200, 2
"""Passes with a stage, and requests, before its time is judged: a request may have met a busy machine too."""
TOLERANCE = 1.25
"""Factor by which both quartiles must be off, on one side: outliers, and a table that is nearly right, change
nothing."""
# Passes of each stage that are kept, the newest ones.
_KEPT = 400
# With fewer passes nothing is known about a stage.
_SEEN = 20


class StageTimings:
    """Times of the passes of a program with one kind of sampling, as multiples of the table's."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all of them: the table has changed."""
        self._ratios: dict[str, deque[float]] = {}
        self._requests: dict[str, int] = {}
        self._seen: set[str] = set()

    def begin(self) -> None:
        """Another request begins."""
        self._seen = set()

    def add(
        self, kind: PassKind, filled: float, seconds: Mapping[str, float], table: StageSeconds, refresh: int
    ) -> None:
        """Take up one pass.

        Args:
            filled: the chain's length as a share of the most that it can hold.
            seconds: ``draft`` and ``retrieval`` of all rounds, ``target`` of the target's stage.
            table: with trees of its shape, at its length of the context.
            refresh: as for ``measure``; where not all rounds refresh, their mean is not compared.
        """
        ending = f"/{kind.shape}" if kind.shape else ""
        target = seconds["target"] / table.verification(kind, filled)
        if kind.levels == 3:
            self._note("chain", target)
        else:
            self._note("plain" if kind.levels == 1 else "tree" + ending, target)
        if kind.rounds:
            self._note("draft" + ending, seconds["draft"] / kind.rounds / table.draft)
        if kind.levels == 3 and refresh == 1:
            self._note("retrieval" + ending, seconds["retrieval"] / kind.rounds / table.retrieval)

    def factors(self, shapes: int = 1) -> CostFactors:
        """By which the table's seconds are wrong; those of other shapes with their number: ``draft/1``.

        Where plain passes were measured on a busy machine, so were the others: drafting would seem to cost
        too much as soon as plain passes alone are corrected, and never be tried again. Stages that hardly ran
        since then get the factor of plain passes.

        Args:
            shapes: number of shapes of trees.
        """
        found: CostFactors = {}
        for name, ratios in self._ratios.items():
            if len(ratios) < LEAST_PASSES or self._requests[name] < LEAST_REQUESTS:
                continue
            low, median, high = statistics.quantiles(ratios, n=4)
            if low > TOLERANCE or high < 1 / TOLERANCE:
                found[name] = median
        if "plain" in found:
            endings = ("", *(f"/{shape}" for shape in range(1, shapes)))
            names = [name + ending for ending in endings for name in OF_SHAPE] + ["chain", "prepare"]
            for name in names:
                factor = statistics.median(self._ratios[name]) if self.ran(name) else found["plain"]
                if name not in found and not 1 / TOLERANCE <= factor <= TOLERANCE:
                    found[name] = factor
        if "chain" in found:
            found["root"] = found["chain"]
        return found

    def ran(self, name: str) -> bool:
        """Whether enough is known about a stage to say what it takes."""
        return len(self._ratios.get(name, ())) >= _SEEN

    def _note(self, name: str, ratio: float) -> None:
        if not 0 < ratio < math.inf:
            return
        self._ratios.setdefault(name, deque(maxlen=_KEPT)).append(ratio)
        if name not in self._seen:
            self._seen.add(name)
            self._requests[name] = self._requests.get(name, 0) + 1
