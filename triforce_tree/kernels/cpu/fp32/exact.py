"""Exact attention on the CPU by ``exact.h``; see ``attention.exact``."""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.attention.exact.attention import ExactAttention
from triforce_tree.kernels.cpu.fp32.library import library, page_table, run_with_work

_REQUEST = struct.Struct("32qd")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def attention(request: ExactAttention) -> Tensor:
    """Computes exact attention, ``[B * T, H_q, D_v]``, for fp32, bf16 and fp16 in host memory.

    Raises:
        ValueError: this machine has no C kernel, or the kernel does not support the arguments.
    """
    own, q, (k, v, table, _), params = library(), request.q, request.kv, request.params
    if own is None:
        raise ValueError("exact attention on the CPU needs AVX2 and a C compiler (gcc or clang); install one")
    if k.dtype not in _KINDS or k.dtype != v.dtype or q.dtype != k.dtype:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; use float32, bfloat16 or float16"
        )
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("the last dimension of k and v must be dense; call .contiguous() on them")
    batch, planned = request.lengths.shape[0], request.mask.shape[1]
    tokens, (kv_heads, dim, value_dim) = q.shape[0] // batch, (k.shape[1], k.shape[3], v.shape[3])
    group, sinks = q.shape[1] // kv_heads, params.sinks
    scaled = (q.float() * params.scale).contiguous()
    out = torch.empty(*q.shape[:2], value_dim, dtype=torch.float32, device="cpu")
    mask = request.mask.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    run_with_work(own.exact_attention, _REQUEST, (
        scaled.data_ptr(), k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3],
        *page_table(table), k.shape[2], request.lengths.data_ptr(), mask.data_ptr(), mask.shape[2],
        planned, tokens, 0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
        batch, tokens, kv_heads, group, dim, value_dim,
        torch.get_num_threads(), _KINDS[k.dtype], params.window or 0, params.chunked, params.softcap or 0.0,
    ))  # fmt: skip
    return out.to(q.dtype)


def near(lengths: Tensor, mask: Tensor, tokens: int) -> None:
    """Returns None, because the kernel reads the mask."""
