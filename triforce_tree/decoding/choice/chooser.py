"""Chooses the passes of a decoding loop: gives a :class:`PassPolicy` what it needs, and measures passes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper

from triforce_tree.decoding.choice.cost_table import user_table
from triforce_tree.decoding.choice.stage_costs import by_shape, settings_of
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.matching import MatchingDrafter
from triforce_tree.policy.costs import KnownCosts, PassCosts
from triforce_tree.policy.estimates import Estimates
from triforce_tree.policy.pass_policy import Learnt, PassLevels, PassPolicy
from triforce_tree.policy.passes import PassKind, SpeculationLimit
from triforce_tree.runtime import distributed
from triforce_tree.verify.sampling import ProbsFromLogits

# Temperatures up to this one are one class, higher ones another.
_LOW_TEMPERATURE = 0.7
# Kinds of sampling of which a program keeps what was learnt.
_MOST_KINDS = 64


class _Timed(NamedTuple):
    """A pass whose seconds rank 0 is sending to the other ranks."""

    kind: PassKind
    filled: float
    resumed: bool
    seconds: Tensor
    work: Any


class PassChooser:
    """Chooses the passes of a loop over one program.

    Args:
        program: its stages are prepared for ``to_probs``.
        to_probs: logits to probabilities.
        repeatable: whether the choice follows from the table of stage costs, the tokens and how many may
            follow alone. Otherwise it also follows from times measured while decoding, and from what earlier
            requests to the program that were not repeatable have learnt.
        known: the costs of the program's stages; None if all its passes are alike.
        limit: what passes may draft at most; None for no limit.

    Attributes:
        policy: makes the choices.
    """

    def __init__(
        self,
        program: DecodingProgram,
        to_probs: ProbsFromLogits,
        repeatable: bool,
        known: KnownCosts | None,
        limit: SpeculationLimit | None = None,
    ) -> None:
        self._program, self._to_probs = program, to_probs
        passes = PassLevels(
            program.levels, program.shapes, program.max_draft_tokens, program.two_levels, program.tail_tree,
            program.cuts_trees,
        )  # fmt: skip
        self._known = known
        self._costs = None if known is None else PassCosts(known, follow=not repeatable)
        self._learns = known is not None and not repeatable
        learnt, waiting = None, dict[int, float]()
        if self._learns:
            # The choice of a repeatable request must not depend on which stages are there already.
            learnt, waiting = self._learnt(passes), program.held_back()
        self.policy = PassPolicy(passes, self._costs, program.config.rounds, learnt, waiting, limit)
        self._lookup = program.drafter if isinstance(program.drafter, MatchingDrafter) else None
        self._sent: _Timed | None = None
        self._others = False  # whether passes had stages of other sampling options

    def _learnt(self, passes: PassLevels) -> Learnt:
        """Returns what earlier requests have learnt that decode alike."""
        kept = self._program.learnt
        refresh = self._program.config.retrieval.refresh
        kind, masked = self._program.selected.to_probs.kind, self._program.masked
        key = kind, temperature_class(self._to_probs), masked, refresh
        kept[key] = learnt = kept.pop(key, None) or Learnt(Estimates(passes.shapes))
        if len(kept) > _MOST_KINDS:
            del kept[next(iter(kept))]  # the one used longest ago
        return learnt

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
            kind = self.policy.choose(remaining)
            if self._lookup is not None and self.policy.matched(kind):
                self._lookup.take_likely(texts)
            return kind
        matches = self._lookup.match(texts)
        kind = self.policy.choose(remaining, matches)
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

    def joined(self, other_stages: bool = False) -> None:
        """Another sequence has joined the batch: costs of another length may hold again.

        Args:
            other_stages: whether the sampling options of the batch need other stages from now on.
        """
        self._others |= other_stages
        if self._costs is not None:
            self._costs.changed()

    def observe(self, kind: PassKind, report: Sequence[list[int]], seconds: float, resumed: bool) -> None:
        """Updates the estimates and costs after a pass.

        Args:
            report: see ``SequenceState.pass_results``.
            seconds: the seconds of the whole pass.
            resumed: whether the pass before it had no trees of the drafter.
        """
        self.policy.observe(kind, report)
        running = [row[2] for row in report if row[0]]
        if self._costs is None or not running:
            return
        filled = self.policy.filled(kind, sum(running) / len(running))
        if distributed.current() is None:
            self._costs.learn(kind, filled, resumed, seconds)
        elif self._learns:
            # Ranks that chose different passes would wait for each other forever. All of them learn the times
            # of rank 0, one pass late: the message is sent while the next pass runs.
            self._receive()
            sent = torch.tensor([seconds], dtype=torch.float64, device="cpu")
            self._sent = _Timed(kind, filled, resumed, sent, distributed.begin_broadcast(sent))

    def _receive(self) -> None:
        """Learns the time of the pass before, which rank 0 has sent."""
        if self._sent is not None and self._costs is not None:
            kind, filled, resumed, seconds, work = self._sent
            self._sent = None
            work.wait()
            self._costs.learn(kind, filled, resumed, seconds.item())

    def close(self) -> None:
        """Corrects the table of stage costs if decoding has shown it to be far off."""
        self._receive()
        # Processors that are called on the host, and grammars, take time that the table does not hold.
        in_stages = self._to_probs.in_stages and not self._others
        if self._known is None or not in_stages or self._program.masked:
            return
        if (corrected := self._known.corrected()) is not None:
            self._known.replace(by_shape(self._program, corrected))
            if distributed.is_first_rank():
                user_table().replace(settings_of(self._program, self._to_probs), corrected)


def temperature_class(to_probs: ProbsFromLogits) -> str:
    """Returns ``greedy``, ``low`` or ``high``: requests of one class are accepted about as often."""
    if to_probs.greedy:
        return "greedy"
    found = [p.temperature for p in to_probs.processors if isinstance(p, TemperatureLogitsWarper)]
    return "low" if found and found[0] <= _LOW_TEMPERATURE else "high"
