"""Launches exact attention on a GPU: one kernel per forward for near positions, and three per layer.

No function waits for the device, and the kernels read lengths and masks from device buffers, so that a
captured graph stays valid.
"""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from triforce_tree.kernels.attention.configs import KernelConfig, choose, smaller
from triforce_tree.kernels.attention.exact.attention import ExactAttention, Near
from triforce_tree.kernels.attention.exact.kernels import (
    NEAR,
    TILE,
    chunks_of,
    exact_combine_kernel,
    exact_far_kernel,
    exact_near_kernel,
    near_slots_kernel,
)
from triforce_tree.kernels.attention.launch import row_views
from triforce_tree.kernels.device import Device, describe
from triforce_tree.kernels.fitting import fitted, within
from triforce_tree.kernels.launching import launched_early, warps

_ROWS = 64
"""Number of query rows for which tiles are chosen, whatever the actual number."""
_MOST_DIM = 512
# Limit on registers per thread for up to so many columns, which lets five programs run on a multiprocessor;
# with more columns it would spill.
_NEAR_REGISTERS, _NEAR_COLUMNS = 96, 128
# Number of partial outputs that the merging kernel loads at a time.
_TOGETHER = 16


def near(lengths: Tensor, mask: Tensor, tokens: int) -> Near:
    """Computes the positions of the queries of a forward and the slots of their near positions.

    Args:
        lengths, mask: as in ``ExactAttention``.
        tokens: T.
    """
    (batch, planned, words), device = mask.shape, lengths.device
    positions = torch.empty(batch * tokens, dtype=torch.int32, device=device)
    slots = torch.empty(batch * tokens, NEAR.value, dtype=torch.int32, device=device)
    near_slots_kernel[(batch * tokens,)](
        positions, slots, lengths, mask, tokens, planned, words,
        BLOCK=triton.next_power_of_2(64 * words),
    )  # fmt: skip
    return Near(positions, slots)


def configuration(dim: int, value_dim: int, element_bytes: int, device: Device) -> KernelConfig:
    """Returns the tiles for heads of these widths, whatever the number of queries."""
    chosen = choose(_ROWS, dim, element_bytes, device, value_dim)
    return replace(chosen, block_n=min(chosen.block_n, TILE.value))


def attention(request: ExactAttention) -> Tensor:
    """Computes exact attention, ``[B * T, H_q, D_v]``, for bf16 and fp16.

    Raises:
        ValueError: the kernels do not support these dtypes, shapes or layouts.
    """
    q, (k, v, table, _), params = request.q.contiguous(), request.kv, request.params
    window, softcap = params.window or 0, params.softcap or 0.0
    (queries, q_heads, dim), (kv_heads, value_dim) = q.shape, (k.shape[1], v.shape[3])
    group, batch, tokens = q_heads // kv_heads, request.lengths.shape[0], request.tokens
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; use bfloat16 or float16")
    if max(dim, value_dim) > _MOST_DIM:
        raise ValueError(f"heads have {max(dim, value_dim)} elements; exact attention supports {_MOST_DIM}")
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("the last dimension of k and v must be dense; call .contiguous() on them")
    found = request.near or near(request.lengths, request.mask, tokens)
    page = 0 if table is None else k.shape[2]
    slots = k.shape[2] if table is None else table.shape[-1] * page
    if table is not None and table.ndim == 2:
        table = table[:, None].expand(-1, kv_heads, -1)
    pieces = chunks_of(slots) + 2
    device = describe(q.device)
    early = launched_early(q.device)
    partial_out = torch.empty(queries * q_heads * pieces, value_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(queries * q_heads * pieces, dtype=torch.float32, device=q.device)
    out = torch.empty(queries, q_heads, value_dim, dtype=q.dtype, device=q.device)
    windowed = window > 0
    value_block = max(16, triton.next_power_of_2(value_dim))
    strides = (*k.stride()[:3], *v.stride()[:3], *((0, 0) if table is None else table.stride()[:2]))

    def attend(cfg: KernelConfig) -> None:
        views = None
        if cfg.tma and device.tma and table is None and not windowed:
            views = row_views(k, v, 0, cfg.block_n, q.itemsize)
        tma = views is not None and views.k_rest is None
        blocks = -(-tokens * group // cfg.block_m)
        units = batch * kv_heads * blocks
        made = exact_far_kernel[(units * (pieces - 2),)](
            q, k, v, *((views.k, views.v) if views is not None and tma else (k, v)),
            partial_out, partial_lse, found.positions, request.lengths if table is None else table,
            params.scale, softcap, *strides, *(views.steps if views is not None else (0, 0, 0)),
            tokens, blocks, pieces, units, window,
            GROUP=group, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
            BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_V=value_block,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n,
            PAGE=page, TMA=tma, WINDOW=windowed, CHUNKED=params.chunked, SOFTCAP=softcap > 0,
            STAGES=cfg.stages, **early, **warps(cfg.warps),
        )  # fmt: skip
        within(made, device)

    config = configuration(dim, value_dim, q.itemsize, device)
    fitted(config, smaller, attend)
    group_block = max(16, triton.next_power_of_2(group))
    limit = {"maxnreg": _NEAR_REGISTERS} if device.ptx and value_block <= _NEAR_COLUMNS else {}
    blocks = -(-tokens * group // group_block)
    exact_near_kernel[((queries + batch * blocks) * kv_heads,)](
        q, k, v, partial_out, partial_lse, found.positions, found.slots, request.lengths,
        request.lengths if table is None else table, params.scale, softcap, *strides,
        tokens, pieces, queries * kv_heads, blocks, window,
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_V=value_block, BLOCK_N=config.block_n,
        BLOCK_G=group_block, PAGE=page, WINDOW=windowed, CHUNKED=params.chunked,
        SOFTCAP=softcap > 0, **early, **warps(4, **limit),
    )  # fmt: skip
    options = warps(max(1, _TOGETHER * value_block // 1024))
    exact_combine_kernel[(queries, q_heads)](
        out, partial_out, partial_lse, found.positions, params.sinks, pieces, window,
        HEADS=q_heads, DIM=value_dim, BLOCK_D=value_block, TOGETHER=_TOGETHER, WINDOW=windowed,
        CHUNKED=params.chunked, SINKS=params.sinks is not None, **early, **options,
    )  # fmt: skip
    return out
