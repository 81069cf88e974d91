"""The controller's costs at the present length of the context, with the factors that were measured."""

from collections.abc import Sequence

from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.cost_table import correct
from triforce_tree.decoding.choice.passes import CostFactors, StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts
from triforce_tree.decoding.choice.times.shared_times import PassTimes
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.verify.sampling import ProbsFromLogits

# Costs are interpolated anew after so many tokens at least, and after this share of the context: they change
# by no more, and the table has two digits.
_STEP, _SHARE = 8, 1 / 128


class CostsByLength:
    """Sets a controller's costs from the table's.

    Args:
        controller: whose costs these are.
        first: with trees of the first shape.
        others: with those of the others; None for a shape that passes must not take.

    Attributes:
        first, others: as given.
        factors: measured seconds as multiples of the table's, by field of ``StageSeconds``; those of other
            shapes with their number: ``draft/1``.
    """

    def __init__(
        self, controller: PassController, first: StageCosts, others: Sequence[StageCosts | None] = ()
    ) -> None:
        self._controller, self.first, self.others = controller, first, others
        self.factors: CostFactors = {}
        # The table's costs, before the factors, and the length from which on they are computed anew.
        self._expected: list[StageSeconds | None] = []
        self._until = 0

    def at(self, tokens: int, measured: bool) -> None:
        """Set the costs after so many tokens, every few tokens anew.

        Args:
            measured: whether the controller's costs hold times measured since the last call.
        """
        if tokens < self._until:
            return
        if measured:
            self.kept_factors()
        controller = self._controller
        dropped = [bool(self._expected) and costs is None for costs in controller.other_costs]
        first, others = self.first.at(tokens), [None if o is None else o.at(tokens) for o in self.others]
        others = [None if gone else own for own, gone in zip(others, dropped, strict=True)]
        self._expected, self._until = [first, *others], tokens + max(_STEP, int(_SHARE * tokens))
        controller.costs = first.scaled(self.factors)
        controller.other_costs = [
            None if own is None else own.scaled(self._of_shape(shape)) for shape, own in enumerate(others, 1)
        ]

    def learn(self, program: DecodingProgram, times: PassTimes, refines: bool) -> None:
        """Note the seconds of a pass beside the table's.

        Args:
            refines: whether the controller's costs follow them.
        """
        if times.gathered is None:
            return
        if self._expected and (table := self._expected[times.kind.shape]) is not None:
            filled = times.gathered / max(1, program.max_draft_tokens)
            refresh = program.config.retrieval.refresh
            program.selected.timings.add(times.kind, filled, times.seconds, table, refresh)
        if refines:
            self._controller.refine(times.kind, times.gathered, times.seconds, times.resumed)

    def anew(self) -> None:
        """Sequences have changed: compute the costs anew when they are asked for next."""
        self._until = 0

    def kept_factors(self) -> CostFactors:
        """Take over what the last passes have changed of the table's costs."""
        now = (self._controller.costs, *self._controller.other_costs)
        for shape, (own, expected) in enumerate(zip(now, self._expected, strict=False)):
            if own is not None and expected is not None:
                ending = f"/{shape}" if shape else ""
                factors = own.relative_to(expected)
                self.factors = self.factors | {name + ending: factor for name, factor in factors.items()}
        return self.factors

    def end(self, program: DecodingProgram, to_probs: ProbsFromLogits) -> CostFactors:
        """After a request: correct the table where decoding has shown it to be wrong.

        Returns:
            the factors with which a later request begins.
        """
        factors = self.kept_factors()
        # They are relative to what was corrected.
        return {} if correct(program, to_probs, self.first, self.others) else factors

    def _of_shape(self, shape: int) -> CostFactors:
        """The factors of all stages with trees of one shape."""
        ending = f"/{shape}"
        own = {name.removesuffix(ending): f for name, f in self.factors.items() if name.endswith(ending)}
        return {name: f for name, f in self.factors.items() if "/" not in name} | own
