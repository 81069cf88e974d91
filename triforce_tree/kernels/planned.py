"""Attention by a plan: the kernel on CUDA, ``host`` elsewhere."""

import torch
from torch import Tensor

from triforce_tree.kernels import host, reference
from triforce_tree.kernels.plan import FirstRows, Plan


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    table: Tensor | None = None,
    first: FirstRows | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The output ``[queries, H_q, D]`` of ``launch.run``, whose arguments these are.

    ``plan`` must be one of ``plan_trees``. On the CPU ``q`` may hold fewer queries than it plans for: see
    ``host.planned_attention``.
    """
    if not q.is_cuda:
        return host.planned_attention(
            q, k, v, plan, scale=scale, table=table, first=first, softcap=softcap, sinks=sinks
        )
    return states(q, k, v, plan, scale=scale, table=table, first=first, softcap=softcap, sinks=sinks)[0]


def states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    table: Tensor | None = None,
    first: FirstRows | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp ``[queries, H_q]``, both of ``launch.run``; see :func:`run`."""
    if q.is_cuda:
        from triforce_tree.kernels import launch

        return launch.run(q, k, v, plan, scale=scale, table=table, first=first, softcap=softcap, sinks=sinks)
    outs, lses = [], []
    _, _, tails, firsts, counts, _ = plan.segments.tolist()
    for b, length in enumerate(plan.lengths.tolist()):
        queries = slice(firsts[b], firsts[b] + counts[b])
        start, stop = 0 if first is None else int(first.low[b]), length + tails[b]
        if table is None:
            keys, values = k[b : b + 1, :, start:stop], v[b : b + 1, :, start:stop]
        else:
            pages = table[b] if table.ndim == 3 else table[b].expand(plan.heads.kv, -1)
            keys, values = (host.gathered_rows(t, pages, start, stop) for t in (k, v))
        mask = host.tail_mask(plan.mask[queries], tails[b])
        out, lse = reference.tree_attention(
            q[queries].transpose(0, 1)[None], keys, values, mask, scale=scale,
            first=None if first is None else first.first[queries] - start, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)
