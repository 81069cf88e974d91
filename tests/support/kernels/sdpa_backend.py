"""A further attention backend, as CONTRIBUTING describes it: torch's own attention, on any device.

It has what every backend must have and nothing more, and shows that views, prefixes and trees of texts need
nothing more.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from triforce_tree.kernels.attention.backend import Attention, AttentionBackend, Capabilities
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Plan, unpack_mask


class SdpaBackend(AttentionBackend):
    name = "sdpa"
    can = Capabilities(devices=("cpu", "cuda"), dtypes=(torch.float32, torch.bfloat16, torch.float16))

    def trees(
        self, plan: Plan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        return SdpaAttention(plan)


@dataclass(frozen=True)
class SdpaAttention:
    """Positions are gathered for each sequence; scores of fp32 give the log-sum-exp."""

    plan: Plan

    def over(self, plan: Plan) -> Self:
        return replace(self, plan=plan)

    def begin(self) -> None:
        """Everything is read at each call."""

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        return self.states(q, kv, params, first)[0]

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        plan, group = self.plan, self.plan.heads.group
        states = []
        for b, (length, tail, start, count) in enumerate(
            zip(plan.lengths.tolist(), *plan.segments[2:5].tolist(), strict=True)
        ):
            rows, positions = slice(start, start + count), torch.arange(length + tail, device=q.device)
            seen = torch.cat(
                [positions[:length].expand(count, -1) >= 0, unpack_mask(plan.mask[rows])[:, :tail]], 1
            )
            if first is not None:
                seen &= positions >= first.first[rows, None]
                # Slots before a window may hold anything.
                positions = positions[int(first.low[b]) :]
                seen = seen[:, int(first.low[b]) :]
            keys, values = (_gathered(t, kv.table, b, positions) for t in (kv.k, kv.v))
            states.append(_state(q[rows], keys, values, seen, params, group))
        outs, lses = zip(*states, strict=True)
        return torch.cat(outs), torch.cat(lses)


def _gathered(pages: Tensor, table: Tensor | None, b: int, positions: Tensor) -> Tensor:
    """Returns ``[H_kv, n, D]``."""
    if table is None:
        return pages[b][:, positions]
    size, own = pages.shape[2], table[b].reshape(-1, table.shape[-1]).expand(pages.shape[1], -1)
    heads = torch.arange(pages.shape[1], device=pages.device)[:, None]
    return pages[own[:, positions // size].long(), heads, positions % size]


def _state(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, params: AttentionParams, group: int
) -> tuple[Tensor, Tensor]:
    own, keys = q.transpose(0, 1), k.repeat_interleave(group, 0)
    scores = (own.float() @ keys.float().mT) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    # The scores as a bias of products that are zero: softcaps are then served too.
    out = torch.nn.functional.scaled_dot_product_attention(
        torch.zeros_like(own).float(), keys.float() * 0, v.repeat_interleave(group, 0).float(), scores
    )
    if params.sinks is not None:
        total = torch.logaddexp(lse, params.sinks.float()[:, None])
        out, lse = out * (lse - total).exp()[..., None], total
    blind = lse == -torch.inf
    return out.masked_fill(blind[..., None], 0.0).transpose(0, 1).to(q.dtype), lse.T
