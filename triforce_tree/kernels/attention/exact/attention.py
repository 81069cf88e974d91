"""Exact attention: on CUDA by Triton (``launch``), on the CPU by C (``kernels.cpu.fp32.exact``)."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.exact.request import ExactAttention, Near
from triforce_tree.kernels.cpu import host
from triforce_tree.kernels.cpu.fp32 import exact as fp32_exact


def attention(request: ExactAttention) -> Tensor:
    """``[B * T, H_q, D_v]`` in the dtype of ``q``.

    What a query gets depends on its own position and on the keys and values that it sees alone, bit for bit:
    not on T or B, on the slots of its ancestors, or on how many of the tokens before it are new ones.

    Raises:
        ValueError: see ``launch.attention`` and ``kernels.cpu.fp32.exact.attention``.
    """
    if request.q.is_cuda:
        # Imported at the first use, so that machines without Triton can import the package.
        from triforce_tree.kernels.attention.exact import launch

        return launch.attention(request)
    return fp32_exact.attention(request)


def near_of(lengths: Tensor, mask: Tensor, tokens: int) -> Near | None:
    """``launch.near``; None on the CPU, where attention does not read it."""
    if not lengths.is_cuda:
        return None
    from triforce_tree.kernels.attention.exact import launch

    return launch.near(lengths, mask, tokens)


def definition(request: ExactAttention) -> Tensor:
    """The same function of its arguments in plain torch, one query at a time, without equal bits."""
    outs = []
    for query, (slots, first) in enumerate(seen_slots(request)):
        b = query // request.tokens
        keys, values = (_gathered(request, t, b, slots[first:]) for t in (request.k, request.v))
        nothing = torch.ones(1, 0, dtype=torch.bool, device=request.q.device)
        out, _ = reference.tree_attention(
            request.q[query][None, :, None], keys, values, nothing, scale=request.scale,
            softcap=request.softcap or None, sinks=request.sinks,
        )  # fmt: skip
        outs.append(out[0, :, 0])
    return torch.stack(outs)


def seen_slots(request: ExactAttention) -> list[tuple[Tensor, int]]:
    """Of each query: the slots of positions 0 to its own, and the first position that it sees."""
    found = []
    for b, length in enumerate(request.lengths.tolist()):
        for t in range(request.tokens):
            tail = host.tail_mask(request.mask[b, t][None].cpu(), request.tokens)[0].nonzero()[:, 0]
            slots = torch.cat([torch.arange(length), length + tail]).to(request.q.device)
            position, first = len(slots) - 1, 0
            if request.window:
                start = position // request.window * request.window
                first = max(0, start if request.chunked else position - request.window + 1)
            found.append((slots, first))
    return found


def _gathered(request: ExactAttention, kv: Tensor, b: int, slots: Tensor) -> Tensor:
    """``[1, H_kv, n, D]`` of a sequence's slots."""
    if request.table is None:
        return kv[b : b + 1, :, slots]
    table, page = request.table[b], kv.shape[2]
    pages = (table if table.ndim == 2 else table.expand(kv.shape[1], -1))[:, slots // page].long()
    heads = torch.arange(kv.shape[1], device=kv.device)[:, None]
    return kv[pages, heads, slots % page][None]
