"""A Triton kernel of ``mask_logits``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import matrix, warps

_BLOCK = 4096


@triton.jit
def mask_logits_kernel(
    out_ptr,  # [R, V]
    logits_ptr,  # [R, V], like the next one with a stride between rows
    words_ptr,  # int32 [R, W]
    logits_r,
    words_r,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    word = tl.load(words_ptr + row * words_r + at // 32, mask=inside, other=0)
    logit = tl.load(logits_ptr + row * logits_r + at, mask=inside, other=0.0)
    allowed = (word >> (at % 32)) & 1
    tl.store(out_ptr + row * vocab + at, tl.where(allowed != 0, logit, float("-inf")), mask=inside)


def mask_logits(logits: Tensor, words: Tensor) -> Tensor:
    """See ``masked.mask_logits``.

    Raises:
        ValueError: words are not int32, or their number does not fit the vocabulary.
    """
    vocab = logits.shape[-1]
    count = -(-vocab // 32)
    if words.dtype != torch.int32 or words.shape != (*logits.shape[:-1], count):
        raise ValueError(
            f"words are {words.dtype} {list(words.shape)}; the kernel takes int32 "
            f"{[*logits.shape[:-1], count]} for these logits"
        )
    rows, rows_words = matrix(logits), matrix(words)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(vocab, _BLOCK))
        mask_logits_kernel[grid](
            out, rows, rows_words, rows.stride(0), rows_words.stride(0), vocab, BLOCK=_BLOCK, **warps(8)
        )
    return out
