"""RMS norm and rotary embeddings, each one call of the C library for few fp32 rows (``layers.h``)."""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import usable

_NORM = struct.Struct("5qd")
_ROTARY = struct.Struct("18q")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, like ``rms_norm``."""
    library, size = usable(x, weight), x.shape[-1]
    if library is None or not x.is_contiguous():
        return torch.nn.functional.rms_norm(x, (size,), weight, eps)
    out = torch.empty_like(x)
    library.rms_norm(
        _NORM.pack(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    )
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Applies rotary embeddings to queries and keys (``x cos + rotate_half(x) sin``).

    Args:
        q, k: ``[B, H_q, T, D]`` and ``[B, H_kv, T, D]``, any strides with the last dimension dense.
        cos, sin: ``[B, T, D]``, or ``[1, T, D]`` for all sequences.

    Returns:
        rotated queries and keys, or None for arguments of other shapes or dtypes.
    """
    batch, heads, tokens, dim = q.shape
    fits = cos.shape == sin.shape and cos.shape[1:] == (tokens, dim) and cos.shape[0] in (1, batch)
    library = usable(q, k, cos, sin) if fits and k.shape[2:] == (tokens, dim) and not dim % 2 else None
    if library is None or not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    kv_heads = k.shape[1]
    q_out, k_out = q.new_empty(batch, tokens, heads, dim), k.new_empty(batch, tokens, kv_heads, dim)
    request = _ROTARY.pack(
        q.data_ptr(), q_out.data_ptr(), *q.stride()[:3], heads,
        k.data_ptr(), k_out.data_ptr(), *k.stride()[:3], kv_heads,
        cos.data_ptr(), sin.data_ptr(), batch, tokens, dim, tokens * dim if cos.shape[0] > 1 else 0,
    )  # fmt: skip
    library.rotary(request)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
