"""The random number generators of a batch."""

from collections.abc import Sequence

import torch

from triforce_tree.verify.sampling import Stream, derived
from triforce_tree.verify.seeded import Seeded


def sequence_seed(seed: int, number: int) -> int:
    """The seed of a sequence's draws in a batch with this seed; the first one draws as it would alone."""
    return derived(seed, Stream.ROW, number) if number else seed


class Draws:
    """One generator for all sequences of a batch, or one for each row, or seeds of sequences.

    Args:
        seed: of the batch.
        attempt: number of earlier attempts at the same sequences; each draws new random numbers.
        count: of generators: 1, or one for each row; the rows hold the first sequences.
        device: of the numbers.
        seeded: makes the draws of sequences with seeds of their own, which follow from the seed and the
            position alone; None where no sequence has one.
    """

    def __init__(
        self,
        seed: int,
        attempt: int,
        count: int,
        device: torch.device,
        seeded: Seeded | None = None,
    ) -> None:
        self._seed, self._attempt = seed, attempt
        self._seeded = seeded
        self.generators = [torch.Generator(device) for _ in range(count)]
        for row, generator in enumerate(self.generators):
            generator.manual_seed(self._of(row))

    def begin(self, row: int, number: int, seed: int | None = None) -> None:
        """Let a row have the draws of sequence ``number``, or of its own seed, from its beginning on."""
        if len(self.generators) > 1:
            self.generators[row].manual_seed(self._of(number))
        if self._seeded is not None:
            self._seeded.begin(row, seed)

    def before_pass(self, lengths: Sequence[int | None]) -> None:
        """Draw the random numbers of positions; see ``Seeded.fill``."""
        if self._seeded is not None:
            self._seeded.fill(lengths)

    def _of(self, number: int) -> int:
        return derived(sequence_seed(self._seed, number), Stream.ATTEMPT, self._attempt)
