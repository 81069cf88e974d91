"""Attention on the CPU of sequences that begin alike: all queries over the prefix, each over its slots."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import Plan, plan_trees
from triforce_tree.kernels.cpu import host
from triforce_tree.kernels.cpu.fp32.attention import attention

# Plans are kept for so many lengths of prefixes and numbers of queries.
_MOST_PLANS = 64

Segment = tuple[int, int, int, int]
"""First slot, slots, first sequence and sequences of a prefix."""

State = tuple[Tensor, Tensor]
"""Outputs ``[queries, H_q, D_v]`` and their log-sum-exp fp32 ``[queries, H_q]``."""


class HostPrefixPlan:
    """What ``attention.nodes.PrefixPlan`` keeps for the CPU.

    Args:
        own: of ``plan_trees``: each sequence after its prefixes, ``lengths`` counted from there.

    Attributes:
        prefixes: what is read once; its queries see all of it.
        places: first slot of each sequence after its prefixes.
    """

    def __init__(self, own: list[Plan]) -> None:
        self.own, self.prefixes, self.places = own, list[Segment](), [0] * len(own)
        self._plans: dict[tuple[int, int], Plan] = {}

    def prefix(self, length: int, queries: int) -> Plan:
        """So many queries over a prefix, all of which see all of it."""
        key = length, queries
        if key not in self._plans:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            nothing, heads = torch.ones(queries, 0, dtype=torch.bool), self.own[0].heads
            self._plans[key] = plan_trees(heads, [nothing], [length], device="cpu", dtype=torch.float32)
        return self._plans[key]


def prefix_attention(
    q: Tensor,
    stored: list[Tensor],
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
        plan: places, lengths and masks.
        scale, softcap, sinks: as for ``launch.run``.
    """
    count = q.shape[0] // len(plan.own)
    states = []
    for part, own, place in zip(q.split(count), plan.own, plan.places, strict=True):
        states.append(_state(part, [t[:, :, place:] for t in stored], own, scale, softcap, sinks))
    outs, lses = zip(*states, strict=True)
    out, lse = torch.cat(outs), torch.cat(lses)
    for place, length, first, rows in plan.prefixes:
        queries = slice(first * count, (first + rows) * count)
        seen = [t[:, :, place : place + length] for t in stored]
        part = _state(q[queries], seen, plan.prefix(length, rows * count), scale, softcap, None)
        pairs = zip(part, (out[queries], lse[queries]), strict=True)
        both = (torch.stack(pair) for pair in pairs)
        out[queries], lse[queries] = reference.merge_states(*both)
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
    pair = (scales[0], scales[1]) if scales else None
    [each] = host.by_sequence(q, k, v, plan, None, None, pair)
    out, lse = reference.tree_attention(*each[:4], scale=scale, softcap=softcap, sinks=sinks)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)
