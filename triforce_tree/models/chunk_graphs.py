"""Forwards of chunks of prompts as CUDA graphs, with attention between them.

The host takes longer to launch the layers of an 8B model for 2,048 tokens than a Hopper GPU takes to compute
them. A lone prompt needs no graphs of longer chunks. A server captures those of all chunks, because its host
has other work while the GPU computes them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.models.running_forward import Attend
from triforce_tree.runtime.executor import CapturedInPieces, Cuts
from triforce_tree.runtime.token_ids import id_tensor

MOST_TOKENS = 4096
"""Most tokens of a chunk that is captured."""
SHORT = 2048
"""Most tokens of a chunk that is captured when it is first needed."""
# Chunks are padded to multiples of so many tokens, each of which has graphs of its own: the rows of a tile of
# cuBLAS.
_TOKENS = 128

Forward = Callable[[Tensor, Tensor, Attend], None]
"""Runs the layers for token ids and positions, int64 ``[1, T]`` each, with an attention function."""


class ChunkGraphs:
    """Runs forwards of chunks that are padded at their end: of short ones, and of longer ones once prepared.

    The padding has no keys or values and takes no part in attention. All other work of the layers is by
    token. Chunks of one padded size have the same bits, whether their forward is captured yet or not.

    Args:
        forward: it does the same work for each chunk of a size, except in the attention function.
        device: a GPU.
    """

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._attend: Attend | None = None
        self._count = 0
        self._cuts = Cuts(lambda: True)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, tuple[Tensor, Callable[[], None]]] = {}
        self._buffers: dict[Any, Tensor] = {}

    def serves(self, tokens: int) -> bool:
        """Returns whether :meth:`run` takes a chunk of so many tokens."""
        return tokens <= SHORT or _padded(tokens) in self._captured

    def run(self, tokens: list[int], positions: Tensor, attend: Attend) -> None:
        """Runs a forward of T tokens.

        Args:
            positions: int64 ``[T]``, increasing by one.
            attend: gets the queries, keys and values of the T tokens.
        """
        count, size = len(tokens), _padded(len(tokens))
        if size not in self._captured:
            self._captured[size] = self._prepared(size)
        inputs, forward = self._captured[size]
        inputs[0, :count].copy_(id_tensor(tokens, self._device))
        inputs[1, :count].copy_(positions)
        self._attend, self._count = attend, count
        try:
            forward()
        except BaseException as problem:
            del self._captured[size]
            # A pool cannot be used again if all its graphs were destroyed.
            self._pool = torch.cuda.graph_pool_handle()
            if not isinstance(problem, torch.OutOfMemoryError):
                raise
            # Memory is short for the graphs; the forward writes all keys and values again.
            self._captured[size] = inputs, (direct := self._direct(inputs))
            direct()
        finally:
            self._attend = None

    def prepare(self) -> None:
        """Captures the graphs of all sizes."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            return v.new_zeros(1, v.shape[2], q.shape[1], v.shape[3])

        for size in range(MOST_TOKENS, 0, -_TOKENS):
            for _ in range(2):
                self.run([0] * size, torch.arange(size, device=self._device), attend)

    def _prepared(self, size: int) -> tuple[Tensor, Callable[[], None]]:
        """Returns buffers for ids and positions, int64 ``[2, T]``, and a forward over them."""
        inputs = torch.zeros(2, size, dtype=torch.int64, device=self._device)
        return inputs, CapturedInPieces(self._direct(inputs), self._cuts, self._device, self._pool)

    def _direct(self, inputs: Tensor) -> Callable[[], None]:
        return lambda: self._forward(inputs[:1], inputs[1:], self._between_graphs)

    def _between_graphs(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        own = [self._buffer(name, part) for name, part in (("q", q), ("k", k), ("v", v))]
        for buffer, part in zip(own, (q, k, v), strict=True):
            buffer.copy_(part)
        out = self._buffer("out", v, heads=q.shape[1]).transpose(1, 2)

        def work() -> None:
            assert self._attend is not None
            new_q, new_k, new_v = (part[:, :, : self._count] for part in own)
            out[:, : self._count] = self._attend(layer, new_q, new_k, new_v, params)

        self._cuts.outside(work)
        return out

    def _buffer(self, name: str, like: Tensor, heads: int | None = None) -> Tensor:
        """Returns a buffer like ``[1, H, T, D]``, in memory by tokens, which all layers share."""
        _, own, size, dim = like.shape
        key = name, heads or own, dim, like.dtype
        if key not in self._buffers:
            shape = 1, MOST_TOKENS, heads or own, dim
            self._buffers[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._buffers[key][:, :size].transpose(1, 2)


def _padded(tokens: int) -> int:
    return -(-tokens // _TOKENS) * _TOKENS
