"""What a search for settings is to measure, and who hears of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triforce_tree.eval.results import Record
from triforce_tree.runtime.stats import Progress
from triforce_tree.tune.search import GRID, Coordinate

# Tokens between the places of a text that generations begin at.
_APART = 2048


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        contexts, temperatures: an entry for each pair of them.
        new_tokens: of each generation.
        places: generations of each setting, behind different places near the end of a context.
        seconds: when to begin nothing new; None for never.
        seed: of all draws.
        fixed: options that stay as the engine has them.
        grid: what to try.
    """

    contexts: Sequence[int]
    temperatures: Sequence[float]
    new_tokens: int = 128
    places: int = 3
    seconds: float | None = None
    seed: int = 0
    fixed: frozenset[str] = frozenset()
    grid: Sequence[Coordinate] = field(default=GRID)

    def starts(self, context: int) -> list[int]:
        """Where generations begin."""
        apart = min(_APART, context // (4 * self.places))
        return [context - number * apart for number in range(self.places)]


@dataclass
class Watch:
    """What the search tells while it runs, and who may end it.

    ``says``: what is being measured. ``measured``: hears of each new measurement. ``reading``: gives a
    progress callback for so many tokens. ``wanted``: asked before each generation.
    """

    says: Callable[[str], None] = lambda text: None
    measured: Callable[[Record], None] = lambda record: None
    reading: Callable[[int], Progress | None] = lambda tokens: None
    wanted: Callable[[], bool] = lambda: True
