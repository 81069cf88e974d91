"""Triton kernel of linear layers of routed experts, limited by reading the weights of each expert once.

There is a program for each tile of the outputs and each pair of token and expert. Pairs with the same expert
form groups of ``BLOCK_M``. The program of the first pair of a group computes all pairs of the group, and the
other programs end at once. So no pairs are sorted, and the launch is the same for any routing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.device import describe
from triforce_tree.kernels.fitting import fitted, within
from triforce_tree.kernels.launching import dense, warps
from triforce_tree.kernels.linear import experts
from triforce_tree.kernels.linear.configs import LinearConfig, shared_bytes, smaller
from triforce_tree.kernels.linear.kernel import _scale
from triforce_tree.kernels.linear.launch import _packed_scales, _unpacking
from triforce_tree.kernels.linear.unpack import four_planes, two_planes

MOST_PAIRS = 512
"""Largest number of pairs of token and expert of one launch, because each program reads all of them."""

_BLOCK_M = 16
_CONFIGS = {
    16: LinearConfig(64, 128, 1, 4, 4, tma=False),
    8: LinearConfig(64, 128, 1, 4, 3, tma=False),
    4: LinearConfig(64, 128, 1, 4, 3, tma=False),
}


@triton.jit
def _members(ids_ptr, pair, expert, pairs, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the pairs ``[BLOCK_M]`` that this program computes, which have one expert, padded with -1."""
    at = tl.arange(0, BLOCK_P)
    same = tl.load(ids_ptr + at, mask=at < pairs, other=-1) == expert
    before = tl.sum((same & (at < pair)).to(tl.int32), 0)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1 - before
    chosen = same[None, :] & (rank[None, :] == tl.arange(0, BLOCK_M)[:, None]) & (before % BLOCK_M == 0)
    return tl.sum(tl.where(chosen, at[None, :] + 1, 0), 1) - 1


@triton.jit
def _columns(x_rows, column, there, ins, WIDTH: tl.constexpr):
    """Loads columns of x from ``column`` on, transposed to ``[WIDTH, M]``; zero out of bounds."""
    k = column + tl.arange(0, WIDTH)
    return tl.load(x_rows + k[None, :], mask=there[:, None] & (k < ins)[None, :], other=0.0).T


@triton.jit(do_not_specialize=["pairs"])
def expert_linear_kernel(
    out_ptr,  # [pairs, outs]
    x_ptr,  # [pairs // PER_ROW, ins]
    ids_ptr,  # [pairs]
    w_ptr,  # 16-bit [E, outs, words]
    scales_ptr,  # fp32 [E, outs] for 8 bits, int64 [blocks, E * outs] for 4
    bias_ptr,  # [E, outs]
    pairs,
    outs,
    ins,
    words,
    all_outs,  # E * outs
    stride_x,
    stride_e,
    stride_n,
    stride_k,
    PER_ROW: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    Kind: tl.constexpr = x_ptr.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = 1 if BITS == 16 else 128 // WIDTH
    tile, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids_ptr + pair)
    mine = _members(ids_ptr, pair, expert, pairs, BLOCK_P, BLOCK_M)
    there = mine >= 0
    # Programs without pairs make no steps. A branch instead would prevent the pipelining of the loop.
    steps = tl.where(tl.max(mine, 0) >= 0, tl.cdiv(words, WIDTH), 0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_outs = n < outs
    x_rows = x_ptr + (tl.maximum(mine, 0) // PER_ROW).to(tl.int64)[:, None] * stride_x
    w_rows = w_ptr + expert.to(tl.int64) * stride_e + n.to(tl.int64)[:, None] * stride_n
    own = expert.to(tl.int64) * outs + n
    if BITS == 8:
        scale = tl.load(scales_ptr + own, mask=in_outs, other=0.0)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        k = step * WIDTH + tl.arange(0, WIDTH)
        w = tl.load(w_rows + k[None, :] * stride_k, mask=in_outs[:, None] & (k < words)[None, :], other=0)
        column = step // PARTS * (128 * PLANES) + step % PARTS * WIDTH
        if BITS == 16:
            acc = tl.dot(w, _columns(x_rows, step * WIDTH, there, ins, WIDTH), acc)
        elif BITS == 8:
            a, b = two_planes(w, Kind, ASM)
            acc += tl.dot(a, _columns(x_rows, column, there, ins, WIDTH)) * scale
            acc += tl.dot(b, _columns(x_rows, column + 128, there, ins, WIDTH)) * scale
        else:
            scales = tl.load(scales_ptr + step // PARTS * all_outs + own, mask=in_outs, other=0)
            a, b, c, d = four_planes(w, Kind, ASM)
            acc += tl.dot(a, _columns(x_rows, column, there, ins, WIDTH)) * _scale(scales, 0)
            acc += tl.dot(b, _columns(x_rows, column + 128, there, ins, WIDTH)) * _scale(scales, 1)
            acc += tl.dot(c, _columns(x_rows, column + 256, there, ins, WIDTH)) * _scale(scales, 2)
            acc += tl.dot(d, _columns(x_rows, column + 384, there, ins, WIDTH)) * _scale(scales, 3)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + own, mask=in_outs, other=0.0).to(tl.float32)[:, None]
    at = tl.maximum(mine, 0).to(tl.int64)[None, :] * outs + n[:, None]
    tl.store(out_ptr + at, acc.to(Kind), mask=there[None, :] & in_outs[:, None])


def expert_linear(
    x: Tensor, ids: Tensor, words: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    """See ``linear.experts.expert_linear``; dtypes other than bf16 and fp16 run its definition."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return experts.expert_linear.definition(x, ids, words, scales, bias, bits)
    _check(x, ids, words, scales, bits)
    tokens, per_token = ids.shape
    out = torch.empty(tokens * per_token, words.shape[1], dtype=x.dtype, device=x.device)
    x, ids = dense(x), ids.contiguous()
    together = max(1, MOST_PAIRS // per_token)
    per_row = ids.numel() // max(1, x.shape[0])
    for first in range(0, tokens, together):
        some = ids[first : first + together].reshape(-1)
        start = first * per_token
        rows = x[start // per_row : (start + some.numel()) // per_row]
        _launch(out[start : start + some.numel()], rows, some, words, scales, bias, bits, per_row)
    return out


def _launch(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    words: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    bits: int,
    per_row: int,
) -> None:
    device = describe(x.device)
    count, outs, length = words.shape
    config: LinearConfig = _CONFIGS[bits]
    while shared_bytes(config, bits, _BLOCK_M, device) > device.shared_bytes:
        less = smaller(config)
        assert less is not None, "the smallest tile fits every GPU"
        config = less

    def multiply(cfg: LinearConfig) -> None:
        made = expert_linear_kernel[(triton.cdiv(outs, cfg.block_n), ids.numel())](
            out, x, ids, words, _packed_scales(scales, bits), bias,
            ids.numel(), outs, x.shape[1], length, count * outs,
            x.stride(0), words.stride(0), words.stride(1), words.stride(2),
            PER_ROW=per_row, BITS=bits, BLOCK_P=max(16, triton.next_power_of_2(ids.numel())),
            BLOCK_M=_BLOCK_M, BLOCK_N=cfg.block_n, WIDTH=cfg.width, STAGES=cfg.stages,
            ASM=_unpacking(device), **warps(cfg.warps),
        )  # fmt: skip
        within(made, device)

    fitted(config, smaller, multiply)


def _check(x: Tensor, ids: Tensor, words: Tensor, scales: Tensor | None, bits: int) -> None:
    count, outs, length = words.shape
    if ids.ndim != 2 or x.shape[0] not in (ids.shape[0], ids.numel()):
        raise ValueError(f"ids {list(ids.shape)} do not route {x.shape[0]} rows; give [tokens, experts each]")
    if bits == 16 and (words.dtype != x.dtype or length != x.shape[1]):
        raise ValueError(f"weights are {words.dtype} [..., {length}]; x is {x.dtype} [..., {x.shape[1]}]")
    if bits < 16 and (words.dtype != torch.int16 or scales is None or length * 16 < x.shape[1] * bits):
        raise ValueError(f"words {words.dtype} [{count}, {outs}, {length}] do not hold {x.shape[1]} columns")
