"""The choice of the passes of a decoding loop: what a :class:`PassPolicy` is given, and what it learns."""

from collections.abc import Hashable, Mapping, Sequence

from transformers import TemperatureLogitsWarper

from triforce_tree.decoding.choice.shared_times import PassTimes, SharedTimes
from triforce_tree.decoding.choice.stage_costs import (
    Allowance,
    costs_by_shape,
    settings_of,
    stage_costs,
    user_table,
)
from triforce_tree.decoding.prepared_stages import held_back
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.with_lookup import WithLookup
from triforce_tree.policy.costs import PassCosts
from triforce_tree.policy.estimates import Tails
from triforce_tree.policy.pass_policy import PassLevels, PassPolicy
from triforce_tree.policy.passes import PassKind
from triforce_tree.runtime import distributed
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits

# Temperatures up to this one are one class, higher ones another.
_LOW_TEMPERATURE = 0.7
# Kinds of sampling of which a program keeps what was learnt.
_MOST_KINDS = 64


class PassChooser:
    """Chooses the passes of a loop over one program.

    Args:
        program: its stages are prepared for ``to_probs``.
        to_probs: logits to probabilities.
        repeatable: whether the choice follows from the table of stage costs, the tokens and how many may
            follow alone. Otherwise it also follows from times measured while decoding, and from what earlier
            requests to the program that were not repeatable left.
        allowance: what measuring the stages' costs may take, where they are not known.

    Attributes:
        policy: makes the choices.
    """

    def __init__(
        self, program: DecodingProgram, to_probs: ProbsFromLogits, repeatable: bool, allowance: Allowance
    ) -> None:
        self._program, self._to_probs = program, to_probs
        passes = PassLevels(
            program.levels, program.shapes, program.max_draft_tokens, program.two_levels, program.tail_tree
        )
        fixed = 0 if program.levels == 1 else program.config.rounds
        self._costs: PassCosts | None = None
        if fixed is None:
            table = costs_by_shape(program, stage_costs(program, to_probs, None, allowance))
            self._costs = PassCosts(table, program.selected.timings, follow=not repeatable)
        self._learns = self._costs is not None and not repeatable
        # What acceptance depends on, of all that may change while a program lives.
        self._kind: Hashable = (
            DeviceProbs.key(to_probs), temperature_class(to_probs), program.config.retrieval.refresh,
        )  # fmt: skip
        learnt = program.learnt.get(self._kind) if self._learns else None
        # The choice of a repeatable request must not depend on which stages are there already.
        waiting = held_back(program) if self._learns else {}
        self.policy = PassPolicy(passes, self._costs, fixed, learnt, waiting)
        self._lookup = program.drafter if isinstance(program.drafter, WithLookup) else None
        self._common: list[int | None] = []
        self._times = SharedTimes()
        # The last pass, with its seconds beyond those of its stages.
        self._last: tuple[PassKind, float] | None = None

    def choose(self, texts: Sequence[list[int] | None], longest: int, remaining: int) -> PassKind:
        """Chooses the next pass.

        Args:
            texts: all committed tokens of each sequence; None for one that does not run.
            longest: tokens of the longest text in the batch.
            remaining: the most tokens that may follow in a running sequence.
        """
        if self._costs is not None:
            self._costs.at(longest)
        if self._lookup is None or self.policy.fixed is not None:
            return self.policy.choose(remaining)
        matches = self._lookup.match(texts)
        self._common = [None if m is None else m.common for m in matches]
        kind = self.policy.choose(remaining, self._common)
        if self.policy.matched(kind):
            self._lookup.take(matches, self.policy.proposed)
        return kind

    def matched(self, kind: PassKind) -> bool:
        """Returns whether a pass verifies matched tokens."""
        return self.policy.matched(kind)

    def do_without_other_trees(self) -> None:
        """Restricts all later passes to trees of the first shape."""
        if self._costs is not None:
            self._costs.drop_other_shapes()

    def joined(self) -> None:
        """Another sequence has joined the batch: costs of another length may hold again."""
        if self._costs is not None:
            self._costs.changed()

    def observe(
        self, kind: PassKind, report: Sequence[list[int]], seconds: Mapping[str, float], resumed: bool
    ) -> None:
        """Updates the estimates and costs after a pass.

        Args:
            report: see ``SequenceState.pass_results``.
            seconds: the seconds of its stages, by name.
            resumed: whether the pass before it had no trees of the drafter.
        """
        program = self._program
        running = [row for row in report if row[0] > 0]
        gathered = sum(row[2] for row in running)
        own = PassTimes(kind, gathered / len(running) if running else None, seconds, resumed, self._last)
        if running:
            chain = program.max_draft_tokens if kind.levels == 3 else None
            rejected, tails = judged(running, chain, program.shapes[0].depth if program.tail_tree else None)
            ranks, matched = None, list[tuple[int, int, int]]()
            if self.policy.matched(kind) and self.policy.fixed is None:
                each = zip(self._common, self.policy.proposed, (row[0] - 1 for row in report), strict=True)
                matched = [(common, count, tokens) for common, count, tokens in each if common and count]
            elif not self.policy.matched(kind) and kind.rounds and program.state.rank_counts is not None:
                ranks = (*program.state.ranks_of(running), kind.rounds * len(running))
            self.policy.observe(
                kind, len(running), gathered, sum(row[0] for row in running) - len(running), rejected,
                ranks, tails, matched,
            )  # fmt: skip
        self._learn(self._times.share(own) if self._learns else own)

    def took(self, kind: PassKind, seconds: float) -> None:
        """Records by how many seconds the last pass exceeded the sum of its stages."""
        self._last = kind, seconds

    def finish(self) -> None:
        """Learns from the last pass of a batch, whose times rank 0 had not sent yet."""
        if self._learns:
            self._learn(self._times.rest())

    def close(self) -> None:
        """Keep what was learnt for later requests."""
        if self._costs is None:
            return
        self._correct_table(self._costs)
        if self._learns:
            kept = self._program.learnt
            kept.pop(self._kind, None)
            kept[self._kind] = self.policy.learnt()
            if len(kept) > _MOST_KINDS:
                # The one learnt longest ago.
                del kept[next(iter(kept))]

    def _learn(self, times: PassTimes | None) -> None:
        """Take up the times of a pass, which are the same on all ranks where choices follow from them."""
        costs = self._costs
        if costs is None or times is None or (not self._learns and distributed.current() is not None):
            return
        if self._learns and times.before is not None:
            costs.learn_host(*times.before)
        if times.gathered is not None:
            filled = times.gathered / max(1, self._program.max_draft_tokens)
            costs.learn(times.kind, filled, times.seconds, times.resumed)

    def _correct_table(self, costs: PassCosts) -> None:
        """Correct the table of stage costs where decoding has shown it to be far off."""
        timings, first = self._program.selected.timings, costs.table[0]
        factors = timings.corrections()
        # Processors that depend on the text take time that the table does not hold.
        if not factors or first is None or not self._to_probs.context_free:
            return
        timings.clear()
        if distributed.is_first_rank():
            user_table().replace(settings_of(self._program, self._to_probs), first.scaled(factors))


def temperature_class(to_probs: ProbsFromLogits) -> str:
    """``greedy``, ``low`` or ``high``: requests of one class are accepted about as often."""
    if to_probs.greedy:
        return "greedy"
    found = [p.temperature for p in to_probs.processors if isinstance(p, TemperatureLogitsWarper)]
    return "low" if found and found[0] <= _LOW_TEMPERATURE else "high"


def judged(report: Sequence[Sequence[int]], chain: int | None, tail: int | None) -> tuple[int, Tails | None]:
    """Counts the sequences in which the target rejected a token, and the trees after chains that it judged.

    Args:
        report: of each sequence: committed tokens, verified draft tokens, tokens that level 1 emitted.
        chain: most tokens of a chain; None for passes without chains.
        tail: depth of the trees at the ends of chains; None if there are none.
    """
    proposed = [row[1] if chain is None else min(row[2], chain) for row in report]
    beyond = [row[0] - 1 - tokens for row, tokens in zip(report, proposed, strict=True)]
    rejected, behind = sum(tokens < 0 for tokens in beyond), [tokens for tokens in beyond if tokens >= 0]
    if chain is None or tail is None:
        return rejected, None
    return rejected, Tails(len(behind), sum(behind), sum(tokens < tail for tokens in behind))
