"""The random number generators of a batch."""

import torch

from triforce_tree.verify.sampling import Stream, derived


def sequence_seed(seed: int, number: int) -> int:
    """The seed of a sequence's draws in a batch with this seed; the first one draws as it would alone."""
    return derived(seed, Stream.ROW, number) if number else seed


class Draws:
    """One generator for all sequences of a batch, or one for each row.

    Args:
        seed: of the batch.
        attempt: number of earlier attempts at the same sequences; each draws new random numbers.
        count: of generators: 1, or one for each row; the rows hold the first sequences.
        device: of the numbers.
    """

    def __init__(self, seed: int, attempt: int, count: int, device: torch.device) -> None:
        self._seed, self._attempt = seed, attempt
        self.generators = [torch.Generator(device) for _ in range(count)]
        for row, generator in enumerate(self.generators):
            generator.manual_seed(self._of(row))

    def begin(self, row: int, number: int) -> None:
        """Let a row have the draws of sequence ``number`` from its beginning on, if it has any of its own."""
        if len(self.generators) > 1:
            self.generators[row].manual_seed(self._of(number))

    def _of(self, number: int) -> int:
        return derived(sequence_seed(self._seed, number), Stream.ATTEMPT, self._attempt)
