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
        seeds: of single sequences by number, None for one without; further ones may be appended. Their draws
            follow from the seed and the position alone.
        seeded: where these draws are made; with ``seeds``.
    """

    def __init__(
        self,
        seed: int,
        attempt: int,
        count: int,
        device: torch.device,
        seeds: Sequence[int | None] = (),
        seeded: Seeded | None = None,
    ) -> None:
        self._seed, self._attempt = seed, attempt
        self._seeds, self._seeded = seeds, seeded
        self.generators = [torch.Generator(device) for _ in range(count)]
        for row, generator in enumerate(self.generators):
            generator.manual_seed(self._of(row))
        for row in range(seeded.exponential.shape[0] if seeded is not None else 0):
            self.begin(row, row)

    def begin(self, row: int, number: int) -> None:
        """Let a row have the draws of sequence ``number`` from its beginning on, if it has any of its own."""
        if len(self.generators) > 1:
            self.generators[row].manual_seed(self._of(number))
        if self._seeded is not None:
            self._seeded.begin(row, self._seeds[number] if number < len(self._seeds) else None)

    def before_pass(self, lengths: Sequence[int | None]) -> None:
        """Draw the random numbers of positions; see ``Seeded.fill``."""
        if self._seeded is not None:
            self._seeded.fill(lengths)

    def _of(self, number: int) -> int:
        return derived(sequence_seed(self._seed, number), Stream.ATTEMPT, self._attempt)
