"""Linear layers of routed experts for few tokens: the reference in plain torch for the Triton kernel."""

import torch
from torch import Tensor

from triforce_tree.kernels.linear import reference
from triforce_tree.kernels.operators import fake, operator

# Number of pairs of token and expert whose weights are gathered at once.
_TOGETHER = 64


@operator("expert_linear", triton=".experts_kernels")
def expert_linear(
    x: Tensor, ids: Tensor, words: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    """Multiplies each token by the weights of each of its experts.

    Args:
        x: ``[R, K]``, or ``[R * k, K]`` with a row for each pair of token and expert.
        ids: int64 or int32 ``[R, k]``, the k experts of each of R tokens, 0 to E - 1.
        words: weights ``[E, N, K]`` with any strides for 16 bits (or fp32 without a kernel), else packed
            int16 words ``[E, N, 128 * blocks]``.
        scales: scales of packed words, fp32 ``[E, N]`` for 8 bits, bf16 ``[blocks, E * N, 4]`` for 4 bits
            (``reference.quantise`` of ``[E * N, K]``); else None.
        bias: ``[E, N]`` or None.
        bits: 16, 8 or 4.

    Returns:
        ``[R * k, N]`` in x's dtype; packed weights are multiplied in fp32.
    """
    flat = ids.reshape(-1).long()
    rows = x.repeat_interleave(flat.numel() // x.shape[0], 0) if x.shape[0] else x
    parts = [
        _gathered(part, own, words, scales, bits)
        for part, own in zip(rows.split(_TOGETHER), flat.split(_TOGETHER), strict=True)
    ]
    out = torch.cat(parts) if parts else x.new_empty(0, words.shape[1])
    return (out if bias is None else out + bias[flat]).to(x.dtype)


@fake("expert_linear")
def _(x: Tensor, ids: Tensor, words: Tensor, *_: object) -> Tensor:
    return x.new_empty(ids.numel(), words.shape[1])


def _gathered(x: Tensor, ids: Tensor, words: Tensor, scales: Tensor | None, bits: int) -> Tensor:
    """Returns products ``[P, N]`` of rows ``[P, K]`` with their experts ``[P]``; fp32 for packed weights."""
    weight = words[ids]
    if bits < 16:
        assert scales is not None, "packed words have scales"
        pairs, outs, length = weight.shape
        if bits == 8:
            own = scales[ids].reshape(-1)
        else:
            own = scales.view(scales.shape[0], -1, outs, 4)[:, ids].reshape(scales.shape[0], -1, 4)
        flat = reference.dequantise(weight.view(pairs * outs, length), own, bits, x.shape[1])
        weight, x = flat.view(pairs, outs, -1), x.float()
    return torch.bmm(weight, x[:, :, None])[..., 0]


def quantise_experts(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantises ``[E, N, K]`` to words ``[E, N, 128 * blocks]`` and scales for ``expert_linear``.

    Experts are quantised one after another, so that a strided weight is never copied as a whole.
    """
    parts = [reference.quantise(expert, bits) for expert in weight]
    words = torch.stack([words for words, _ in parts])
    scales = [scales for _, scales in parts]
    return words, torch.stack(scales) if bits == 8 else torch.cat(scales, 1).contiguous()
