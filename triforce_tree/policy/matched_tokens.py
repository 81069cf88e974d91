"""Estimates how many matched tokens are accepted, from the number of tokens that match.

Matched tokens are those that followed an earlier occurrence of the newest tokens of a text. The next one is
accepted with a probability that grows with the number of tokens that the text has in common with the
occurrence, and each accepted token makes the match longer by one. What followed a match is known once the
text goes on, whether or not its tokens were proposed, so plain passes teach as well as verifications.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from triforce_tree.policy.estimates import Ratio

LONGEST = 64
"""Matching tokens are counted up to this number, and no more tokens are proposed after a match."""
FORCED = 1_000_000
"""The number of tokens in common that stands for tokens which a grammar forces."""
EXPECTED = {2: 0.3, 3: 0.45, 4: 0.55, 6: 0.65, 8: 0.8, 16: 0.93, 32: 0.97, LONGEST: 0.99, FORCED: 0.9}
"""The expected acceptance of the token after a match of at least so many tokens."""
# Its weight in judged tokens.
_WEIGHT = 8.0
_LENGTHS = list(EXPECTED)
# The share of the evidence that each judged token leaves.
_KEPT = 0.97
LEAST = 0.1
"""A matched token is proposed if all tokens up to it are accepted with this probability at least."""


class TextMatches:
    """What followed the matches of one text.

    Attributes:
        counts: the tokens that followed as they were expected and all that were judged, for each class of
            matches.
        fresh: what is not counted yet: the tokens in common, the number of tokens that followed as expected,
            and whether another one came after them.
    """

    def __init__(self) -> None:
        self.counts = [Ratio(0.0, 0.0) for _ in _LENGTHS]
        self.fresh: list[tuple[int, int, bool]] = []

    def learn(self) -> list[tuple[int, int, int]]:
        """Counts what is fresh, and returns it: classes, the tokens that followed, and those judged."""
        found = [each for result in self.fresh for each in _by_class(*result)]
        self.fresh.clear()
        _add(self.counts, found)
        return found


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a sequence, or tokens that must follow by its grammar.

    Attributes:
        end: the position after the occurrence.
        common: the number of tokens before ``end`` that equal the end of the sequence; 0 without an
            occurrence, and ``FORCED`` for forced tokens.
        text: what followed earlier matches of this sequence.
        forced: the tokens that must follow.
    """

    end: int
    common: int
    text: TextMatches
    forced: Sequence[int] = ()

    @property
    def most(self) -> int:
        """Returns the most tokens to propose."""
        return len(self.forced) or LONGEST


class MatchedTokens:
    """Estimates the acceptance of matched tokens, for classes of matches: those of at least so many tokens.

    What a text has shown counts before what all texts have shown together, and this before what is expected
    of any text. Later tokens count more than earlier ones.
    """

    def __init__(self) -> None:
        self._all = [Ratio(expected, _WEIGHT) for expected in EXPECTED.values()]

    def learn(self, text: TextMatches) -> None:
        """Takes the fresh results of a text into account."""
        _add(self._all, text.learn())

    def after(self, match: Match | None, most: int) -> list[float]:
        """Returns the expected tokens, the bonus token included, if 0, 1, 2, ... tokens are proposed after a
        match. The last entry is for the most tokens that are worth proposing, at most ``most``.
        """
        tokens = [1.0]
        if match is None or not match.common:
            return tokens
        accepted, common = 1.0, match.common
        last, a = -1, 0.0
        for _ in range(min(most, match.most)):
            if (number := _class_of(common)) != last:
                last, a = number, self._acceptance(match.text, number)
            accepted *= a
            if accepted < LEAST and len(tokens) > 1:
                break
            tokens.append(tokens[-1] + accepted)
            common += 1
        return tokens

    def _acceptance(self, text: TextMatches, number: int) -> float:
        own = text.counts[number]
        return (own.found + _WEIGHT * self._all[number].value) / (own.tried + _WEIGHT)


def _add(counts: Sequence[Ratio], found: Sequence[tuple[int, int, int]]) -> None:
    for number, followed, judged in found:
        counts[number].keep(_KEPT**judged)
        counts[number].add(followed, judged)


def _by_class(common: int, right: int, wrong: bool) -> Iterator[tuple[int, int, int]]:
    """Yields the class, the tokens that followed and the tokens that were judged, where after a match
    ``right`` tokens followed as expected and then, if ``wrong``, another one came.
    """
    at, end = common, common + right
    while at < end or wrong:
        number = _class_of(at)
        until = min(end, _LENGTHS[number + 1]) if number + 1 < len(_LENGTHS) else end
        missed = wrong and until == end and _class_of(end) == number
        yield number, until - at, until - at + missed
        at, wrong = until, wrong and not missed


def _class_of(common: int) -> int:
    """Returns the class of a match's length."""
    return max(0, bisect_right(_LENGTHS, common) - 1)
