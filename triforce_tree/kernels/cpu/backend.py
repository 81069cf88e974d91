"""The attention backend of the CPU, which uses C kernels if they compile and support a call, else torch.

A call reads lengths and masks at once, and may have fewer queries of each sequence than planned.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.backend import Attention, AttentionBackend, Capabilities
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Heads, Plan, plan_trees
from triforce_tree.kernels.attention.prefixes import PrefixPlan
from triforce_tree.kernels.cpu.fp32.attention import attention as fp32_attention
from triforce_tree.kernels.cpu.tree_attention import by_sequence, planned_attention

# Most plans that are kept, each for a length of a prefix and a number of queries.
_MOST_PLANS = 64

State = tuple[Tensor, Tensor]
"""Outputs ``[queries, H_q, D_v]`` and their log-sum-exps, fp32 ``[queries, H_q]``."""


class CpuBackend(AttentionBackend):
    """The backend "cpu"; see the module."""

    name = "cpu"
    can = Capabilities(
        devices=("cpu",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        kv_bits=(16, 8),
        captures=True,
        fewer_queries=True,
        exact=True,
        pieces=True,
        texts="nodes",
    )

    def trees(
        self, plan: Plan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        return _Trees(plan)

    def prefixes(
        self, plan: PrefixPlan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> Attention:
        return _Prefixes(plan)

    def pieces(
        self, heads: Heads, queries: int, positions: int, most: int, device: torch.device, dtype: torch.dtype
    ) -> list[Attention]:
        nothing = torch.ones(queries, 0, dtype=torch.bool)
        plan = plan_trees(heads, [nothing] * most, [positions] * most, device=device)
        return [_Trees(plan.first(count, count * queries)) for count in range(1, most + 1)]

    @property
    def exact(self) -> Any:
        from triforce_tree.kernels.cpu.fp32 import exact

        return exact


@dataclass(frozen=True)
class _Trees:
    """Attention with a plan from ``plan_trees``."""

    plan: Plan

    def over(self, plan: Plan) -> Self:
        return replace(self, plan=plan)

    def begin(self) -> None:
        """Does nothing: every call reads lengths and masks."""

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        out = fp32_attention(q, kv, self.plan, params, first)
        return planned_attention(q, kv, self.plan, params, first) if out is None else out

    def states(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> State:
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        compiled = fp32_attention(q, kv, self.plan, params, first, lse)
        if compiled is not None:
            return compiled, lse
        outs, lses = [], []
        how: dict[str, Any] = {"scale": params.scale, "softcap": params.softcap, "sinks": params.sinks}
        for *tensors, own in by_sequence(q, kv, self.plan, first):
            out, lse = reference.tree_attention(*tensors, first=own, **how)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0].transpose(0, 1))
        return torch.cat(outs), torch.cat(lses)


class _Prefixes:
    """Attention of sequences with shared prefixes to ``[1, H_kv, S, D]`` and ``[1, H_kv, S, D_v]``.

    The attention to each shared prefix and to the own slots of each sequence is merged by log-sum-exp.
    """

    def __init__(self, prefixes: PrefixPlan) -> None:
        self._prefixes, self.plan = prefixes, prefixes.plan
        made, batch = prefixes.plan, prefixes.batch
        nothing = torch.ones(prefixes.count, prefixes.tail, dtype=torch.bool)
        alone = plan_trees(made.heads, [nothing], [0], device="cpu")
        parts = zip(made.lengths[:batch].split(1), made.mask.split(prefixes.count), strict=True)
        self._own = [replace(alone, lengths=one, mask=seen) for one, seen in parts]
        self._plans: dict[tuple[int, int], Plan] = {}

    def over(self, plan: Plan) -> Self:
        raise NotImplementedError("attention to shared prefixes has only one plan")

    def begin(self) -> None:
        """Does nothing: every call reads lengths and masks."""

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        return self.states(q, kv, params, first)[0]

    def states(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> State:
        assert first is None, "slots with shared prefixes have no windows"
        count = q.shape[0] // len(self._own)
        stored = [kv.k, kv.v, *(kv.scales or ())]
        states = []
        for part, own, place in zip(q.split(count), self._own, self._prefixes.places, strict=True):
            states.append(_Trees(own).states(part, _kv(stored, slice(place, None)), params))
        outs, lses = zip(*states, strict=True)
        out, lse = torch.cat(outs), torch.cat(lses)
        alone = replace(params, sinks=None)
        for place, length, begin, rows in self._prefixes.prefixes:
            queries = slice(begin * count, (begin + rows) * count)
            seen = _kv(stored, slice(place, place + length))
            part = _Trees(self._plan_of(length, rows * count)).states(q[queries], seen, alone)
            pairs = zip(part, (out[queries], lse[queries]), strict=True)
            both = (torch.stack(pair) for pair in pairs)
            out[queries], lse[queries] = reference.merge_states(*both)
        return out, lse

    def _plan_of(self, length: int, queries: int) -> Plan:
        """Returns the plan of ``queries`` queries that all see ``length`` positions of a prefix."""
        key = length, queries
        if key not in self._plans:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            nothing = torch.ones(queries, 0, dtype=torch.bool)
            self._plans[key] = plan_trees(self.plan.heads, [nothing], [length], device="cpu")
        return self._plans[key]


def _kv(stored: list[Tensor], slots: slice) -> KV:
    """Returns some slots of keys, values and, if there are any, scales."""
    k, v, *scales = (t[:, :, slots] for t in stored)
    return KV(k, v, scales=(scales[0], scales[1]) if scales else None)
