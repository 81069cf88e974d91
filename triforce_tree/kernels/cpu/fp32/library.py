"""The compiled library of ``fp32.c``.

Its functions take the address of a C struct. The module ``struct`` packs its bytes in 1 us, where a
``ctypes.Structure`` takes 5 us.
"""

import ctypes
import logging
import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from triforce_tree.kernels.cpu.build import shared_library
from triforce_tree.kernels.cpu.cpu_attention import fp32_instructions

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("fp32.c")
_HEADERS = [
    _SOURCE.parent / name
    for name in (
        "vectors.h",
        "blocks.h",
        "dots.h",
        "tasks.h",
        "linear.h",
        "attention.h",
        "exact.h",
        "layers.h",
        "decoder.h",
        "noise.h",
        "prefill.h",
    )
]
_CPU = _SOURCE.parents[1]
_SHARED = [_CPU / "cpu_shared.h", _CPU / "threads.h"] + [
    _CPU / "step" / name for name in ("grow.h", "traversal.h", "select.h", "slots.h")
]
_FUNCTIONS = (
    "accept_greedy", "append", "begin_tree", "expand_nodes", "exponential", "finish", "gated", "linear",
    "place_nodes", "project", "rms_norm", "rotary", "unpack",
)  # fmt: skip
# These functions return the bytes of workspace that they need.
_WITH_WORK = (
    "attention", "exact_attention", "move_kv", "prefill_attention", "select_chunks", "traverse_tree",
)  # fmt: skip


@cache
def library(way: str | None = None) -> ctypes.CDLL | None:
    """Returns the library, compiled at the first call, or None with a warning if that fails.

    Args:
        way: instruction set, one of ``cpu_attention.fp32_instructions``; None for the fastest.
    """
    available = fp32_instructions()
    if not available:
        return None
    try:
        path = shared_library(_SOURCE, [*_HEADERS, *_SHARED], available[way or next(iter(available))])
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.warning("the C kernels for fp32 on the CPU are not used: %s", error)
        return None
    for name in _FUNCTIONS:
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = [ctypes.c_char_p], None
    for name in _WITH_WORK:
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = [ctypes.c_char_p], ctypes.c_int64
    return loaded


def usable(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """Returns the library if these are fp32 tensors in host memory with a dense last dimension, else None."""
    for x in tensors:
        if x.dtype is not torch.float32 or not x.is_cpu or x.stride(-1) != 1:
            return None
    return library()


def page_table(table: torch.Tensor | None) -> tuple[int, int, int]:
    """Returns address and strides of a table ``[B, pages]`` or ``[B, H_kv, pages]``, or zeros for None."""
    if table is None:
        return 0, 0, 0
    return table.data_ptr(), table.stride(0), table.stride(1) if table.ndim == 3 else 0


class _Work(threading.local):
    """Workspace for the calls of one thread."""

    buffer = torch.empty(0, dtype=torch.uint8, device="cpu")


_work = _Work()


def run_with_work(
    function: Callable[[bytes], int], request: struct.Struct, fields: tuple[int | float, ...]
) -> None:
    """Calls a C function with workspace, and again with more if it returns a number of bytes that it needs.

    Args:
        function: returns 0 after computing its result.
        request: struct of the address and bytes of the workspace, and ``fields``.
    """
    work = _work.buffer
    while needed := function(request.pack(work.data_ptr(), work.numel(), *fields)):
        # The size is rounded up to a power of 2, because sequences grow; untouched memory pages cost nothing.
        work = _work.buffer = torch.empty(1 << (needed - 1).bit_length(), dtype=torch.uint8, device="cpu")
