"""What functions that launch kernels have in common."""

from torch import Tensor
from triton import knobs


def warps(count: int, **options: bool) -> dict[str, int]:
    """The launch option for so many warps, and others; none in Triton's interpreter, which has no warps."""
    return {} if knobs.runtime.interpret else {"num_warps": count, **options}


def dense(x: Tensor) -> Tensor:
    """``x`` with a dense last dimension: itself where it has one, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
