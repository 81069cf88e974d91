"""What each level did: counts, times and the two ratios the papers report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Progress = Callable[[int], None]
"""Called with the number of tokens, or bytes, that were just dealt with."""


@dataclass
class LevelStats:
    """Counts of one level since generation began.

    ``proposed`` counts the depth of every tree put before the level, the most it could have accepted;
    ``emitted`` counts what left it: accepted tokens and the one token that every verification adds; of the
    target only those of the text, not what it verified behind the text's end.
    ``seconds`` is host time in this level alone, without the levels below it.
    """

    name: str
    forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens emitted per forward, the bonus token included."""
        return self.emitted / self.forwards if self.forwards else None

    def as_dict(self) -> dict[str, Any]:
        rates = {
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
        }
        return {**asdict(self), **rates}


def added(before: Sequence[LevelStats], now: Sequence[LevelStats]) -> list[LevelStats]:
    """Sums of two runs, by level."""
    sums = {level.name: level for level in before}
    for level in now:
        if (other := sums.get(level.name)) is not None:
            level = replace(
                level,
                forwards=level.forwards + other.forwards,
                proposed=level.proposed + other.proposed,
                accepted=level.accepted + other.accepted,
                emitted=level.emitted + other.emitted,
                seconds=level.seconds + other.seconds,
            )
        sums[level.name] = level
    return list(sums.values())
