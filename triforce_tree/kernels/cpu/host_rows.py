"""Attention on the CPU to rows ``[n, 2, H_kv, D]`` of host memory: by our own kernel, or torch's.

For a fixed number of threads (``torch.get_num_threads``) the same rows give the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.cpu.cpu_attention import CpuAttention, supports

State = tuple[Tensor, Tensor]
"""Outputs and their log-sum-exp."""

BLOCK = 8 << 20
"""Bytes of a block of rows: what one head has of it stays in a core's cache while queries go through it."""

# Blocks in one call: enough for all cores, and few states to merge.
_TOGETHER = 8


def native(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether this processor runs our kernel, which keeps up with memory for dozens of queries a row."""
    return supports(heads.dim, dtype)


def kernel(heads: Heads, dtype: torch.dtype, waiting: int = 1) -> CpuAttention | None:
    """Our kernel, on all of torch's threads but the one that the process needs; None where it cannot run.

    Args:
        heads, dtype: of the attention.
        waiting: see :class:`CpuAttention`.
    """
    if not native(heads, dtype):
        return None
    return CpuAttention(max(1, torch.get_num_threads() - 1), waiting, dtype=dtype)


def flash(q: Tensor, rows: Tensor, parts: int = 1, scale: float | None = None) -> State:
    """Torch's flash attention; ``parts`` equal runs of rows are a batch, so that there is work for all cores.

    It works on one (part, head) a core. The group of query heads that share a KV head are rows of it.

    Args:
        q: ``[H_kv, R, D]``, R = T x query heads a KV head.
        rows: ``[n, 2, H_kv, D]`` of the same dtype, n a multiple of ``parts``.
        scale: of the scores; None for ``D ** -0.5``.

    Returns:
        out ``[H_kv, R, D]`` and lse ``[H_kv, R]``, natural logarithms, both in fp32.
    """
    k, v = rows.unflatten(0, (parts, -1)).permute(2, 0, 3, 1, 4)  # each [parts, H_kv, n / parts, D]
    queries = q.expand(parts, -1, -1, -1)
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, k, v, scale=scale)
    return merge_states(made[0].float(), made[1])


def merged(states: Sequence[State]) -> State:
    """Of all rows of the states."""
    outs, lses = zip(*states, strict=True)
    return merge_states(torch.stack(outs), torch.stack(lses))


def attend(q: Tensor, rows: Tensor, scale: float | None = None) -> State:
    """Attention to any number of rows: :func:`flash`, in blocks of :data:`BLOCK` bytes.

    Args:
        q: ``[T, H_q, D]``.
        rows: ``[n, 2, H_kv, D]`` of the same dtype.
        scale: of the scores; None for ``D ** -0.5``.

    Returns:
        out ``[T, H_q, D]`` in the dtype of ``q``, and lse fp32 ``[T, H_q]``, natural logarithms; zeros and
        -inf without rows.
    """
    queries, heads, dim = q.shape
    if not rows.shape[0]:
        return torch.zeros_like(q), q.new_full((queries, heads), -torch.inf, dtype=torch.float32)
    kv = rows.shape[2]
    grouped = q.unflatten(1, (kv, heads // kv)).permute(1, 2, 0, 3).flatten(1, 2)  # [H_kv, group * T, D]
    block = max(1, BLOCK // rows[0].nbytes)
    states = []
    for run in rows.split(_TOGETHER * block):
        whole = run.shape[0] // block
        if whole:
            states.append(flash(grouped, run[: whole * block], whole, scale))
        if run.shape[0] > whole * block:
            states.append(flash(grouped, run[whole * block :], scale=scale))
    out, lse = merged(states)
    parts = (heads // kv, queries)
    return (
        out.to(q.dtype).unflatten(1, parts).permute(2, 0, 1, 3).reshape(queries, heads, dim),
        lse.unflatten(1, parts).permute(2, 0, 1).reshape(queries, heads),
    )
