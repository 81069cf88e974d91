"""The random decisions of a cycle's stages, without the host."""

from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.kernels import step


class Noise:
    """The random decisions of one stage, from numbers drawn anew before each of its runs.

    Stages decide through the methods alone, so that another class with these methods, handed to
    :class:`~triforce_tree.decoding.program.DecodingProgram`, replaces the source of randomness.

    Args:
        batch: sequences.
        rows: distributions of each that tokens are drawn from in one run; 0 takes the most probable tokens.
        vocabulary: tokens.
        uniforms: nodes of each that may be accepted; 0 where nothing is verified.
        device: where.

    Attributes:
        capturable: whether a stage with this noise may run as a CUDA graph.
        exponential: fp32 ``[B, rows, V]``: Exp(1); the largest probability / race is a draw.
        uniform: fp32 ``[B, uniforms]`` in [0, 1).
    """

    capturable = True

    def __init__(self, batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device) -> None:
        self.exponential = torch.ones(batch, rows, vocabulary, device=device)
        self.uniform = torch.zeros(batch, uniforms, device=device)

    def draw(self, generator: torch.Generator) -> None:
        """New numbers for the next run."""
        if self.exponential.numel():
            self.exponential.exponential_(generator=generator)
        if self.uniform.numel():
            self.uniform.uniform_(generator=generator)

    def accept_tree(
        self, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``kernels.step.accept_tree``; the tree has at most ``uniforms`` nodes."""
        return step.accept_tree(tokens, parents, p, q, q_rows, self.uniform, self.exponential[:, 0], depth)

    def expand_nodes(
        self, logits: Tensor, temperature: Tensor | None, probs: Tensor, count: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See ``kernels.step.expand_nodes``; the frontier reads the rows from ``first`` on."""
        exponential = (
            self.exponential[:, first : first + probs.shape[1]] if self.exponential.numel() else None
        )
        return step.expand_nodes(logits, temperature, exponential, probs, count)

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        """See ``kernels.step.second_choice``."""
        return step.second_choice(probs, chosen, self.exponential if self.exponential.numel() else None)


class NoiseFactory(Protocol):
    """Makes the noise of a stage; see :class:`Noise` for the arguments."""

    def __call__(
        self, batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device
    ) -> Noise: ...
