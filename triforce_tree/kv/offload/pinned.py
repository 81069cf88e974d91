"""Page-locked host memory for the GPU, in blocks, and how much of it can be had."""

import mmap
import weakref
from collections.abc import Iterator, Sequence
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
# Mappings on Windows have no flags; they are private without them.
_ANONYMOUS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
# Bytes that are never allocated: the process itself still grows.
SPARE = _GIB
# Plans leave these bytes or this share of the memory to the system, whichever is more, but at most half of
# what is available, so that small machines work too.
_LEFT_BYTES, _LEFT_SHARE = 4 * _GIB, 0.1
# Memory controllers of control groups, version 2 and 1: name in /proc/self/cgroup, folder of the root, limit,
# usage, file pages among the usage.
_CGROUPS = (
    ("", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "memory", "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    ),
)  # fmt: skip


class HostMemoryError(OSError):
    """Says that host memory is short, or cannot be locked; it names value, limit and remedy."""


class HostMemory:
    """Allocates blocks of zeroed host memory, which are page-locked for CUDA if there is CUDA.

    Blocks are anonymous mappings, registered one by one: torch's pinned allocator rounds sizes up to powers
    of two, and does not return freed memory to the system.

    Args:
        locked: whether to lock the pages.
        what, remedy: for errors: what the memory is used for, and what helps where it is short.
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
        self._finalizer = weakref.finalize(self, _release, self._blocks)
        # At exit the system frees the memory in any case, and does so faster.
        self._finalizer.atexit = False

    def check(self, size: int) -> None:
        """Checks, before anything is allocated, that ``size`` bytes are available.

        Raises:
            HostMemoryError: they are not.
        """
        limit, name = available()
        if size + SPARE > limit:
            raise HostMemoryError(
                f"{self.what} needs {size / _GIB:.1f} GiB of host memory beside {SPARE / _GIB:.0f} GiB for "
                f"the rest, but {name} leaves {limit / _GIB:.1f} GiB; {self.remedy}"
            )

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates a zeroed tensor in its own block.

        Raises:
            HostMemoryError: the system refuses the memory, or to lock it. Earlier blocks stay allocated.
        """
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        try:
            mapping = mmap.mmap(-1, size, **_ANONYMOUS)
        except (OSError, MemoryError) as error:
            raise HostMemoryError(
                f"the system refuses {size / _GIB:.2f} GiB of host memory after {self.bytes / _GIB:.1f} GiB "
                f"({error}) for {self.what}; raise the limit (ulimit -v), or {self.remedy}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Pages of 2 MiB are touched and locked several times as fast; some Linux kernels have none.
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
        # Touch every page first, with all threads.
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
        """Unlocks all blocks; each is freed with the last tensor that is a view of it."""
        _release(self._blocks)
        self.bytes = 0


def _release(blocks: list[tuple[mmap.mmap, int]]) -> None:
    while blocks:
        _, pointer = blocks.pop()
        if pointer:
            # The status is ignored: after a fault of the device nothing can be unlocked any more.
            torch.cuda.cudart().cudaHostUnregister(pointer)


def _lock_limit() -> str:
    """Returns a text that says what limits locked memory and how to raise it."""
    if on_wsl():
        return (
            "under WSL2 the NVIDIA driver limits page-locked memory to about half of the virtual machine's "
            "memory: raise memory= in .wslconfig"
        )
    if _RESOURCE is None:
        return "the system limits locked memory"
    soft = _RESOURCE.getrlimit(_RESOURCE.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if soft == _RESOURCE.RLIM_INFINITY else f"{soft / _GIB:.2f} GiB"
    return f"the limit on locked memory (ulimit -l) is {limit}: raise it"


def on_wsl() -> bool:
    """Returns whether this Linux runs under Windows (WSL2)."""
    return any("microsoft" in line.lower() for line in _lines("/proc/version"))


def usable(most: int | None = None) -> tuple[int, str]:
    """Returns the bytes of host memory that a plan may use, and the name of the limit.

    Args:
        most: bytes that the user allows; None leaves 4 GiB or a tenth of the memory to the system, whichever
            is more, but at most half of what is available.
    """
    size, name = available()
    if most is not None:
        return min((most, "host_memory"), (max(0, size - SPARE), name))
    left = min(max(_LEFT_BYTES, int(_LEFT_SHARE * total())), size // 2)
    return size - left, f"{name}, less {left / _GIB:.1f} GiB for the system,"


def available() -> tuple[int, str]:
    """Returns the bytes of host memory that can still be allocated, and the name of the limit."""
    free = psutil.virtual_memory().available, "the system's available memory"
    return min([free, *((size, name) for size, name in _cgroup_available() if size is not None)])


def total() -> int:
    """Returns the bytes of memory of the machine, or of this process's control group."""
    limits = [_number(f"{folder}/{limit}") for folder, limit, _, _ in _cgroups()]
    return min([int(psutil.virtual_memory().total), *(size for size in limits if size is not None)])


def _cgroup_available() -> list[tuple[int | None, str]]:
    """Returns the bytes left under the memory limits of control groups; file pages can be dropped."""
    left: list[tuple[int | None, str]] = []
    for folder, limit, usage, inactive in _cgroups():
        most, used = _number(f"{folder}/{limit}"), _number(f"{folder}/{usage}")
        if most is None or used is None:
            continue
        stat = dict(line.split() for line in _lines(f"{folder}/memory.stat"))
        left.append((most - used + int(stat.get(inactive, 0)), f"the control group's {limit}"))
    return left


def _cgroups() -> Iterator[tuple[str, str, str, str]]:
    """Yields folders and files of the control groups of this process from the root on, with their limits."""
    lines = [line.split(":", 2) for line in _lines("/proc/self/cgroup")]
    own = {controller: path for _, names, path in lines for controller in names.split(",")}
    for controller, root, limit, usage, inactive in _CGROUPS:
        parts = own.get(controller, "/").split("/")
        # In a container the path may be the host's, whose files are not here, or lead out of the root.
        inside = [] if ".." in parts else [part for part in parts if part]
        for depth in range(len(inside) + 1):
            yield "/".join([root, *inside[:depth]]), limit, usage, inactive


def _number(path: str) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
