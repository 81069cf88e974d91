"""Logits under masks of allowed tokens, one bit for each token."""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator


@operator("mask_logits", triton=".masked_kernels", cpu=".masked_host")
def mask_logits(logits: Tensor, words: Tensor) -> Tensor:
    """Returns a copy of the logits in which those of tokens that are not allowed are -inf.

    Args:
        logits: ``[..., V]``, of a floating dtype.
        words: int32 ``[..., W]`` with W = ceil(V / 32): bit j of word l says whether token 32 l + j is
            allowed. Bits of the last word that belong to no token are ignored.
    """
    # A tensor has the bytes of its words in the order of the machine, lowest first.
    of_byte = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = words.contiguous().view(torch.uint8)[..., None] >> of_byte & 1
    return logits.masked_fill(bits.flatten(-2)[..., : logits.shape[-1]] == 0, -torch.inf)


@fake("mask_logits")
def _(logits: Tensor, words: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)
