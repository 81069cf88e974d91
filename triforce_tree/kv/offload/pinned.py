"""Host memory that the GPU reads and writes by itself: taken in blocks, checked first, given back whole."""

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path

import psutil
import torch
from torch import Tensor

_GIB = 1 << 30
# Windows has no such module.
_RESOURCE = import_module("resource") if find_spec("resource") else None
# cudaHostRegisterPortable | cudaHostRegisterMapped: kernels may read the pages too.
_FLAGS = 3
# Windows' mappings take no flags, and are the process's own without them.
_ANONYMOUS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
# What nobody may take: this process itself still grows.
SPARE = _GIB
# What plans leave to the system: these bytes or this share of the memory, but no more than half of what is
# available, so that small machines work too.
_LEFT_BYTES, _LEFT_SHARE = 4 * _GIB, 0.1
# Memory controllers of control groups, version 2 and 1: folder, limit, usage, file pages among the usage.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class HostMemoryError(OSError):
    """Host memory, or leave to lock it, is short; the message names value, limit and remedy."""


class HostMemory:
    """Blocks of zeroed host memory, page-locked for CUDA where there is CUDA.

    Blocks are anonymous mappings of their own, registered one by one: torch's pinned allocator rounds
    sizes up to powers of two, and keeps what is freed.

    Args:
        locked: whether to lock the pages.
        what, remedy: for whom, and what would help where memory is short.
    """

    def __init__(
        self,
        locked: bool,
        what: str = "the offloaded cache",
        remedy: str = "shorten the prompt, or free host memory",
    ) -> None:
        self.locked, self.what, self.remedy = locked, what, remedy
        self.bytes = 0
        self._blocks: list[tuple[mmap.mmap, int]] = []
        self._finalizer = weakref.finalize(self, _give_back, self._blocks)
        # A process that ends gives its memory back anyway, and faster.
        self._finalizer.atexit = False

    def check(self, size: int) -> None:
        """Raise before anything is taken where ``size`` bytes are more than the machine can give.

        Raises:
            HostMemoryError: they are.
        """
        limit, name = available()
        if size + SPARE > limit:
            raise HostMemoryError(
                f"{self.what} needs {size / _GIB:.1f} GiB of host memory beside {SPARE / _GIB:.0f} GiB for "
                f"the rest, but {name} leaves {limit / _GIB:.1f} GiB; {self.remedy}"
            )

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor in a block of its own.

        Raises:
            HostMemoryError: the system refuses the memory, or to lock it. Earlier blocks stay.
        """
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.zeros(tuple(shape), dtype=dtype)
        try:
            mapping = mmap.mmap(-1, size, **_ANONYMOUS)
        except (OSError, MemoryError) as error:
            raise HostMemoryError(
                f"the system refuses {size / _GIB:.2f} GiB of host memory after {self.bytes / _GIB:.1f} GiB "
                f"({error}) for {self.what}; raise the limit (ulimit -v), or {self.remedy}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Pages of 2 MiB are touched and locked several times as fast; some kernels have none.
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(mapping, dtype=dtype).view(tuple(shape))
        if self.locked:
            self._lock(mapping, tensor, size)
        else:
            self._blocks.append((mapping, 0))
        self.bytes += size
        return tensor

    def _lock(self, mapping: mmap.mmap, tensor: Tensor, size: int) -> None:
        # The first touch, by all threads, page by page.
        tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].fill_(0)
        pointer = tensor.data_ptr()
        status = int(torch.cuda.cudart().cudaHostRegister(pointer, size, _FLAGS))
        if status:
            raise HostMemoryError(
                f"CUDA cannot lock {size / _GIB:.2f} GiB of host memory after {self.bytes / _GIB:.1f} GiB "
                f"for {self.what} (error {status}); {_lock_limit()}, or {self.remedy}"
            )
        self._blocks.append((mapping, pointer))

    def release(self) -> None:
        """Unlock all blocks; each goes back to the system with the last tensor that looks at it."""
        _give_back(self._blocks)
        self.bytes = 0


def _give_back(blocks: list[tuple[mmap.mmap, int]]) -> None:
    while blocks:
        _, pointer = blocks.pop()
        if pointer:
            # A status is no use here: after a fault of the device nothing can be unlocked any more.
            torch.cuda.cudart().cudaHostUnregister(pointer)


def _lock_limit() -> str:
    """Whose limit on locked memory it is, and how to raise it."""
    if on_wsl():
        return (
            "under WSL2 the NVIDIA driver limits page-locked memory to about half of the memory that the "
            "virtual machine has: raise memory= in .wslconfig"
        )
    if _RESOURCE is None:
        return "the system limits locked memory"
    soft = _RESOURCE.getrlimit(_RESOURCE.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if soft == _RESOURCE.RLIM_INFINITY else f"{soft / _GIB:.2f} GiB"
    return f"the limit on locked memory (ulimit -l) is {limit}: raise it"


def on_wsl() -> bool:
    """Whether this Linux runs under Windows (WSL2)."""
    return any("microsoft" in line.lower() for line in _lines("/proc/version"))


def usable(most: int | None = None) -> tuple[int, str]:
    """Bytes of host memory that a plan may count on, and whose limit that is.

    Args:
        most: what the user allows; None leaves 4 GiB or a tenth of the memory to the system, whichever is
            more, but at most half of what is available.
    """
    size, name = available()
    if most is not None:
        return min((most, "host_memory"), (max(0, size - SPARE), name))
    left = min(max(_LEFT_BYTES, int(_LEFT_SHARE * _total())), size // 2)
    return size - left, f"{name}, less {left / _GIB:.1f} GiB for the system,"


def available() -> tuple[int, str]:
    """Bytes of host memory that can still be had, and whose limit that is."""
    free = psutil.virtual_memory().available, "the system's available memory"
    return min([free, *((size, name) for size, name in _cgroup_rooms() if size is not None)])


def _total() -> int:
    """Bytes of memory of the machine, or of the control group that this process is in."""
    limits = [_number(f"{folder}/{limit}") for folder, limit, _, _ in _CGROUPS]
    return min([int(psutil.virtual_memory().total), *(size for size in limits if size is not None)])


def _cgroup_rooms() -> list[tuple[int | None, str]]:
    """Room below the memory limits of control groups, version 2 and 1; file pages can be dropped."""
    rooms: list[tuple[int | None, str]] = []
    for folder, limit, usage, inactive in _CGROUPS:
        most, used = _number(f"{folder}/{limit}"), _number(f"{folder}/{usage}")
        if most is None or used is None:
            continue
        stat = dict(line.split() for line in _lines(f"{folder}/memory.stat"))
        rooms.append((most - used + int(stat.get(inactive, 0)), f"the control group's {limit}"))
    return rooms


def _number(path: str) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
