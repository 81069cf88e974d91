"""Attention on the CPU to keys ``[n, H_kv, D]`` and values ``[n, H_kv, D_v]`` in host memory, by C or torch.

Results are deterministic for a fixed number of threads (``torch.get_num_threads``).
"""

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.attention.reference import merge_states, tree_attention
from triforce_tree.kernels.cpu.cpu_attention import CpuAttention, supports

State = tuple[Tensor, Tensor]
"""Outputs and their log-sum-exps."""

BLOCK = 8 << 20
"""Bytes of a block of keys and values, of which one head's part stays in a core's cache for all queries."""

# Blocks of a call of ``flash``: enough for all cores, with few partial outputs to merge.
_TOGETHER = 8


def native(heads: Heads, dtype: torch.dtype) -> bool:
    """Returns whether this processor runs the C kernel for these heads."""
    return supports(heads.dim, dtype) and supports(heads.value_dim, dtype)


def kernel(heads: Heads, dtype: torch.dtype, waiting: int = 1) -> CpuAttention | None:
    """Returns the C kernel with one thread less than torch uses, or None if it cannot run.

    The remaining thread is for the process itself. ``waiting`` is described in :class:`CpuAttention`.
    """
    if not native(heads, dtype):
        return None
    return CpuAttention(max(1, torch.get_num_threads() - 1), waiting, dtype=dtype)


def flash(q: Tensor, k: Tensor, v: Tensor, parts: int = 1, scale: float | None = None) -> State:
    """Computes attention by torch's flash attention, with the positions split into a batch of ``parts``.

    Torch runs each (part, head) in parallel, so parts keep all cores busy. Query heads that share a KV head
    are stacked as query rows. If D and D_v differ, which flash attention does not support, the definition
    computes the attention in fp32.

    Args:
        q: ``[H_kv, R, D]``, R = T x query heads per KV head.
        k, v: ``[n, H_kv, D]`` and ``[n, H_kv, D_v]`` of the same dtype, n a multiple of ``parts``.
        scale: factor on the scores; None for ``D ** -0.5``.

    Returns:
        out ``[H_kv, R, D_v]`` and log-sum-exps (natural logarithm) ``[H_kv, R]``, both in fp32.
    """
    k, v = (t.unflatten(0, (parts, -1)).transpose(1, 2) for t in (k, v))  # [parts, H_kv, n / parts, D]
    queries = q.expand(parts, -1, -1, -1)
    if k.shape[3] != v.shape[3]:
        nothing = torch.ones(q.shape[1], 0, dtype=torch.bool, device="cpu")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return merge_states(*tree_attention(queries.float(), k.float(), v.float(), nothing, scale=scale))
    out_and_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, k, v, scale=scale)
    return merge_states(out_and_lse[0].float(), out_and_lse[1])


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> State:
    """Computes attention to any number of KV positions by :func:`flash`, in blocks of :data:`BLOCK` bytes.

    Args:
        q: ``[T, H_q, D]``.
        k, v: ``[n, H_kv, D]`` and ``[n, H_kv, D_v]`` of the same dtype.
        scale: factor on the scores; None for ``D ** -0.5``.

    Returns:
        out ``[T, H_q, D_v]`` in the dtype of ``q``, and log-sum-exps (natural logarithm), fp32 ``[T, H_q]``;
        0 and -inf if n is 0.
    """
    (queries, heads, _), (count, kv, value_dim) = q.shape, v.shape
    if not count:
        out = q.new_zeros((queries, heads, value_dim))
        return out, q.new_full((queries, heads), -torch.inf, dtype=torch.float32)
    grouped = q.unflatten(1, (kv, heads // kv)).permute(1, 2, 0, 3).flatten(1, 2)  # [H_kv, group * T, D]
    block = max(1, BLOCK // (k[0].nbytes + v[0].nbytes))
    states = []
    for keys, values in zip(k.split(_TOGETHER * block), v.split(_TOGETHER * block), strict=True):
        full_blocks = keys.shape[0] // block
        whole = full_blocks * block
        if full_blocks:
            states.append(flash(grouped, keys[:whole], values[:whole], full_blocks, scale))
        if keys.shape[0] > whole:
            states.append(flash(grouped, keys[whole:], values[whole:], scale=scale))
    outs, lses = zip(*states, strict=True)
    out, lse = merge_states(torch.stack(outs), torch.stack(lses))
    parts = (heads // kv, queries)
    return (
        out.to(q.dtype).unflatten(1, parts).permute(2, 0, 1, 3).reshape(queries, heads, value_dim),
        lse.unflatten(1, parts).permute(2, 0, 1).reshape(queries, heads),
    )
