"""Makes the random decisions of drafting and verification on the device."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.kernels import step
from triforce_tree.kernels.cpu.fp32.noise import fill_exponential
from triforce_tree.runtime.token_ids import id_tensor


class Noise:
    """Makes the random decisions of one stage from numbers that are redrawn before each run of the stage.

    A stage is one captured step of decoding, such as drafting or verification by the target. Stages make
    random decisions only through these methods, so a class that overrides them, passed to
    :class:`~triforce_tree.decoding.program.DecodingProgram`, replaces the source of randomness.

    Args:
        batch: B, the number of sequences.
        rows: number of distributions per sequence that one run draws tokens from; 0 for greedy decoding.
        vocabulary: V.
        uniforms: most nodes of a verified tree; 0 if the stage verifies nothing.
        device: device of the buffers.

    Attributes:
        capturable: whether a stage with this noise may run as a CUDA graph.
        exponential: fp32 ``[B, rows, V]``, Exp(1): argmax(probs / exponential) is a draw from probs.
        uniform: fp32 ``[B, uniforms]`` in [0, 1).
        still: the batch indices whose ``exponential`` is 1, so that the most probable tokens are drawn.
    """

    capturable = True

    def __init__(self, batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device) -> None:
        self.exponential = torch.ones(batch, rows, vocabulary, dtype=torch.float32, device=device)
        self.uniform = torch.zeros(batch, uniforms, dtype=torch.float32, device=device)
        self.still: Collection[int] = ()
        self._were_still: set[int] = set()
        self._still_rows: Tensor

    def draw(self, generator: torch.Generator) -> None:
        """Redraws the numbers for the next run."""
        if self.exponential.numel():
            fill_exponential(self.exponential, generator)
        if self.uniform.numel():
            self.uniform.uniform_(generator=generator)
        self._set_still()

    def draw_rows(self, generators: Sequence[torch.Generator]) -> None:
        """Redraws the numbers of each sequence b from ``generators[b]``, as in a batch of one."""
        for b, generator in enumerate(generators):
            if self.exponential.numel():
                fill_exponential(self.exponential[b], generator)
            if self.uniform.numel():
                self.uniform[b].uniform_(generator=generator)
        self._set_still()

    def _set_still(self) -> None:
        if not self.still:
            return
        if self._were_still != set(self.still):
            self._were_still = set(self.still)
            self._still_rows = id_tensor([*self._were_still], self.exponential.device)
        self.exponential.index_fill_(0, self._still_rows, 1)

    def align(self, positions: Tensor) -> None:
        """Sets the positions of the next decisions. Noise that does not depend on positions ignores it.

        Args:
            positions: int64 ``[B, N]``, the position of the token after each node of the tree that is grown
                or verified.
        """

    def traverse_tree(
        self, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accepts nodes of a tree of at most ``uniforms`` nodes by ``kernels.step.traverse_tree``."""
        return step.traverse_tree(tokens, parents, p, q, q_rows, self.uniform, self.exponential[:, 0], depth)

    def expand_nodes(
        self, logits: Tensor, temperature: Tensor | None, probs: Tensor, count: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Draws children by ``kernels.step.expand_nodes``, with the noise ``exponential[:, first:]``."""
        exponential = (
            self.exponential[:, first : first + probs.shape[1]] if self.exponential.numel() else None
        )
        return step.expand_nodes(logits, temperature, exponential, probs, count)

    def second_choice(self, probs: Tensor, chosen: Tensor) -> Tensor:
        """Chooses runner-ups by ``kernels.step.second_choice``."""
        return step.second_choice(probs, chosen, self.exponential if self.exponential.numel() else None)


class NoiseFactory(Protocol):
    """Makes the noise of a stage; see :class:`Noise` for the arguments."""

    def __call__(
        self, batch: int, rows: int, vocabulary: int, uniforms: int, device: torch.device
    ) -> Noise: ...
