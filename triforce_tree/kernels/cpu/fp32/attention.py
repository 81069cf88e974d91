"""Attention in fp32 on the CPU with a plan, by ``attention.h``."""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Plan
from triforce_tree.kernels.cpu.fp32.library import page_table, run_with_work, usable

_ATTENTION = struct.Struct("35qdd")
# The C kernel processes values in vectors of up to 16 elements.
_VECTOR = 16


def attention(
    q: Tensor,
    kv: KV,
    plan: Plan,
    params: AttentionParams,
    first: FirstVisible | None = None,
    lse: Tensor | None = None,
) -> Tensor | None:
    """Computes attention with a plan from ``plan_trees``; None if the C kernel does not serve the arguments.

    It serves fp32 keys and values, the latter of a multiple of 16 elements, and plans with as many queries
    for each sequence. The result of a query does not depend on the other queries, bit for bit.

    Args:
        q, kv, params, first: as for ``attention.backend.Attention.run``.
        lse: fp32 ``[queries, H_q]`` and dense, is written with the log-sum-exp of each query if it is given.
    """
    k, v, table, _ = kv
    library, sinks = usable(q, k, v), params.sinks
    batch, heads = plan.lengths.shape[0], plan.heads
    if library is None or v.shape[3] % _VECTOR or plan.max_queries * batch != plan.queries:
        return None
    tokens = q.shape[0] // batch
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[3])
    at_token, at_head = q.stride(0), q.stride(1)
    firsts = (0, 0, 0) if first is None else tuple(t.data_ptr() for t in first)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    threads = torch.get_num_threads()
    run_with_work(library.attention, _ATTENTION, (
        q.data_ptr(), tokens * at_token, at_head, at_token,
        k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3],
        *page_table(table), k.shape[2], plan.lengths.data_ptr(), plan.segments.data_ptr(),
        plan.mask.data_ptr(), plan.mask.shape[1], *firsts, 0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        batch, tokens, heads.kv, heads.group, q.shape[2], v.shape[3], threads,
        params.scale, params.softcap or 0.0,
    ))  # fmt: skip
    return out
