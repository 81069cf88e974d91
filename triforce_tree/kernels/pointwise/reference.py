"""Rotary embeddings and gated activations in plain torch, which define the kernels.

Like the layers of transformers, they round after each operation to the dtype of the tensors. So the results
of the kernels have the same bits, except for differences between implementations of the exponential.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
"""Activations of :func:`gated` by name."""


@operator("rotary", triton=".launch")
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Applies rotary position embeddings (RoFormer, arXiv 2104.09864), with rotated halves as in GPT-NeoX.

    The first R elements of a head are rotated, the others copied. Products are rounded to the dtype of q if
    cos and sin have this dtype; if they are wider, only the result is rounded.

    Args:
        q, k: ``[B, H_q, T, D]`` and ``[B, H_kv, T, D]`` of one dtype, any strides.
        cos, sin: ``[B, T, R]`` or ``[1, T, R]`` of one dtype, R even and at most D.

    Returns:
        rotated q and k, views of contiguous ``[B, T, H, D]``.
    """
    width = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]

    def rotated(x: Tensor) -> Tensor:
        first, second = x[..., : width // 2], x[..., width // 2 : width]
        turned = (x[..., :width] * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
        whole = torch.cat([turned, x[..., width:]], -1)
        return whole.transpose(1, 2).contiguous().transpose(1, 2)

    return rotated(q), rotated(k)


@fake("rotary")
def _(q: Tensor, k: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    outs = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in (q, k)]
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


@operator("gated", triton=".launch")
def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Returns ``activation(gate) * up``, rounded after the activation and after the product.

    Args:
        gate, up: ``[..., N]``, which may be halves of one tensor ``[..., 2 N]``.
        activation: a name in ``ACTIVATIONS``.

    Returns:
        contiguous ``[..., N]``.
    """
    return (ACTIVATIONS[activation](gate) * up).contiguous()


@fake("gated")
def _(gate: Tensor, *args: object) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)
