"""The compiled library of ``fp32.c``.

Its functions take the address of a C struct. The module ``struct`` packs its bytes in 1 us, where a
``ctypes.Structure`` takes 5 us. The calls of a thread can be noted and repeated by one call (:class:`Calls`).
"""

import ctypes
import logging
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from triforce_tree.kernels.cpu.build import shared_library
from triforce_tree.kernels.cpu.cpu_attention import fp32_instructions

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("fp32.c")
_FUNCTIONS = (
    "accept_greedy", "append", "begin_tree", "expand_nodes", "exponential", "finish", "gated", "linear",
    "place_nodes", "project", "rms_norm", "rotary", "unpack",
)  # fmt: skip
# These functions return the bytes of workspace that they need.
_WITH_WORK = (
    "attention", "exact_attention", "move_kv", "prefill_attention", "replay", "select_chunks",
    "traverse_tree",
)  # fmt: skip
_REPLAY = struct.Struct("4q")


@dataclass
class Noted:
    """Calls of functions with the bytes of their structs, and the workspaces of these calls alone: another
    thread may repeat them.
    """

    calls: "list[tuple[Function, bytes]]" = field(default_factory=list)
    work: list[torch.Tensor] = field(default_factory=lambda: [_nothing()])


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


class _Noting(threading.local):
    """Where a thread notes its calls; None if it notes none."""

    now: Noted | None = None


_noting = _Noting()


class Function:
    """A function of the library.

    Args:
        own: the C function.
        with_work: whether it returns the bytes of workspace that it needs, and 0 after computing its result.
    """

    def __init__(self, own: Any, with_work: bool) -> None:
        own.argtypes, own.restype = [ctypes.c_char_p], ctypes.c_int64 if with_work else None
        self.own, self.with_work = own, with_work

    def __call__(self, request: bytes) -> int:
        """Calls it with the bytes of its struct; returns the bytes of workspace that it lacks."""
        needed: int = self.own(request) or 0
        if _noting.now is not None and not needed:
            _noting.now.calls.append((self, request))
        return needed


class Calls:
    """Noted calls, which one call repeats. The tensors that they read and write must stay.

    Args:
        replay: the C function.
    """

    def __init__(self, replay: Function, noted: Noted) -> None:
        calls = noted.calls
        functions = (ctypes.c_void_p * len(calls))(
            *(ctypes.cast(function.own, ctypes.c_void_p).value for function, _ in calls)
        )
        requests = (ctypes.c_char_p * len(calls))(*(request for _, request in calls))
        with_work = bytes(function.with_work for function, _ in calls)
        self._held = functions, requests, with_work, noted
        at = ctypes.cast(ctypes.c_char_p(with_work), ctypes.c_void_p).value
        self._request = _REPLAY.pack(len(calls), ctypes.addressof(functions), ctypes.addressof(requests), at)
        self._replay = replay

    def repeat(self) -> bool:
        """Makes the calls; returns False if one of them lacked workspace, which ends them."""
        return self._replay(self._request) == 0


@contextmanager
def noted() -> Iterator[Noted]:
    """Yields what gets the calls of this thread inside the context."""
    before, _noting.now = _noting.now, Noted()
    try:
        yield _noting.now
    finally:
        _noting.now = before


@cache
def library(way: str | None = None) -> SimpleNamespace | None:
    """Returns the functions of the library by name; None, with a warning, if it cannot be compiled.

    It is compiled at the first call.

    Args:
        way: instruction set, one of ``cpu_attention.fp32_instructions``; None for the fastest.
    """
    available = fp32_instructions()
    if not available:
        return None
    try:
        path = shared_library(_SOURCE, available[way or next(iter(available))])
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.warning("the C kernels for fp32 on the CPU are not used: %s", error)
        return None
    names = *((name, False) for name in _FUNCTIONS), *((name, True) for name in _WITH_WORK)
    return SimpleNamespace(**{name: Function(getattr(loaded, name), work) for name, work in names})


def usable(*tensors: torch.Tensor) -> SimpleNamespace | None:
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

    buffer = _nothing()


_work = _Work()


def run_with_work(function: Function, request: struct.Struct, fields: tuple[int | float, ...]) -> None:
    """Calls a C function with workspace, and again with more if it returns a number of bytes that it needs.

    Args:
        function: returns 0 after computing its result.
        request: struct of the address and bytes of the workspace, and ``fields``.
    """
    noting = _noting.now
    work = _work.buffer if noting is None else noting.work[-1]
    while needed := function(request.pack(work.data_ptr(), work.numel(), *fields)):
        # The size is rounded up to a power of 2, because sequences grow; untouched memory pages cost nothing.
        work = torch.empty(1 << (needed - 1).bit_length(), dtype=torch.uint8, device="cpu")
        if noting is None:
            _work.buffer = work
        else:
            noting.work.append(work)
