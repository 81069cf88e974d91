"""Attention on the CPU to keys and values in host memory, which then need not be copied to the device.

Queries are copied to the host, and an attention state comes back: the output of T queries and their
log-sum-exp, instead of keys and values. ``kernels/cpu/offload_attention.py`` computes it.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels import exchange
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.cpu import offload_attention
from triforce_tree.kernels.cpu.offload_attention import State
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.models.hf_model import HFModel


def check_host_attention(model: HFModel) -> None:
    """Raises ValueError if the CPU cannot attend for this model."""
    if model.has_softcap:
        raise ValueError(
            f"{model.name} caps its attention scores, which attention on the CPU cannot do; leave "
            "host_attention out"
        )
    if model.device.type == "cuda" and not offload_attention.native(model.heads, model.dtype):
        raise ValueError(
            "attention on the CPU needs a processor with AVX2, a C compiler, a model in bf16 or fp16, and "
            f"heads of a multiple of 32 up to 512; {model.name} has {model.dtype}, keys of {model.heads.dim} "
            f"and values of {model.heads.value_dim}; leave host_attention out"
        )


def host_attends(model: HFModel, wanted: bool | str) -> bool:
    """Returns whether the CPU attends to this model's keys and values in host memory.

    Args:
        wanted: True, False, or "auto": where it is fast (our kernel runs) and possible (no capped scores).

    Raises:
        ValueError: it is wanted, but not possible.
    """
    if wanted == "auto":
        return not model.has_softcap and offload_attention.native(model.heads, model.dtype)
    if wanted:
        check_host_attention(model)
    return bool(wanted)


class _Buffers(NamedTuple):
    """Holds page-locked memory for queries of one shape and for their states, and the states on the device.

    ``out`` and ``lse`` are views of ``state``, ``device_out`` and ``device_lse`` those of ``device_state``.
    """

    q: Tensor
    state: Tensor
    out: Tensor
    lse: Tensor
    device_state: Tensor
    device_out: Tensor
    device_lse: Tensor


class HostAttention:
    """Attends on the host for queries on the device: ``submit``, then any other work, then ``states``.

    One request at a time, computed in order with a copy stream beside the computation: where the work of a
    whole pass is queued on the device, the host's part is queued as well. Off the GPU each request is
    computed at once.

    Args:
        heads: of the attention.
        device: where queries are and states go.
        dtype: of queries, keys, values and outputs.
        requests: of a pass, one for each layer and sequence.

    Attributes:
        bytes: of keys and values attended to so far.
    """

    def __init__(self, heads: Heads, device: torch.device, dtype: torch.dtype, requests: int) -> None:
        self.heads, self.device, self.dtype = heads, device, dtype
        self.memory = HostMemory(locked=device.type == "cuda")
        self.bytes = 0
        # Four times as many: measuring stage costs queues three passes without waiting for one, and a pass
        # that was interrupted may have left its own in the queue.
        self._kernel = offload_attention.kernel(heads, dtype, 4 * requests)
        self._copy_stream = CopyStream(device)
        self._by_shape: dict[tuple[int, int], _Buffers] = {}
        self._submitted: _Buffers | None = None

    def submit(self, q: Tensor, kv: Sequence[Tensor], scale: float) -> None:
        """Copies queries to the host after all work queued on the device so far, and attends there.

        The next layer's queries are computed from these states, so by the time they are submitted the device
        no longer reads the memory that is used here.

        Args:
            q: ``[B, T, H_q, D]``.
            kv: of each sequence, rows ``[n, row]`` (``Heads.split``) in host memory; n may be 0.
            scale: of the scores.
        """
        batch, queries = q.shape[:2]
        if (batch, queries) not in self._by_shape:
            self._by_shape[batch, queries] = self._buffers(batch, queries)
        buffers = self._submitted = self._by_shape[batch, queries]
        # Copies of keys and values to the host are done by then: a pass begins after them.
        self._copy_stream.copy(buffers.q, q)
        for b, own in enumerate(kv):
            self._attend(buffers.q[b], own, scale, buffers.out[b], buffers.lse[b])
            self.bytes += own.nbytes
        with self._copy_stream.as_current():
            exchange.fetch_words(buffers.device_state, buffers.state)

    def _attend(self, q: Tensor, kv: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        if self._kernel is not None:
            self._copy_stream.call(*self._kernel.call(q, *self.heads.split(kv), scale, out, lse))
            return
        for target, result in zip(
            (out, lse), offload_attention.attend(q, *self.heads.split(kv), scale), strict=True
        ):
            target.copy_(result)

    def states(self) -> State:
        """Returns the result of the last request.

        Returns:
            on the device, until the next request: out ``[B, T, H_q, D_v]`` and lse ``[B, T, H_q]`` in fp32,
            -inf for a sequence without keys.
        """
        buffers, self._submitted = self._submitted, None
        assert buffers is not None, "nothing was submitted"
        self._copy_stream.join()
        return buffers.device_out, buffers.device_lse

    def _buffers(self, batch: int, queries: int) -> _Buffers:
        shape = (batch, queries, self.heads.query, self.heads.value_dim)
        count, size = prod(shape[:3]), prod(shape) * self.dtype.itemsize
        # Counted in words of 4 bytes; the fp32 part begins at a multiple of 16 bytes.
        start = -(-size // 16) * 4

        def parts(words: Tensor) -> State:
            out = words[:start].view(self.dtype)[: prod(shape)].view(shape)
            return out, words[start:].view(torch.float32).view(shape[:3])

        state = self.memory.take((start + count,), torch.int32)
        on_device = torch.empty(start + count, dtype=torch.int32, device=self.device)
        q = self.memory.take((*shape[:3], self.heads.dim), self.dtype)
        return _Buffers(q, state, *parts(state), on_device, *parts(on_device))

    def close(self) -> None:
        """Frees the host memory after the requests that an interrupted pass left in the queue."""
        self._copy_stream.synchronize()
        self._by_shape = {}
        self.memory.release()
