"""Random numbers that depend only on a sequence's seed and a token's position.

The token at a position is argmax(probs / noise), where the Exp(1) noise depends only on the seed and the
position (the Gumbel-max trick). At every node the target chooses a token in this way, and a drafted token is
accepted if it is the chosen one. So the emitted text follows the target's distribution, and does not depend
on the drafter, the division into passes, or the other sequences of the batch. The draft and the retrieval
model choose by the same noise. At total variation distance d from the target they choose the same token with
probability at least (1 - d) / (1 + d), where independent draws accepted by the ratio of probs have 1 - d
(Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels import step
from triforce_tree.kernels.cpu.fp32.noise import fill_exponential
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.sampling import Stream, derived


def fill_noise(out: Tensor, generator: torch.Generator, seed: int, position: int) -> None:
    """Fills fp32 ``[V]`` with the noise of a position; the generator's state is replaced."""
    generator.manual_seed(derived(seed, Stream.POSITION, position))
    fill_exponential(out, generator)


class Seeded:
    """Holds the noise of the next positions of each sequence with a seed, and makes :class:`SeededNoise`.

    Args:
        state: the sequences.
        vocabulary: V.

    Attributes:
        exponential: fp32 ``[B, R, V]``, where index p mod R has the noise of position p. A pass, one run of
            drafting and verification, chooses tokens at no more than R positions.
        seeded: bool ``[B]``, whether each sequence has a seed. The others use the noise of :class:`Noise`.
    """

    def __init__(self, state: SequenceState, vocabulary: int) -> None:
        rows = state.max_draft_tokens + state.extra + 1
        self.exponential = torch.ones(state.batch, rows, vocabulary, dtype=torch.float32, device=state.device)
        self.seeded = torch.zeros(state.batch, dtype=torch.bool, device=state.device)
        self._seeds: list[int | None] = [None] * state.batch
        self._filled = [0] * state.batch
        self._generator = torch.Generator(state.device)

    def __call__(
        self, batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device
    ) -> "SeededNoise":
        return SeededNoise(self, batch, rows, vocabulary, uniforms, device)

    def clear(self) -> None:
        """Removes the seeds of all sequences."""
        for index in range(len(self._seeds)):
            self.begin(index, None)

    def begin(self, index: int, seed: int | None) -> None:
        """Sets the seed (None for no seed) of a sequence that begins at this batch index."""
        if (self._seeds[index] is None) != (seed is None):
            self.seeded[index].fill_(seed is not None)
        self._seeds[index], self._filled[index] = seed, 0

    def fill(self, lengths: Sequence[int | None]) -> None:
        """Draws the noise of all positions that the next pass may decide on.

        Args:
            lengths: number of tokens of each sequence; None for one that has ended.
        """
        rows = self.exponential.shape[1]
        for index, (length, seed) in enumerate(zip(lengths, self._seeds, strict=True)):
            if length is None or seed is None:
                continue
            for position in range(max(length, self._filled[index]), length + rows):
                fill_noise(self.exponential[index, position % rows], self._generator, seed, position)
            self._filled[index] = length + rows

    def at(self, positions: Tensor) -> Tensor:
        """Returns the noise, fp32 ``[B, N, V]``, of the tokens at int64 ``[B, N]`` positions."""
        rows = (positions % self.exponential.shape[1])[..., None]
        return self.exponential.gather(1, rows.expand(-1, -1, self.exponential.shape[2]))


class SeededNoise(Noise):
    """Makes random decisions by position for sequences with a seed, and like :class:`Noise` for others.

    Args:
        source: has the noise by position.
        batch, rows, vocabulary, uniforms, device: see :class:`Noise`.
    """

    def __init__(
        self, source: Seeded, batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device
    ) -> None:
        super().__init__(batch, rows, vocabulary, uniforms, device)
        self._source = source
        self._positions: Tensor

    def align(self, positions: Tensor) -> None:
        self._positions = positions

    def traverse_tree(
        self, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        drawn = super().traverse_tree(tokens, parents, p, q, q_rows, depth)
        noise = self._source.at(self._positions)
        best = torch.div(p, noise, out=noise).argmax(-1)
        decided = step.accept_greedy(tokens, parents, best, depth)
        path, count, last = (
            torch.where(self._source.seeded.view(-1, *[1] * (other.ndim - 1)), seeded, other)
            for seeded, other in zip(decided, drawn, strict=True)
        )
        return path, count, last

    def expand_nodes(
        self, logits: Tensor, temperature: Tensor | None, probs: Tensor, count: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        if not self.exponential.numel():
            return super().expand_nodes(logits, temperature, probs, count, first)
        exponential = self._mixed(slice(first, first + probs.shape[1]))
        return step.expand_nodes(logits, temperature, exponential, probs, count)

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        if not self.exponential.numel():
            return super().second_choice(probs, chosen)
        return step.second_choice(probs, chosen, self._mixed(slice(None)))

    def _mixed(self, rows: slice) -> Tensor:
        """Returns fp32 ``[B, rows, V]``: noise by position for sequences with a seed, else redrawn noise."""
        noise = self._source.at(self._positions[:, rows])
        return torch.where(self._source.seeded[:, None, None], noise, self.exponential[:, rows])
