"""Attention on the CPU to rows in host memory, which then need not cross the bus.

Queries go to the host, and a state comes back: T rows of output and their log-sum-exp, instead of the keys
and values. ``kernels/cpu/host_rows.py`` computes it.
"""

import time
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels import exchange
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.cpu import host_rows
from triforce_tree.kernels.cpu.host_rows import State
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.models.hf_model import HFModel


def check_host_attention(model: HFModel) -> None:
    """Raise ValueError where the CPU cannot attend for this model."""
    if model.has_softcap:
        raise ValueError(
            f"{model.name} caps its attention scores, which attention on the CPU cannot; leave "
            "host_attention out"
        )
    if model.device.type == "cuda" and not host_rows.native(model.heads, model.dtype):
        raise ValueError(
            "attention on the CPU needs a processor with AVX2, a C compiler, a model in bf16 or fp16, and "
            f"heads of a multiple of 32 up to 256; {model.name} has {model.dtype} and heads of "
            f"{model.heads.dim}; leave host_attention out"
        )


def host_attends(model: HFModel, wanted: bool | str) -> bool:
    """Whether the CPU attends to rows of this model in host memory.

    Args:
        wanted: True, False, or "auto" for where it pays: with a kernel of our own, and without capped scores.

    Raises:
        ValueError: it is to, but cannot.
    """
    if wanted == "auto":
        return not model.has_softcap and host_rows.native(model.heads, model.dtype)
    if wanted:
        check_host_attention(model)
    return bool(wanted)


class _Exchange(NamedTuple):
    """Page-locked memory for the queries of one shape and their states, and the states on the device.

    ``out`` and ``lse`` are views of ``words``, ``near_out`` and ``near_lse`` those of ``near``.
    """

    q: Tensor
    words: Tensor
    out: Tensor
    lse: Tensor
    near: Tensor
    near_out: Tensor
    near_lse: Tensor


class HostAttention:
    """Attends on the host for queries on the device: ``ask``, then anything else, then ``states``.

    One question at a time, answered in a lane beside the computation: whoever asks the device for a whole
    pass ahead has asked the host for its part as well. Off the GPU each question is answered at once.

    Args:
        heads: of the attention.
        device: where queries are and states go.
        dtype: of queries, rows and outputs.
        questions: of a pass, for each layer and text.

    Attributes:
        bytes, seconds: keys and values attended to so far, and the time of that.
    """

    def __init__(self, heads: Heads, device: torch.device, dtype: torch.dtype, questions: int) -> None:
        self.heads, self.device, self.dtype = heads, device, dtype
        self.memory = HostMemory(locked=device.type == "cuda")
        self.bytes = 0
        # A pass that broke off may have left its own behind.
        self._kernel = host_rows.kernel(heads, dtype, 2 * questions)
        self._torch_seconds = 0.0
        self._copy_stream = CopyStream(device)
        self._shapes: dict[tuple[int, int], _Exchange] = {}
        self._asked: _Exchange | None = None

    @property
    def seconds(self) -> float:
        return self._torch_seconds if self._kernel is None else self._kernel.seconds

    def ask(self, q: Tensor, rows: Sequence[Tensor], scale: float) -> None:
        """Let queries come to the host, behind what was asked of the device so far, and attend to rows.

        What is read and written here for one layer the device is done with when the next layer's queries
        come: they are computed from these states.

        Args:
            q: ``[B, T, H_q, D]``.
            rows: of each text, ``[n, 2, H_kv, D]``; there may be none.
            scale: of the scores.
        """
        batch, queries = q.shape[:2]
        if (batch, queries) not in self._shapes:
            self._shapes[batch, queries] = self._exchange(batch, queries)
        asked = self._asked = self._shapes[batch, queries]
        # By then rows that were on their way to the host are there: a pass begins behind them.
        self._copy_stream.copy(asked.q, q)
        for b, own in enumerate(rows):
            self._answer(asked.q[b], own, scale, asked.out[b], asked.lse[b])
            self.bytes += own.nbytes
        with self._copy_stream.running():
            exchange.fetch_words(asked.near, asked.words)

    def _answer(self, q: Tensor, rows: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        if self._kernel is not None:
            self._copy_stream.call(*self._kernel.call(q, rows, scale, out, lse))
            return
        start = time.perf_counter()
        for target, made in zip((out, lse), host_rows.attend(q, rows, scale), strict=True):
            target.copy_(made)
        self._torch_seconds += time.perf_counter() - start

    def states(self) -> State:
        """What was asked for.

        Returns:
            on the device, until the next question: out ``[B, T, H_q, D]`` and lse ``[B, T, H_q]`` in fp32,
            -inf for a text without rows.
        """
        asked, self._asked = self._asked, None
        assert asked is not None, "nothing was asked"
        self._copy_stream.join()
        return asked.near_out, asked.near_lse

    def _exchange(self, batch: int, queries: int) -> _Exchange:
        shape = (batch, queries, self.heads.query, self.heads.dim)
        count, size = prod(shape[:3]), prod(shape) * self.dtype.itemsize
        # Whole words of 4 bytes, and the fp32 part at a multiple of 16.
        start = -(-size // 16) * 4

        def parts(words: Tensor) -> State:
            out = words[:start].view(self.dtype)[: prod(shape)].view(shape)
            return out, words[start:].view(torch.float32).view(shape[:3])

        words = self.memory.take((start + count,), torch.int32)
        near = torch.empty(start + count, dtype=torch.int32, device=self.device)
        return _Exchange(self.memory.take(shape, self.dtype), words, *parts(words), near, *parts(near))

    def close(self) -> None:
        """Give the host memory back. A question that a pass left behind still reads rows: it ends first."""
        self._copy_stream.synchronize()
        self._shapes = {}
        self.memory.release()
