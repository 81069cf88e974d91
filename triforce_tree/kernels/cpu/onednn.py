"""Products of fp32 rows with matrices by oneDNN, where torch has it."""

from functools import cache

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.cpu_attention import fp32_instructions, vendor

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T + bias`` for ``x`` ``[..., K]`` and ``weight`` ``[N, K]`` of any strides."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@cache
def multiplies_many_rows() -> bool:
    """Returns whether oneDNN multiplies many fp32 rows faster than torch's own product.

    Torch uses MKL, which has no AVX-512 for processors of AMD, and there takes more than twice the time.
    """
    return ONEDNN and vendor() == "AuthenticAMD" and "AVX-512" in fp32_instructions()


@cache
def multiplies_bf16() -> bool:
    """Returns whether the processor has instructions for products of bf16."""
    return ONEDNN and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
