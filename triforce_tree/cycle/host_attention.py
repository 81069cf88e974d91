"""Attention on the CPU to rows in host memory, which then need not cross the bus.

Queries go to the host, and a state comes back: T rows of output and their log-sum-exp, instead of the keys
and values. ``kernels/host_rows.py`` computes it.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce_tree.cycle.pinned import HostMemory
from triforce_tree.hf_model import HFModel
from triforce_tree.kernels import exchange, host_rows
from triforce_tree.kernels.host_rows import State
from triforce_tree.kernels.plan import Heads


def check_host_attention(model: HFModel) -> None:
    """Raise ValueError where the CPU cannot attend for this model."""
    if model.has_softcap:
        raise ValueError(
            f"{model.name} caps its attention scores, which attention on the CPU cannot; leave "
            "host_attention out"
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

    One question at a time, answered on a thread of its own, so that meanwhile the caller can ask the device
    for its part: in a layer that is dozens of pieces. Off the GPU the same happens without a bus.

    Args:
        heads: of the attention.
        device: where queries are and states go.
        dtype: of queries, rows and outputs.

    Attributes:
        bytes, seconds: keys and values attended to so far, and the time of that.
    """

    def __init__(self, heads: Heads, device: torch.device, dtype: torch.dtype) -> None:
        self.heads, self.device, self.dtype = heads, device, dtype
        on_gpu = device.type == "cuda"
        self.memory = HostMemory(locked=on_gpu)
        self.bytes, self.seconds = 0, 0.0
        self._attend = host_rows.fastest(heads, dtype)
        self._shapes: dict[tuple[int, int], _Exchange] = {}
        self._asked: tuple[_Exchange, Future[None]] | None = None
        self._arrived: Any = torch.cuda.Event() if on_gpu else None
        self._thread = ThreadPoolExecutor(1, "host-attention")

    def ask(self, q: Tensor, rows: Sequence[Tensor], scale: float) -> None:
        """Let queries come to the host, behind what was asked of the device so far, and attend to rows.

        What the host reads and writes here for one layer the device is done with when the next layer's
        queries arrive: they are computed from these states.

        Args:
            q: ``[B, T, H_q, D]``.
            rows: of each text, ``[n, 2, H_kv, D]``; there may be none.
            scale: of the scores.
        """
        self._wait()
        batch, queries = q.shape[:2]
        if (batch, queries) not in self._shapes:
            self._shapes[batch, queries] = self._exchange(batch, queries)
        asked = self._shapes[batch, queries]
        asked.q.copy_(q, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._asked = asked, self._thread.submit(self._answer, asked, rows, scale)

    def states(self) -> State:
        """What was asked for.

        Returns:
            on the device, until the next call: out ``[B, T, H_q, D]`` and lse ``[B, T, H_q]`` in fp32, -inf
            for a text without rows.
        """
        assert self._asked is not None, "nothing was asked"
        asked, answered = self._asked
        answered.result()
        self._asked = None
        exchange.fetch_words(asked.near, asked.words)
        return asked.near_out, asked.near_lse

    @torch.inference_mode()
    def _answer(self, asked: _Exchange, rows: Sequence[Tensor], scale: float) -> None:
        if self._arrived is not None:
            # So have rows that were on their way to the host: a pass begins behind them.
            self._arrived.synchronize()
        start = time.perf_counter()
        kv, group = self.heads.kv, self.heads.group
        for b, own in enumerate(rows):
            if not own.shape[0]:
                asked.out[b].zero_()
                asked.lse[b].fill_(-torch.inf)
                continue
            q = asked.q[b].unflatten(1, (kv, group)).permute(1, 2, 0, 3)  # [H_kv, group, T, D]
            out, lse = self._attend(q.flatten(1, 2), own, scale)
            asked.out[b].unflatten(1, (kv, group)).copy_(out.unflatten(1, (group, -1)).permute(2, 0, 1, 3))
            asked.lse[b].unflatten(1, (kv, group)).copy_(lse.unflatten(1, (group, -1)).permute(2, 0, 1))
            self.bytes += own.nbytes
        self.seconds += time.perf_counter() - start

    def _wait(self) -> None:
        """For an answer that nobody came for, after a fault or Ctrl-C: it still reads rows."""
        if self._asked is not None:
            wait([self._asked[1]])
            self._asked = None

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
        """Give the host memory back; the device must be done with it."""
        self._wait()
        self._thread.shutdown()
        self._shapes = {}
        self.memory.release()
