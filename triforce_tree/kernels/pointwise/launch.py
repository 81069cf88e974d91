"""Triton kernels of rotary embeddings and gated activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import dense, launched_early, matrix, wait_for_previous, warps
from triforce_tree.kernels.pointwise.reference import ACTIVATIONS

# Number of heads, and of elements of a row, of one program.
_HEADS, _COLUMNS = 16, 2048


@triton.jit
def _rotate(
    out_ptr,  # [B, T, heads, D]
    x_ptr,
    cos_ptr,
    sin_ptr,
    token,
    sequence,
    tokens,
    first,
    heads,
    stride_b,
    stride_h,
    stride_t,
    dim,
    half,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Rotates ``BLOCK_HEADS`` heads of one token, from head ``first`` on."""
    dtype = out_ptr.dtype.element_ty
    head = first + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    there = (head < heads) & (column < half)
    source = x_ptr + sequence * stride_b + token * stride_t + head.to(tl.int64) * stride_h
    target = out_ptr + ((sequence * tokens + token) * heads + head) * dim
    x1 = tl.load(source + column, mask=there, other=0.0).to(tl.float32)
    x2 = tl.load(source + half + column, mask=there, other=0.0).to(tl.float32)
    c1 = tl.load(cos_ptr + column, mask=column < half, other=0.0).to(tl.float32)
    c2 = tl.load(cos_ptr + half + column, mask=column < half, other=0.0).to(tl.float32)
    s1 = tl.load(sin_ptr + column, mask=column < half, other=0.0).to(tl.float32)
    s2 = tl.load(sin_ptr + half + column, mask=column < half, other=0.0).to(tl.float32)
    a1, b1, a2, b2 = x1 * c1, x2 * s1, x2 * c2, x1 * s2
    if ROUND:
        a1, b1 = a1.to(dtype).to(tl.float32), b1.to(dtype).to(tl.float32)
        a2, b2 = a2.to(dtype).to(tl.float32), b2.to(dtype).to(tl.float32)
    tl.store(target + column, (a1 - b1).to(dtype), mask=there)
    tl.store(target + half + column, (a2 + b2).to(dtype), mask=there)
    if BLOCK_REST > 0:
        rest = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        kept = (head < heads) & (rest < dim)
        tl.store(target + rest, tl.load(source + rest, mask=kept, other=0.0), mask=kept)


# Without this, Triton would compile variants for other numbers of tokens.
@triton.jit(do_not_specialize=["tokens"])
def rotary_kernel(
    q_out_ptr,
    k_out_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    q_heads,
    k_heads,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    cos_stride_b,
    cos_stride_t,
    dim,
    half,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotates ``BLOCK_HEADS`` heads of one token in each program, the heads of q before the heads of k."""
    token, sequence = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    cos_ptr += sequence * cos_stride_b + token * cos_stride_t
    sin_ptr += sequence * cos_stride_b + token * cos_stride_t
    blocks = tl.cdiv(q_heads, BLOCK_HEADS)
    block = tl.program_id(1)
    wait_for_previous(PDL)
    if block < blocks:
        _rotate(
            q_out_ptr, q_ptr, cos_ptr, sin_ptr, token, sequence, tokens, block * BLOCK_HEADS, q_heads,
            q_stride_b, q_stride_h, q_stride_t, dim, half, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, ROUND,
        )  # fmt: skip
    else:
        _rotate(
            k_out_ptr, k_ptr, cos_ptr, sin_ptr, token, sequence, tokens, (block - blocks) * BLOCK_HEADS,
            k_heads, k_stride_b, k_stride_h, k_stride_t, dim, half, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
            ROUND,
        )  # fmt: skip


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.rotary``.

    Raises:
        ValueError: the kernel does not support these shapes or dtypes.
    """
    (batch, q_heads, tokens, dim), width = q.shape, cos.shape[-1]
    shapes = cos.shape == sin.shape and cos.shape[0] in (1, batch) and cos.shape[1] == tokens
    if not shapes or k.shape[::2] != (batch, tokens) or k.shape[3] != dim or width % 2 or width > dim:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)} do not "
            "fit: [B, H, T, D] twice, and [B, T, R] twice with an even R of at most D"
        )
    if q.dtype != k.dtype or cos.dtype != sin.dtype:
        raise ValueError(f"q and k are {q.dtype} and {k.dtype}, cos and sin {cos.dtype} and {sin.dtype}")
    q, k = dense(q), dense(k)
    cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out = (
        torch.empty(batch, tokens, x.shape[1], dim, dtype=x.dtype, device=x.device) for x in (q, k)
    )
    if q_out.numel():
        blocks = triton.cdiv(q_heads, _HEADS) + triton.cdiv(k.shape[1], _HEADS)
        rest = dim - width
        rotary_kernel[(tokens, blocks, batch)](
            q_out, k_out, q, k, cos, sin, tokens, q_heads, k.shape[1],
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), dim, width // 2,
            BLOCK_HEADS=_HEADS, BLOCK_HALF=triton.next_power_of_2(width // 2),
            BLOCK_REST=triton.next_power_of_2(rest) if rest else 0, ROUND=cos.dtype == q.dtype,
            # With fused multiply-add, one of the two products would not be rounded.
            **launched_early(q.device), **warps(4, enable_fp_fusion=False),
        )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


@triton.jit
def gated_kernel(
    out_ptr,  # [rows, columns]
    gate_ptr,
    up_ptr,
    gate_stride,
    up_stride,
    columns,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes ``BLOCK`` elements of one row in each program."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # x / 2 (1 + tanh(z)) = x / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3).
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # Unlike a maximum, this keeps NaN.
        y = tl.where(x < 0.0, 0.0, x)
    y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See ``reference.gated``.

    Raises:
        ValueError: unequal shapes or dtypes, or an unknown activation.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or activation not in ACTIVATIONS:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)}, up is {up.dtype} {list(up.shape)}, activation is "
            f"{activation!r}; the two must be alike, and the activation one of {', '.join(ACTIVATIONS)}"
        )
    columns = gate.shape[-1]
    gates, ups = (matrix(x) for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gated_kernel[(gates.shape[0], triton.cdiv(columns, _COLUMNS))](
            out, gates, ups, gates.stride(0), ups.stride(0), columns,
            ACTIVATION=activation, BLOCK=_COLUMNS, **launched_early(out.device), **warps(4),
        )  # fmt: skip
    return out
