"""Attention with a plan: the Triton kernel on CUDA, ``kernels.cpu.host`` elsewhere."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import FirstVisible, Plan
from triforce_tree.kernels.cpu import host


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    table: Tensor | None = None,
    first: FirstVisible | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The output ``[queries, H_q, D_v]`` of ``launch.run``, with the same arguments.

    ``plan`` must come from ``plan_trees``. On the CPU ``q`` may hold fewer queries than planned: see
    ``host.planned_attention``.
    """
    if not q.is_cuda:
        return host.planned_attention(
            q, k, v, plan, scale=scale, table=table, first=first, softcap=softcap, sinks=sinks, scales=scales
        )
    return states(
        q, k, v, plan, scale=scale, table=table, first=first, softcap=softcap, sinks=sinks, scales=scales
    )[0]


def states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    table: Tensor | None = None,
    first: FirstVisible | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp ``[queries, H_q]``, both of ``launch.run``; see :func:`run`."""
    if q.is_cuda:
        from triforce_tree.kernels.attention import launch

        return launch.run(
            q, k, v, plan, scale=scale, table=table, first=first, softcap=softcap, sinks=sinks, scales=scales
        )
    outs, lses = [], []
    for *tensors, own in host.by_sequence(q, k, v, plan, table, first, scales):
        out, lse = reference.tree_attention(*tensors, scale=scale, first=own, softcap=softcap, sinks=sinks)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)
