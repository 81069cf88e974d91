"""The parts of a decoder layer before and after attention for few fp32 rows, in C (``decoder.h``)."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import usable
from triforce_tree.kernels.cpu.fp32.linear import MOST_ROWS, Matrix

_PROJECT = struct.Struct("29qd")
_FINISH = struct.Struct("28qd")


class Norm(NamedTuple):
    """Weight, fp32 ``[size]``, and epsilon of an RMS norm."""

    weight: Tensor
    eps: float


def project(
    x: Tensor, norm: Norm, matrices: tuple[Matrix, Matrix, Matrix], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Computes the queries, keys and values of a decoder layer from its input.

    The input is normalised and multiplied by three matrices. Queries and keys are rotated as by
    ``layers.rotary``.

    Args:
        x: ``[B, T, size]``, with at most ``MOST_ROWS`` rows.
        cos, sin: ``[B, T, D]``, or ``[1, T, D]`` for all sequences; D is the size of a head.

    Returns:
        ``[B, H_q, T, D]`` and twice ``[B, H_kv, T, D]``, each dense by tokens; None for arguments of other
        shapes, dtypes or layouts.
    """
    batch, tokens, size = x.shape
    rows, dim = batch * tokens, cos.shape[-1]
    fits = cos.shape == sin.shape and cos.shape[1] == tokens and cos.shape[0] in (1, batch)
    library = usable(x, norm.weight, cos, sin) if fits and 0 < rows <= MOST_ROWS and not dim % 2 else None
    if library is None or not all(t.is_contiguous() for t in (x, cos, sin)):
        return None
    outs = [by.weight.shape[0] for by in matrices]
    if any(count % dim for count in outs):
        return None
    made = [
        torch.empty_strided(
            (batch, count // dim, tokens, dim),
            (tokens * count, dim, count, 1),
            dtype=torch.float32,
            device="cpu",
        )
        for count in outs
    ]
    normed = torch.empty_like(x)
    library.project(
        _PROJECT.pack(
            x.data_ptr(), norm.weight.data_ptr(), *matrices[0].fields, *matrices[1].fields,
            *matrices[2].fields, *outs, *(t.data_ptr() for t in made), normed.data_ptr(), cos.data_ptr(),
            sin.data_ptr(), rows, size, tokens, tokens * dim if cos.shape[0] > 1 else 0, dim,
            torch.get_num_threads(), norm.eps,
        )
    )  # fmt: skip
    return made[0], made[1], made[2]


def finish(
    attended: Tensor, residual: Tensor, norm: Norm, projection: Matrix, gate: Matrix, up: Matrix, down: Matrix
) -> Tensor | None:
    """Computes the part of a decoder layer after attention: the output projection and a gated MLP.

    Each of the two is added to the residual stream.

    Args:
        attended: ``[B, T, H_q * D_v]``.
        residual: ``[B, T, size]``, the input of the layer, at most ``MOST_ROWS`` rows.
        norm: norm of the MLP's input.

    Returns:
        ``[B, T, size]``; None for arguments of other dtypes or layouts.
    """
    size, neurons = residual.shape[-1], gate.weight.shape[0]
    rows = residual.numel() // size
    library = usable(attended, residual, norm.weight) if 0 < rows <= MOST_ROWS else None
    if library is None or not (attended.is_contiguous() and residual.is_contiguous()):
        return None
    out, work = torch.empty_like(residual), residual.new_empty(rows * (2 * size + neurons))
    joined = work.data_ptr()
    normed = joined + 4 * rows * size
    library.finish(
        _FINISH.pack(
            attended.data_ptr(), residual.data_ptr(), norm.weight.data_ptr(), *projection.fields,
            *gate.fields, *up.fields, *down.fields, joined, normed, normed + 4 * rows * size, out.data_ptr(),
            rows, attended.shape[-1], size, neurons, torch.get_num_threads(), norm.eps,
        )
    )  # fmt: skip
    return out
