"""Attention on the CPU of sequences that begin alike: all queries over the prefix, each over its slots."""

from dataclasses import replace

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import Plan, plan_trees
from triforce_tree.kernels.cpu import host
from triforce_tree.kernels.cpu.fp32.attention import attention
from triforce_tree.kernels.step.kv_slots import dequantized

State = tuple[Tensor, Tensor]
"""Outputs ``[queries, H_q, D_v]`` and their log-sum-exp fp32 ``[queries, H_q]``."""


class HostPrefixPlan:
    """What ``attention.nodes.PrefixPlan`` keeps for the CPU.

    Args:
        own: of ``plan_trees``: the sequences after the prefix, ``lengths`` counted from there.
        prefix: int32 ``[1]``, positions of the prefix.
    """

    def __init__(self, own: Plan, prefix: Tensor) -> None:
        self.own, self._prefix = own, prefix
        self._plans: dict[int, Plan] = {}

    def prefix(self, queries: int) -> Plan:
        """So many queries over the prefix, all of which see all of it."""
        if queries not in self._plans:
            nothing, heads = torch.ones(queries, 0, dtype=torch.bool), self.own.heads
            plan = plan_trees(heads, [nothing], [0], device="cpu", dtype=torch.float32)
            self._plans[queries] = replace(plan, lengths=self._prefix)
        return self._plans[queries]


def prefix_attention(
    q: Tensor,
    common: list[Tensor],
    own: list[Tensor],
    plan: HostPrefixPlan,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> State:
    """Attention over the union of a prefix and each sequence's own slots, merged by log-sum-exp.

    Args:
        q: ``[queries, H_q, D]``: T of each sequence; T may be less than planned.
        common: keys and values ``[1, H_kv, S, D]`` of the prefix; in int8, also scales ``[1, H_kv, S, 1]``.
        own: the same of the sequences, with B for 1.
        plan: lengths and masks.
        scale, softcap, sinks: as for ``launch.run``.
    """
    shared = plan.prefix(q.shape[0])
    states = [
        _compiled(q, common, shared, scale, softcap, None),
        _compiled(q, own, plan.own, scale, softcap, sinks),
    ]
    parts = [
        state or _in_torch(q, stored, each, scale, softcap, own_sinks)
        for state, stored, each, own_sinks in zip(
            states, (common, own), (shared, plan.own), (None, sinks), strict=True
        )
    ]
    outs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
    return reference.merge_states(outs, lses)


def _compiled(
    q: Tensor, stored: list[Tensor], plan: Plan, scale: float, softcap: float | None, sinks: Tensor | None
) -> State | None:
    """By the C kernel; None where it does not serve."""
    if len(stored) > 2:
        return None
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    out = attention(q, stored[0], stored[1], plan, scale, softcap=softcap, sinks=sinks, lse=lse)
    return None if out is None else (out, lse)


def _in_torch(
    q: Tensor, stored: list[Tensor], plan: Plan, scale: float, softcap: float | None, sinks: Tensor | None
) -> State:
    k, v, *scales = stored
    parts = []
    if plan.lengths.shape[0] == 1:
        length = int(plan.lengths)
        keys, values = k[:, :, :length], v[:, :, :length]
        if scales:
            pairs = zip((keys, values), scales, strict=True)
            keys, values = (dequantized(t, own[:, :, :length], q.dtype) for t, own in pairs)
        nothing = torch.ones(q.shape[0], 0, dtype=torch.bool)
        tensors = [(q.transpose(0, 1)[None], keys, values, nothing)]
    else:
        pair = (scales[0], scales[1]) if scales else None
        tensors = [each[:4] for each in host.by_sequence(q, k, v, plan, None, None, pair)]
    for each in tensors:
        out, lse = reference.tree_attention(*each, scale=scale, softcap=softcap, sinks=sinks)
        parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)
