"""Triton kernels of ``softmax``, in which many programs share a row of a long vocabulary, in two launches.

Torch computes each row in one block, so for a single row of 128,256 elements only one multiprocessor works.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import matrix, warps

# Longest row for torch's softmax, and approximate number of slices of a longer row.
_WHOLE, _SLICES = 16384, 32
_MOST_BLOCK = 8192
# Lower than all scores; -inf would give NaN in slices without scores.
_FLOOR = tl.constexpr(-3.0e38)


@triton.jit
def slice_sums_kernel(
    top_ptr,  # fp32 [R, S], largest score of a slice
    mass_ptr,  # fp32 [R, S], sum of exp(score - largest)
    scores_ptr,  # fp32 [R, V], with a stride between rows
    scores_r,
    vocab,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + row * scores_r + at, mask=at < vocab, other=float("-inf"))
    top = tl.maximum(tl.max(score, 0), _FLOOR)
    out = row * tl.num_programs(1) + part
    tl.store(top_ptr + out, top)
    tl.store(mass_ptr + out, tl.sum(tl.exp(score - top), 0))


@triton.jit
def slice_probs_kernel(
    probs_ptr,  # fp32 [R, V]
    scores_ptr,  # fp32 [R, V], with a stride between rows
    top_ptr,  # fp32 [R, S]
    mass_ptr,  # fp32 [R, S]
    scores_r,
    vocab,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slices, each = tl.num_programs(1), tl.arange(0, BLOCK_S)
    top = tl.load(top_ptr + row * slices + each, mask=each < slices, other=_FLOOR)
    mass = tl.load(mass_ptr + row * slices + each, mask=each < slices, other=0.0)
    most = tl.max(top, 0)
    share = 1.0 / tl.sum(mass * tl.exp(top - most), 0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + row * scores_r + at, mask=at < vocab, other=0.0)
    tl.store(probs_ptr + row * vocab + at, tl.exp(score - most) * share, mask=at < vocab)


def softmax_rows(scores: Tensor) -> Tensor:
    """See ``softmax.softmax_rows``.

    Raises:
        ValueError: scores are not fp32.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"scores are {scores.dtype}; the kernel takes float32")
    vocab = scores.shape[-1]
    if vocab <= _WHOLE or not scores.numel():
        return scores.softmax(-1)
    flat, probs = matrix(scores), torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    rows, stride = flat.shape[0], flat.stride(0)
    # It depends only on the vocabulary, so that the order of a row's sums does not depend on other rows.
    block = min(_MOST_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, _SLICES)))
    slices = triton.cdiv(vocab, block)
    tops = torch.empty(rows, slices, dtype=torch.float32, device=scores.device)
    masses = torch.empty_like(tops)
    options = warps(max(1, block // 512))
    slice_sums_kernel[(rows, slices)](tops, masses, flat, stride, vocab, BLOCK=block, **options)
    slice_probs_kernel[(rows, slices)](
        probs, flat, tops, masses, stride, vocab,
        BLOCK=block, BLOCK_S=triton.next_power_of_2(slices), **options,
    )  # fmt: skip
    return probs
