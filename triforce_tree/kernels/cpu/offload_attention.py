"""Attention on the CPU to keys ``[n, H_kv, D]`` and values ``[n, H_kv, D_v]`` in host memory.

With the C kernel, or torch's. Results are deterministic for a fixed number of threads
(``torch.get_num_threads``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.attention.reference import merge_states, tree_attention
from triforce_tree.kernels.cpu.cpu_attention import CpuAttention, supports

State = tuple[Tensor, Tensor]
"""Outputs and their log-sum-exp."""

BLOCK = 8 << 20
"""Bytes of a block of keys and values: one head's part stays in a core's cache while all queries use it."""

# Blocks per call: enough work for all cores, and few states to merge.
_TOGETHER = 8


def native(heads: Heads, dtype: torch.dtype) -> bool:
    """Returns whether this processor runs the C kernel, which memory bounds for up to dozens of queries."""
    return supports(heads.dim, dtype) and supports(heads.value_dim, dtype)


def kernel(heads: Heads, dtype: torch.dtype, waiting: int = 1) -> CpuAttention | None:
    """The C kernel, with one thread less than torch uses, for the process itself; None where it cannot run.

    Args:
        heads, dtype: of the attention.
        waiting: see :class:`CpuAttention`.
    """
    if not native(heads, dtype):
        return None
    return CpuAttention(max(1, torch.get_num_threads() - 1), waiting, dtype=dtype)


def flash(q: Tensor, k: Tensor, v: Tensor, parts: int = 1, scale: float | None = None) -> State:
    """Torch's flash attention; the KV is split into ``parts`` as a batch, so that all cores have work.

    Torch parallelises over (part, head). Query heads that share a KV head are stacked as query rows. Values
    of another width than the keys are attended to in fp32 by the definition: flash attention needs one width.

    Args:
        q: ``[H_kv, R, D]``, R = T x query heads per KV head.
        k, v: ``[n, H_kv, D]`` and ``[n, H_kv, D_v]`` of the same dtype, n a multiple of ``parts``.
        scale: factor on the scores; None for ``D ** -0.5``.

    Returns:
        out ``[H_kv, R, D_v]`` and lse ``[H_kv, R]``, natural logarithms, both in fp32.
    """
    k, v = (t.unflatten(0, (parts, -1)).transpose(1, 2) for t in (k, v))  # [parts, H_kv, n / parts, D]
    queries = q.expand(parts, -1, -1, -1)
    if k.shape[3] != v.shape[3]:
        nothing = torch.ones(q.shape[1], 0, dtype=torch.bool)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return merge_states(*tree_attention(queries.float(), k.float(), v.float(), nothing, scale=scale))
    out_and_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, k, v, scale=scale)
    return merge_states(out_and_lse[0].float(), out_and_lse[1])


def merged(states: Sequence[State]) -> State:
    """The state over the union of the positions of several states."""
    outs, lses = zip(*states, strict=True)
    return merge_states(torch.stack(outs), torch.stack(lses))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> State:
    """Attention to any number of KV positions: :func:`flash`, in blocks of :data:`BLOCK` bytes.

    Args:
        q: ``[T, H_q, D]``.
        k, v: ``[n, H_kv, D]`` and ``[n, H_kv, D_v]`` of the same dtype.
        scale: factor on the scores; None for ``D ** -0.5``.

    Returns:
        out ``[T, H_q, D_v]`` in the dtype of ``q``, and lse fp32 ``[T, H_q]``, natural logarithms; zeros and
        -inf where n is 0.
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
    out, lse = merged(states)
    parts = (heads // kv, queries)
    return (
        out.to(q.dtype).unflatten(1, parts).permute(2, 0, 1, 3).reshape(queries, heads, value_dim),
        lse.unflatten(1, parts).permute(2, 0, 1).reshape(queries, heads),
    )
