"""Exact attention: the arguments of a backend's ``exact.attention``, and its definition."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import KV, AttentionParams, unpack_mask


class Near(NamedTuple):
    """Holds what all layers of a forward on a GPU need to know of its tree.

    Attributes:
        positions: int32 ``[B * T]``, of the queries.
        slots: int32 ``[B * T, n]``, of the newest positions that a query sees, see ``positions.near_start``.
    """

    positions: Tensor
    slots: Tensor


@dataclass(frozen=True)
class ExactAttention:
    """Requests attention of T new tokens per sequence to the earlier positions and to their ancestors.

    What a query gets depends on its own position and on the keys and values that it sees alone, bit for bit:
    not on T or B, on the slots of its ancestors, or on how many of the tokens before it are new ones.

    Attributes:
        q: ``[B * T, H_q, D]``, rotated.
        kv: keys and values without scales.
        params: how the layer attends; the window is not in ``mask``.
        lengths: int32 ``[B]``, positions before the new tokens, whose slots come after them.
        mask: int64 ``[B, planned, words]``, planned at least T; bit j of word w of query t: it sees new token
            ``64 w + j``, which is itself or an ancestor; a token comes after its ancestors. The number of new
            tokens that a query sees is thus one more than its depth.
        near: from ``launch.near``, once for all layers; None to compute it. It is not read on the CPU.
    """

    q: Tensor
    kv: KV
    params: AttentionParams
    lengths: Tensor
    mask: Tensor
    near: Near | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return self.q.shape[0] // self.lengths.shape[0]


def definition(request: ExactAttention) -> Tensor:
    """Computes the result of the backends, ``[B * T, H_q, D_v]``, in plain torch; its bits may differ."""
    outs = []
    for query, (slots, first) in enumerate(seen_slots(request)):
        b = query // request.tokens
        keys, values = (
            _gathered(t, request.kv.table, b, slots[first:]) for t in (request.kv.k, request.kv.v)
        )
        nothing = torch.ones(1, 0, dtype=torch.bool, device=request.q.device)
        out, _ = reference.tree_attention(
            request.q[query][None, :, None], keys, values, nothing, scale=request.params.scale,
            softcap=request.params.softcap, sinks=request.params.sinks,
        )  # fmt: skip
        outs.append(out[0, :, 0])
    return torch.stack(outs)


def seen_slots(request: ExactAttention) -> list[tuple[Tensor, int]]:
    """Returns for each query the slots of positions 0 to its own, and the first position that it sees."""
    found = []
    for b, length in enumerate(request.lengths.tolist()):
        for t in range(request.tokens):
            tail = unpack_mask(request.mask[b, t].cpu())[: request.tokens].nonzero()[:, 0]
            slots = torch.cat([torch.arange(length), length + tail]).to(request.q.device)
            position, first = len(slots) - 1, 0
            if window := request.params.window:
                start = position // window * window
                first = max(0, start if request.params.chunked else position - window + 1)
            found.append((slots, first))
    return found


def _gathered(kv: Tensor, table: Tensor | None, b: int, slots: Tensor) -> Tensor:
    """``[1, H_kv, n, D]`` of a sequence's slots."""
    if table is None:
        return kv[b : b + 1, :, slots]
    own, page = table[b], kv.shape[2]
    pages = (own if own.ndim == 2 else own.expand(kv.shape[1], -1))[:, slots // page].long()
    heads = torch.arange(kv.shape[1], device=kv.device)[:, None]
    return kv[pages, heads, slots % page][None]
