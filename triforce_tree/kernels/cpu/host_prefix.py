"""Attention on the CPU of sequences that begin alike: all queries over the prefix, each over its slots."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import Plan, plan_trees
from triforce_tree.kernels.cpu import host
from triforce_tree.kernels.cpu.fp32.attention import attention
from triforce_tree.kernels.step.kv_slots import dequantized

# Plans are kept for so many lengths of prefixes and numbers of queries.
_MOST_PLANS = 64

Segment = tuple[int, int, int, int]
"""First slot, slots, first sequence and sequences of a prefix."""

State = tuple[Tensor, Tensor]
"""Outputs ``[queries, H_q, D_v]`` and their log-sum-exp fp32 ``[queries, H_q]``."""


class HostPrefixPlan:
    """What ``attention.nodes.PrefixPlan`` keeps for the CPU.

    Args:
        own: of ``plan_trees``: the sequences after their prefixes, ``lengths`` counted from there.

    Attributes:
        prefixes: what is read once; its queries see all of it.
    """

    def __init__(self, own: Plan) -> None:
        self.own, self.prefixes = own, list[Segment]()
        self._plans: dict[tuple[int, int], Plan] = {}

    def prefix(self, length: int, queries: int) -> Plan:
        """So many queries over a prefix, all of which see all of it."""
        key = length, queries
        if key not in self._plans:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            nothing, heads = torch.ones(queries, 0, dtype=torch.bool), self.own.heads
            self._plans[key] = plan_trees(heads, [nothing], [length], device="cpu", dtype=torch.float32)
        return self._plans[key]


def prefix_attention(
    q: Tensor,
    stored: list[Tensor],
    own: list[Tensor],
    plan: HostPrefixPlan,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> State:
    """Attention over the union of the prefixes and own slots of each sequence, merged by log-sum-exp.

    Args:
        q: ``[queries, H_q, D]``: T of each sequence; T may be less than planned.
        stored: keys and values ``[1, H_kv, S, D]`` with those of the prefixes; in int8, also scales
            ``[1, H_kv, S, 1]``.
        own: the same of the sequences after their prefixes, with B for 1.
        plan: lengths and masks.
        scale, softcap, sinks: as for ``launch.run``.
    """
    state = _state(q, own, plan.own, scale, softcap, sinks)
    count = q.shape[0] // plan.own.lengths.shape[0]
    out, lse = state[0].clone(), state[1].clone()
    for place, length, first, rows in plan.prefixes:
        queries = slice(first * count, (first + rows) * count)
        seen = [t[:, :, place : place + length] for t in stored]
        part = _state(q[queries], seen, plan.prefix(length, rows * count), scale, softcap, None)
        pairs = zip(part, (out[queries], lse[queries]), strict=True)
        outs, lses = (torch.stack(pair) for pair in pairs)
        out[queries], lse[queries] = reference.merge_states(outs, lses)
    return out, lse


def _state(
    q: Tensor, stored: list[Tensor], plan: Plan, scale: float, softcap: float | None, sinks: Tensor | None
) -> State:
    made = _compiled(q, stored, plan, scale, softcap, sinks)
    return made or _in_torch(q, stored, plan, scale, softcap, sinks)


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
