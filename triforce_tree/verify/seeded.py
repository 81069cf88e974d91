"""Random numbers that are a function of a sequence's seed and of the position of a token.

The token at a position is the argmax of probs / noise, with Exp(1) noise from the seed and the position
alone (the Gumbel-max trick). The target decides so at every node, and drafted tokens are accepted where they
are the token that it decides on: the emitted text follows the target's distribution whatever was proposed,
and is the same whatever drafted it, in which passes, and beside which other sequences. The draft and the
retrieval level take the largest probs / noise by the same noise, so that they propose what the target decides
on with probability at least (1 - d) / (1 + d) at total variation distance d, where drawing apart and
accepting by the ratio of probs has 1 - d (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels import step
from triforce_tree.kernels.cpu.fp32.noise import fill_exponential
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.sampling import Stream, derived


class Seeded:
    """The noise of the next positions of each sequence that has a seed; a factory of :class:`SeededNoise`.

    Args:
        state: the sequences.
        vocabulary: V.

    Attributes:
        exponential: fp32 ``[B, R, V]``; that of position p is in row p mod R. A pass decides on at most R
            positions.
        seeded: bool ``[B]``, which sequences have a seed. The others draw as without this module.
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
        """No sequence has a seed."""
        for row in range(len(self._seeds)):
            self.begin(row, None)

    def begin(self, row: int, seed: int | None) -> None:
        """Let a row hold a sequence with this seed, or without one."""
        self._seeds[row], self._filled[row] = seed, 0
        self.seeded[row] = seed is not None

    def fill(self, lengths: Sequence[int | None]) -> None:
        """Draw what the next pass needs.

        Args:
            lengths: tokens of each sequence; None for one that has ended.
        """
        rows = self.exponential.shape[1]
        for row, (length, seed) in enumerate(zip(lengths, self._seeds, strict=True)):
            if length is None or seed is None:
                continue
            for position in range(max(length, self._filled[row]), length + rows):
                self._generator.manual_seed(derived(seed, Stream.POSITION, position))
                fill_exponential(self.exponential[row, position % rows], self._generator)
            self._filled[row] = length + rows

    def at(self, positions: Tensor) -> Tensor:
        """Noise of the tokens at int64 ``[B, N]`` positions, fp32 ``[B, N, V]``."""
        rows = (positions % self.exponential.shape[1])[..., None]
        return self.exponential.gather(1, rows.expand(-1, -1, self.exponential.shape[2]))


class SeededNoise(Noise):
    """The random decisions of one stage: by position for sequences with a seed, as :class:`Noise` otherwise.

    Args:
        source: the noise by position.
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
            torch.where(self._source.seeded.view(-1, *[1] * (other.ndim - 1)), own, other)
            for own, other in zip(decided, drawn, strict=True)
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
        """fp32 ``[B, rows, V]``, by position in sequences with a seed."""
        noise = self._source.at(self._positions[:, rows])
        return torch.where(self._source.seeded[:, None, None], noise, self.exponential[:, rows])
