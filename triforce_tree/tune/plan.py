"""What a search for settings measures, and its callbacks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triforce_tree.eval.results import Record
from triforce_tree.runtime.stats import Progress
from triforce_tree.tune.search import GRID, Coordinate

# Tokens between the positions of a text at which generations begin.
_APART = 2048


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        contexts, temperatures: an entry for each pair of them.
        new_tokens: of each generation.
        places: generations for each setting, at different positions near the end of a context.
        seconds: after which no measurement is started; None for no limit.
        seed: of all draws.
        fixed: options that are not varied.
        grid: values to try.
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
        """Positions at which generations begin."""
        apart = min(_APART, context // (4 * self.places))
        return [context - number * apart for number in range(self.places)]


@dataclass
class Watch:
    """Callbacks of the search.

    ``says``: called with what is being measured. ``measured``: called with each new measurement. ``reading``:
    makes a progress callback for the prefill of so many tokens. ``wanted``: whether to continue, called
    before each generation.
    """

    says: Callable[[str], None] = lambda text: None
    measured: Callable[[Record], None] = lambda record: None
    reading: Callable[[int], Progress | None] = lambda tokens: None
    wanted: Callable[[], bool] = lambda: True
