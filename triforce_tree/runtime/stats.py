"""Statistics of each level (draft, retrieval, target): counts, times, acceptance rate, accepted length."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Progress = Callable[[int], None]
"""A callback that receives the number of tokens, or bytes, that were just processed."""


def rate_text(rate: float) -> str:
    """Formats a rate per second without rounding small rates to zero."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


@dataclass
class LevelStats:
    """Counts of one level (draft, retrieval or target) since generation began.

    Attributes:
        forwards: number of forwards.
        proposed: sum of the depths of the verified trees, which is the most tokens that could be accepted.
        accepted: number of accepted tokens.
        emitted: number of accepted tokens plus one token per verification. For the target, tokens after the
            end of a sequence are not counted.
        seconds: time of this level alone.
    """

    name: str
    forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    seconds: float = 0.0

    def add(self, forwards: int, proposed: int, accepted: int, emitted: int, seconds: float) -> None:
        """Adds the counts and seconds of one pass."""
        self.forwards += forwards
        self.proposed += proposed
        self.accepted += accepted
        self.emitted += emitted
        self.seconds += seconds

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Returns the emitted tokens per forward, including the bonus token."""
        return self.emitted / self.forwards if self.forwards else None

    def as_dict(self) -> dict[str, Any]:
        rates = {
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
        }
        return {**asdict(self), **rates}


def added(before: Sequence[LevelStats], now: Sequence[LevelStats]) -> list[LevelStats]:
    """Returns the sums of the statistics of two runs, by level."""
    sums = {level.name: replace(level) for level in before}
    for level in now:
        if level.name in sums:
            sums[level.name].add(level.forwards, level.proposed, level.accepted, level.emitted, level.seconds)
        else:
            sums[level.name] = level
    return list(sums.values())
