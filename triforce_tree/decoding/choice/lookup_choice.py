"""The choice of passes that verify matched tokens in place of a tree (``drafters/with_lookup.py``).

Where a text repeats itself, the target accepts most of what followed before, and a pass of two levels over a
chain of matched tokens yields more than any tree: a draft model with a window cannot foresee a copy of what
lies far back. How likely a token is to be accepted depends on how long the match is. These acceptances are
estimated while decoding, by class of length, and such a pass is made where it is expected to yield more
tokens a second than the best one with trees, or, while drafting pauses, than plain decoding.
"""

import math
from collections.abc import Sequence

from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.estimates import tokens_of
from triforce_tree.decoding.choice.passes import PassKind
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.with_lookup import Match, WithLookup

# Acceptance that is expected of a match with at least so many tokens, and what it weighs, in judged tokens.
_EXPECTED = {6: 0.65, 12: 0.8, 24: 0.93, 48: 0.97}
_PRIOR = 4.0
# Share of the evidence that is kept from one such pass to the next.
_KEPT = 0.9
# A token is proposed where all up to it are accepted with this probability at least.
_LEAST = 0.1


class LookupAcceptance:
    """Running acceptance of matched tokens by length of the match."""

    def __init__(self) -> None:
        self._tokens = {least: (a * _PRIOR, _PRIOR) for least, a in _EXPECTED.items()}

    def of(self, match: Match) -> float:
        """The probability that a matched token is accepted whose predecessors were."""
        accepted, judged = self._tokens[match_class(match)]
        return accepted / judged

    def count(self, match: Match, most: int) -> int:
        """How many tokens to propose."""
        if not match.common:
            return 0
        return min(most, max(1, int(math.log(_LEAST) / math.log(min(self.of(match), 0.9999)))))

    def observe(self, match: Match, accepted: int, rejected: int) -> None:
        """Take up a verification: so many tokens were accepted, and then one was rejected, or none."""
        held = self._tokens[match_class(match)]
        self._tokens[match_class(match)] = _KEPT * held[0] + accepted, _KEPT * held[1] + accepted + rejected


def match_class(match: Match) -> int:
    """The class of a match's length: the fewest tokens in common."""
    return max(least for least in _EXPECTED if least <= max(match.common, min(_EXPECTED)))


class LookupChoice:
    """Chooses passes with matched tokens.

    Args:
        controller: chooses all other passes; both share one loss budget.
        drafter: finds the matches.

    Attributes:
        acceptance: by class of length.
        taken: of the last such pass by sequence: its match, and how many tokens were proposed.
    """

    def __init__(self, controller: PassController, drafter: WithLookup) -> None:
        self._controller, self._drafter = controller, drafter
        self.acceptance = LookupAcceptance()
        self.taken: list[tuple[Match | None, int]] = []

    @classmethod
    def of(cls, controller: PassController, drafter: Drafter | None) -> "LookupChoice | None":
        """None where passes have no matched tokens."""
        return cls(controller, drafter) if controller.lookup and isinstance(drafter, WithLookup) else None

    def choose(self, sequences: Sequence[Sequence[int] | None]) -> PassKind | None:
        """A pass with matched tokens, if it is the best one and passes are not given; proposes its tokens.

        Args:
            sequences: all committed tokens; None for a sequence that has ended.
        """
        if self._controller.fixed is not None:
            return None
        matches = self._drafter.match(sequences)
        if not any(m is not None and m.common for m in matches):
            return None
        counts = [
            [0 if m is None else self.acceptance.count(m, length) for m in matches]
            for length in self._drafter.lengths
        ]
        kind = self._controller.matched_pass([self._expected(matches, of_length) for of_length in counts])
        if kind is not None:
            proposed = counts[kind.shape - self._controller.lookup]
            self.taken = list(zip(matches, proposed, strict=True))
            self._drafter.take(matches, proposed)
        return kind

    def _expected(self, matches: Sequence[Match | None], counts: Sequence[int]) -> float:
        """Tokens of a running sequence that a pass with so many proposed ones is expected to yield."""
        running = [(m, count) for m, count in zip(matches, counts, strict=True) if m is not None]
        return sum(tokens_of(self.acceptance.of(m), n) if n else 1.0 for m, n in running) / len(running)

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn from the pass: tokens that the target accepted of each sequence's."""
        for (match, count), tokens in zip(self.taken, accepted, strict=True):
            if match is not None and count:
                self.acceptance.observe(match, min(tokens, count), int(tokens < count))
