"""Arguments of exact attention, its definition in plain torch, and its use in forwards."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Plan, unpack_mask

MOST_DEPTH = 64
"""Deepest token of a tree: positions so near to a query may be in any slots."""
MOST_ROWS = 128
"""Most new tokens of a sequence on a GPU, as many as compiled layers take."""


class Near(NamedTuple):
    """Positions of a forward's queries and slots of their ancestors, which all layers on a GPU share.

    Attributes:
        positions: int32 ``[B * T]``, position of each query.
        slots: int32 ``[B * T, n]``, KV slots of the near positions of each query, see ``kernels.near_start``.
    """

    positions: Tensor
    slots: Tensor


@dataclass(frozen=True)
class ExactAttention:
    """Arguments of the attention of T new tokens per sequence to earlier positions and to their ancestors.

    The output of a query depends only on its position and on the keys and values that it sees, bit for bit.
    It does not depend on T or B, on the slots of its ancestors, or on how many of the tokens before it are
    new.

    Attributes:
        q: ``[B * T, H_q, D]``, rotated.
        kv: keys and values without scales.
        params: parameters of the layer; its window is not in ``mask``.
        lengths: int32 ``[B]``, positions before the new tokens; the slots of new tokens follow them.
        mask: int64 ``[B, planned, words]``, planned at least T. Bit j of word w of query t says that it sees
            new token ``64 w + j``, which is the query itself or an ancestor. Tokens come after their
            ancestors. So a query sees one more new token than its depth in the tree.
        near: result of ``launch.near``, once for all layers; None computes it in each layer. The CPU does not
            read it.
    """

    q: Tensor
    kv: KV
    params: AttentionParams
    lengths: Tensor
    mask: Tensor
    near: Near | None = None

    @property
    def tokens(self) -> int:
        """Returns T, the number of new tokens of a sequence."""
        return self.q.shape[0] // self.lengths.shape[0]


def definition(request: ExactAttention) -> Tensor:
    """Computes exact attention, ``[B * T, H_q, D_v]``, in plain torch, up to rounding."""
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
    """Returns for each query the slots of positions 0 to its own, and the first position it sees."""
    found = []
    for b, length in enumerate(request.lengths.tolist()):
        for t in range(request.tokens):
            tail = unpack_mask(request.mask[b, t].cpu())[: request.tokens].nonzero()[:, 0]
            slots = torch.cat([torch.arange(length, device="cpu"), length + tail]).to(request.q.device)
            position, first = len(slots) - 1, 0
            if window := request.params.window:
                start = position // window * window
                first = max(0, start if request.params.chunked else position - window + 1)
            found.append((slots, first))
    return found


def _gathered(kv: Tensor, table: Tensor | None, b: int, slots: Tensor) -> Tensor:
    """Returns the keys or values of n slots of sequence ``b``, ``[1, H_kv, n, D]``."""
    if table is None:
        return kv[b : b + 1, :, slots]
    own, page = table[b], kv.shape[2]
    pages = (own if own.ndim == 2 else own.expand(kv.shape[1], -1))[:, slots // page].long()
    heads = torch.arange(kv.shape[1], device=kv.device)[:, None]
    return kv[pages, heads, slots % page][None]


def check_sizes(device: torch.device, queries: int, deepest: int) -> None:
    """Raises ValueError if a tree is deeper than ``MOST_DEPTH``, or larger than ``MOST_ROWS`` on a GPU."""
    if device.type == "cuda" and queries > MOST_ROWS:
        raise ValueError(
            f"exact=True verifies at most {MOST_ROWS} tokens at a time on a GPU, not {queries}; use a "
            "smaller tree or gamma"
        )
    if deepest > MOST_DEPTH:
        raise ValueError(
            f"exact=True verifies at most {MOST_DEPTH} tokens in a line, not {deepest}; reduce "
            "gamma or the depth of tree and other_trees, or give tail_tree=False"
        )


class ExactTrees:
    """Is the ``Attention`` of one tree per sequence whose bits do not depend on other queries.

    Windows are those of ``params``, and not in the plan's mask.

    Args:
        functions: ``AttentionBackend.exact``.
        plan: from ``plan_trees``, of trees of one size whose tokens are all new.
    """

    def __init__(self, functions: Any, plan: Plan) -> None:
        self._functions, self.plan = functions, plan
        self._near: Near | None = None

    def over(self, plan: Plan) -> Self:
        return type(self)(self._functions, plan)

    def begin(self) -> None:
        self._near = None

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        assert kv.scales is None, "8-bit keys and values are refused before"
        batch = len(self.plan.lengths)
        mask = self.plan.mask.view(batch, -1, self.plan.mask.shape[1])
        if self._near is None:
            self._near = self._functions.near(self.plan.lengths, mask, len(q) // batch)
        out: Tensor = self._functions.attention(
            ExactAttention(q, kv, params, self.plan.lengths, mask, self._near)
        )
        return out

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("exact attention is not merged with attention to other slots")
