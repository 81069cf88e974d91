"""Holds helpers of the functions that launch kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triforce_tree.kernels.device import describe


def warps(count: int, **options: int) -> dict[str, int]:
    """The launch option for so many warps, and others; none in Triton's interpreter, which has no warps."""
    return {} if knobs.runtime.interpret else {"num_warps": count, **options}


def launched_early(device: torch.device) -> dict[str, Any]:
    """Arguments of a kernel that may be launched while the one before it runs: programmatic dependent launch.

    The kernel calls :func:`wait_for_previous` with its argument ``PDL`` before its first load of what kernels
    before it may have written.
    """
    early = describe(device).dependent_launch
    return {"PDL": early, **({"launch_pdl": True} if early and not knobs.runtime.interpret else {})}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before has ended, and let the next one be launched."""
    # In this order: the next kernel may then rely on all writes of kernels before this one.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def dense(x: Tensor) -> Tensor:
    """``x`` with a dense last dimension: itself where it has one, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
