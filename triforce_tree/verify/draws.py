"""Holds the random number generators of a batch, and derives their seeds."""

from collections.abc import Sequence

import torch

from triforce_tree.verify.sampling import Stream, derived
from triforce_tree.verify.seeded import Seeded


def sequence_seed(seed: int, number: int) -> int:
    """Returns the seed of sequence ``number`` in a batch with ``seed``; sequence 0 keeps ``seed`` itself."""
    return derived(seed, Stream.ROW, number) if number else seed


class Draws:
    """Holds the generators of a batch, either one for all sequences or one per batch index.

    Args:
        seed: seed of the batch.
        attempt: number of earlier attempts at the same sequences; each attempt draws new random numbers.
        count: number of generators: 1, or the batch size. If there are several, :meth:`begin` must be called
            for each batch index.
        device: device of the random numbers.
        seeded: draws random numbers that depend only on a sequence's own seed and the position; None if no
            sequence has a seed of its own.
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
        first = derived(seed, Stream.ATTEMPT, attempt)
        self.generators = [torch.Generator(device).manual_seed(first) for _ in range(count)]

    def begin(self, index: int, number: int, seed: int | None = None) -> None:
        """Starts the random numbers of a sequence that begins at this batch index.

        Args:
            number: number of the sequence in the batch, which its numbers depend on if it has no seed.
            seed: seed of the sequence itself, or None.
        """
        if len(self.generators) > 1:
            own = sequence_seed(self._seed, number)
            self.generators[index].manual_seed(derived(own, Stream.ATTEMPT, self._attempt))
        if self._seeded is not None:
            self._seeded.begin(index, seed)

    def before_pass(self, lengths: Sequence[int | None]) -> None:
        """Draws the random numbers of sequences with a seed of their own; see ``Seeded.fill``."""
        if self._seeded is not None:
            self._seeded.fill(lengths)
