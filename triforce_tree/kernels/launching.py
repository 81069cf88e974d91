"""Helpers of the functions that launch Triton kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triforce_tree.kernels.device import describe


def warps(count: int, **options: int) -> dict[str, int]:
    """Returns the launch options ``num_warps=count`` and ``options``, or none in Triton's interpreter."""
    return {} if knobs.runtime.interpret else {"num_warps": count, **options}


def launched_early(device: torch.device) -> dict[str, Any]:
    """Returns the arguments of a kernel with programmatic dependent launch, where the device supports it.

    It may start while the previous kernel runs. It calls :func:`wait_for_previous` with its argument ``PDL``
    before its first load of data that an earlier kernel may have written.
    """
    early = describe(device).dependent_launch
    return {"PDL": early, **({"launch_pdl": True} if early and not knobs.runtime.interpret else {})}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the previous kernel has ended, then allows the launch of the next kernel."""
    # In this order, the next kernel may rely on all writes of kernels before this one.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def dense(x: Tensor) -> Tensor:
    """Returns ``x`` if its last dimension is dense, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def matrix(x: Tensor) -> Tensor:
    """Returns ``x`` ``[..., C]`` as ``[R, C]`` with dense columns. Its rows may have any stride: those of a
    slice of a larger tensor are not copied where one stride leads from each to the next.
    """
    return dense(x.reshape(-1, x.shape[-1]))
