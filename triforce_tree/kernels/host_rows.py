"""Attention on the CPU to rows ``[n, 2, H_kv, D]`` of host memory: by our own kernel, or torch's.

For a fixed number of threads (``torch.get_num_threads``) the same rows give the same bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triforce_tree.kernels.amx_attention import AmxAttention, supports
from triforce_tree.kernels.plan import Heads
from triforce_tree.kernels.reference import merge_states

State = tuple[Tensor, Tensor]
"""Outputs and their log-sum-exp."""

Attend = Callable[[Tensor, Tensor, float | None], State]
"""A function like :func:`attend`."""

BLOCK = 8 << 20
"""Bytes of a block of rows: what one head has of it stays in a core's cache while queries go through it."""

# Blocks in one call: enough for all cores, and few states to merge.
_TOGETHER = 8


def native(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether this processor runs our kernel, which keeps up with memory for dozens of queries a row."""
    return supports(heads.dim, dtype)


def fastest(heads: Heads, dtype: torch.dtype) -> Attend:
    """Our kernel where it runs, on all of torch's threads but the caller's, else :func:`attend`.

    For one caller at a time.
    """
    return AmxAttention(max(1, torch.get_num_threads() - 1)) if native(heads, dtype) else attend


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
    """Attention to all of any number of rows but none: :func:`flash`, in blocks of :data:`BLOCK` bytes.

    Arguments and results are those of :func:`flash`.
    """
    block = max(1, BLOCK // rows[0].nbytes)
    states = []
    for run in rows.split(_TOGETHER * block):
        whole = run.shape[0] // block
        if whole:
            states.append(flash(q, run[: whole * block], whole, scale))
        if run.shape[0] > whole * block:
            states.append(flash(q, run[whole * block :], scale=scale))
    return merged(states)
