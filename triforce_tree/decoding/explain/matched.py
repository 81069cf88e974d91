"""Counts of passes that verified matched tokens in place of a tree, by class of match length."""

from dataclasses import asdict, dataclass
from typing import Any

from triforce_tree.decoding.choice.lookup_choice import match_class
from triforce_tree.decoding.loop import Decoder
from triforce_tree.drafters.suffix_index import LONGEST


@dataclass
class MatchCounts:
    """Passes of one class of match length.

    Attributes:
        least, most: tokens that a match of this class has in common with the text's end; of ``LONGEST`` and
            more no more are counted.
        expected: estimated probability that a matched token is accepted whose predecessors were, after the
            last pass.
        passes: that were made.
        proposed, accepted: matched tokens.
        judged: accepted tokens and first rejected ones: later ones were not judged.
        tokens: new ones that these passes brought, the target's own included, up to the end of the sequence.
    """

    least: int
    most: int
    expected: float
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    judged: int = 0
    tokens: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of the judged tokens that was accepted; None without any."""
        return self.accepted / self.judged if self.judged else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "acceptance": self.acceptance}


@dataclass(frozen=True)
class MatchedPasses:
    """Passes that verified matched tokens.

    Attributes:
        setting: the entries of ``other_trees`` that allow them.
        by_length: their counts, all classes of match length, the shortest matches first.
    """

    setting: str
    by_length: list[MatchCounts]

    @property
    def passes(self) -> int:
        return sum(counts.passes for counts in self.by_length)

    @property
    def tokens(self) -> int:
        """New tokens that they brought."""
        return sum(counts.tokens for counts in self.by_length)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "setting": self.setting,
            "passes": self.passes,
            "tokens": self.tokens,
            "by_match_length": [counts.as_dict() for counts in self.by_length],
        }


class MatchTally:
    """Counts of one sequence.

    Args:
        decoder: of that sequence.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._made = decoder, 0
        self._counts: dict[int, MatchCounts] = {}
        if decoder.lookup is not None:
            expected = decoder.lookup.acceptance.by_class
            ends = [*(least - 1 for least in sorted(expected)[1:]), LONGEST]
            self._counts = {
                least: MatchCounts(least, most, expected[least])
                for least, most in zip(sorted(expected), ends, strict=True)
            }

    def add(self, tokens: int) -> None:
        """Count the last pass, which brought so many new tokens; call it after each pass."""
        decoder, lookup = self._decoder, self._decoder.lookup
        if lookup is None:
            return
        made = sum(count for kind, count in decoder.passes.items() if decoder.controller.matched(kind))
        if made == self._made:
            return
        self._made = made
        [(match, proposed)] = lookup.taken
        assert match is not None, "such a pass is made for a match"
        accepted = min(decoder.report[0][0] - 1, proposed)
        counts = self._counts[match_class(match)]
        counts.passes += 1
        counts.proposed += proposed
        counts.accepted += accepted
        counts.judged += accepted + int(accepted < proposed)
        counts.tokens += tokens

    def found(self, setting: str) -> MatchedPasses | None:
        """What was counted; None where passes have no matched tokens."""
        lookup = self._decoder.lookup
        if lookup is None:
            return None
        for least, expected in lookup.acceptance.by_class.items():
            self._counts[least].expected = expected
        return MatchedPasses(setting, list(self._counts.values()))
