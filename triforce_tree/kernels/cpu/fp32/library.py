"""The compiled library of ``fp32.c``.

Its functions take the address of a request: the bytes of a C struct, made by ``struct`` in a microsecond,
where a ``ctypes.Structure`` takes five.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from triforce_tree.kernels.cpu.build import shared_library
from triforce_tree.kernels.cpu.cpu_attention import fp32_instructions

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("fp32.c")
_HEADERS = [
    _SOURCE.parent / name
    for name in ("vectors.h", "linear.h", "attention.h", "exact.h", "layers.h", "noise.h")
]
_SHARED = _SOURCE.parent.with_name("cpu_shared.h")
_FUNCTIONS = ("append", "exponential", "gated", "linear", "rms_norm", "rotary")


@cache
def library(way: str | None = None) -> ctypes.CDLL | None:
    """The library, compiled at the first call; None, with a warning, where that fails.

    Args:
        way: instruction set, one of ``cpu_attention.fp32_instructions``; None for the fastest.
    """
    available = fp32_instructions()
    if not available:
        return None
    try:
        path = shared_library(_SOURCE, [*_HEADERS, _SHARED], available[way or next(iter(available))])
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.warning("the C kernels for fp32 on the CPU are not used: %s", error)
        return None
    for name in _FUNCTIONS:
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = [ctypes.c_char_p], None
    for name in ("attention", "exact_attention"):
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = [ctypes.c_char_p], ctypes.c_int64
    return loaded


def usable(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The library, where these are plain fp32 tensors in host memory whose last dimension is dense."""
    for x in tensors:
        if x.dtype is not torch.float32 or not x.is_cpu or x.stride(-1) != 1:
            return None
    return library()
