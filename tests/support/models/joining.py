"""Prompts that join a batch while it runs."""

from collections.abc import Iterable

from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput


class Coming:
    """Prompts that join as soon as there is room, in their order.

    Args:
        waiting: the prompts.
        rows: sequences that are decoded together.
        tokens: see ``Joining``.

    Attributes:
        outputs: of all sequences of the batch, by number.
        refused: how often the next prompt did not fit.
    """

    def __init__(self, waiting: Iterable[Joined], rows: int, tokens: int | None = None) -> None:
        self.waiting, self.rows, self.tokens = list(waiting), rows, tokens
        self.outputs: dict[int, GenerateOutput] = {}
        self.refused = 0

    def wanted(self, fits: Fits) -> int:
        return self.rows if self.waiting and self._fits(fits) else 0

    def next(self, fits: Fits) -> Joined | None:
        if not self.waiting:
            return None
        if not self._fits(fits):
            self.refused += 1
            return None
        return self.waiting.pop(0)

    def ended(self, number: int, output: GenerateOutput) -> None:
        self.outputs[number] = output

    def new(self, number: int) -> list[int]:
        """Returns the new tokens of a sequence."""
        out = self.outputs[number]
        tokens: list[int] = out.sequences[0, -out.new_tokens :].tolist()
        return tokens

    @property
    def texts(self) -> list[list[int]]:
        """Returns the new tokens of all sequences, by number."""
        return [self.new(number) for number in range(len(self.outputs))]

    def _fits(self, fits: Fits) -> bool:
        return fits(list(self.waiting[0].prompt), self.waiting[0].new_tokens)
