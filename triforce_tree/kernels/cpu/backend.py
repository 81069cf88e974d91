"""The attention backend of the CPU, which uses C kernels if they compile and support a call, else torch.

A call reads lengths and masks at once, and may have fewer queries of each sequence than planned.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

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
        prefixes=True,
    )

    def trees(
        self, plan: Plan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        return _Trees(plan)

    def prefixes(
        self, plan: PrefixPlan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        return _Prefixes(plan)

    def pieces(
        self, heads: Heads, queries: int, positions: int, most: int, device: torch.device, dtype: torch.dtype
    ) -> list[Attention]:
        nothing = torch.ones(queries, 0, dtype=torch.bool, device="cpu")
        plan = plan_trees(heads, [nothing] * most, [positions] * most, device=device)
        return [_Trees(plan.first(count, count * queries)) for count in range(1, most + 1)]

    @property
    def exact(self) -> Any:
        from triforce_tree.kernels.cpu.fp32 import exact

        return exact


@dataclass(frozen=True)
class _Trees:
    """Attention with a plan from ``plan_trees``.

    Attributes:
        repeats: whether all calls of :meth:`run` do the same work on the same buffers, as far as Python sees
            it.
    """

    plan: Plan
    repeats: ClassVar[bool] = True

    def over(self, plan: Plan) -> Self:
        return replace(self, plan=plan)

    def begin(self) -> None:
        """Does nothing: every call reads lengths and masks."""

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        out = fp32_attention(q, kv, self.plan, params, first)
        return planned_attention(q, kv, self.plan, params, first) if out is None else out

    def states(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> State:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device="cpu")
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
    """Attention of sequences with shared prefixes, to pages of keys and values.

    The attention to each shared prefix and to the other positions of each sequence is merged by log-sum-exp.
    """

    def __init__(self, prefixes: PrefixPlan) -> None:
        self._prefixes, self.plan = prefixes, prefixes.own
        self._own = _Trees(prefixes.own)
        self._shared: dict[tuple[int, int, int], _Trees] = {}

    @property
    def repeats(self) -> bool:
        """See ``_Trees``: while no sequences share a prefix."""
        return not self._prefixes.prefixes

    def over(self, plan: Plan) -> Self:
        raise NotImplementedError("attention to shared prefixes has only one plan")

    def begin(self) -> None:
        """Does nothing: every call reads the buffers of the plans."""

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        return self.states(q, kv, params, first)[0]

    def states(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> State:
        assert first is None, "slots with shared prefixes have no windows"
        assert kv.table is not None
        count = q.shape[0] // self._prefixes.batch
        out, lse = self._own.states(q, kv, params)
        alone = replace(params, sinks=None)
        for start, length, begin, rows in self._prefixes.prefixes:
            queries = slice(begin * count, (begin + rows) * count)
            attention = self._attention_to(start, length, rows * count)
            part = attention.states(q[queries], kv._replace(table=kv.table[begin : begin + 1]), alone)
            out[queries], lse[queries] = reference.merge_pair(out[queries], lse[queries], *part)
        return out, lse

    def _attention_to(self, start: int, length: int, queries: int) -> _Trees:
        """Returns the attention of ``queries`` queries to ``length`` positions of a prefix."""
        key = start, length, queries
        if key not in self._shared:
            if len(self._shared) > _MOST_PLANS:
                self._shared.clear()
            nothing = torch.ones(queries, 0, dtype=torch.bool, device="cpu")
            plan = plan_trees(self.plan.heads, [nothing], [length], device="cpu")
            plan.segments[1] = start
            self._shared[key] = _Trees(plan)
        return self._shared[key]
