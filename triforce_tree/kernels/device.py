"""What a GPU offers to a kernel, as a plain value: the one place that the choices of tiles ask.

``describe`` reads it from the driver. ``KNOWN`` describes GPUs that need not be at hand: kernels are compiled
ahead of time for them, and a larger GPU can be told to run as one of them (``TRIFORCE_TREE_DEVICE=sm_89``),
which then takes that GPU's tiles and uses no feature that it lacks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

VARIABLE = "TRIFORCE_TREE_DEVICE"
"""Environment variable that names the entry of ``KNOWN`` to run as."""


@dataclass(frozen=True)
class Device:
    """Limits and features of one GPU.

    Attributes:
        arch: compute capability as in ``"sm_89"``, AMD's name as in ``"gfx942"``, or ``"interpreter"``.
        shared_bytes: the most shared memory that a thread block can opt in to.
        shared_bytes_per_sm: of a multiprocessor; each block takes 1 KiB of it beside its own.
        processors: multiprocessors (AMD: compute units).
        tma: bulk tensor copies through descriptors.
        dependent_launch: a kernel may start while the one before it still runs, and wait for it inside.
        bulk_prefetch: ``cp.async.bulk.prefetch`` into L2.
        fp64_products: Triton multiplies fp64 on tensor cores.
        ptx: inline PTX assembles.
        bf16_sub: so does ``sub.bf16x2`` in it.
        told: another GPU than this is at hand, and was told to run as this one.
    """

    arch: str
    shared_bytes: int
    shared_bytes_per_sm: int
    processors: int
    tma: bool = False
    dependent_launch: bool = False
    bulk_prefetch: bool = False
    fp64_products: bool = False
    ptx: bool = True
    bf16_sub: bool = False
    told: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability; (0, 0) where there is none: AMD and the interpreter."""
        if not self.arch.startswith("sm_"):
            return 0, 0
        major, minor = divmod(int(self.arch.removeprefix("sm_")), 10)
        return major, minor

    @property
    def shared_products(self) -> bool:
        """Whether products of 64 rows and more read both operands from shared memory (wgmma, tcgen05)."""
        return 9 <= self.capability[0] <= 11

    def resident(self, shared_bytes: int) -> int:
        """How many blocks of so much shared memory fit on a multiprocessor; at least 1."""
        return max(1, self.shared_bytes_per_sm // (shared_bytes + 1024))


def _nvidia(arch: str, shared: int, per_sm: int, processors: int) -> Device:
    since_hopper = int(arch.removeprefix("sm_")) >= 90
    fp64 = arch in ("sm_80", "sm_90")
    return Device(
        arch, shared, per_sm, processors, since_hopper, since_hopper, since_hopper, fp64, True, since_hopper
    )


INTERPRETER = Device("interpreter", 232_448, 233_472, 13, tma=True, fp64_products=True, ptx=False)
"""Triton's interpreter on a CPU: it has descriptors, and few processors, no divisor of usual head counts."""

KNOWN = {
    device.arch: device
    for device in (
        _nvidia("sm_80", 166_912, 167_936, 108),  # A100
        _nvidia("sm_86", 101_376, 102_400, 82),  # RTX 3090
        _nvidia("sm_89", 101_376, 102_400, 128),  # RTX 4090
        _nvidia("sm_90", 232_448, 233_472, 132),  # H100, H200
        _nvidia("sm_100", 232_448, 233_472, 148),  # B200
        _nvidia("sm_120", 101_376, 102_400, 170),  # RTX 5090
        Device("gfx90a", 65_536, 65_536, 104, ptx=False),  # MI250X, one of two dies
        Device("gfx942", 65_536, 65_536, 304, ptx=False),  # MI300X
        Device("gfx1100", 65_536, 65_536, 96, ptx=False),  # RX 7900 XTX
    )
}

_told: Device | None = None


def describe(device: torch.device | str) -> Device:
    """The GPU behind a torch device; off the GPU the interpreter, unless told otherwise.

    Raises:
        ValueError: ``TRIFORCE_TREE_DEVICE`` names a GPU that is not in ``KNOWN``.
    """
    if _told is not None:
        return _told
    return _described(torch.device(device), os.environ.get(VARIABLE, ""))


class KernelError(RuntimeError):
    """A kernel does not run on this device; the message says what does."""


@contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Inside, an error of Triton's compiler or launcher becomes a :class:`KernelError` of one line."""
    try:
        yield
    except KernelError:
        raise
    except Exception as error:
        # By module, as machines without a GPU need no Triton; its passes raise a plain RuntimeError.
        own = any(kind.__module__.partition(".")[0] == "triton" for kind in type(error).__mro__)
        if not own and "PassManager" not in str(error):
            raise
        here = describe(device)
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise KernelError(
            f"a kernel does not run on {device} ({here.arch}, {here.shared_bytes:,} bytes of shared memory a "
            f"block): {said[:200]}; run on the CPU (device='cpu'), and please report this line"
        ) from error


@contextmanager
def told(device: Device) -> Iterator[None]:
    """Inside, every device is described as this one."""
    global _told
    before, _told = _told, device
    try:
        yield
    finally:
        _told = before


@cache
def _described(device: torch.device, name: str) -> Device:
    if name:
        if name not in KNOWN:
            raise ValueError(f"{VARIABLE}={name!r} is not a known GPU; use one of {', '.join(KNOWN)}")
        return replace(KNOWN[name], told=True)
    if device.type != "cuda":
        return INTERPRETER
    found: Any = torch.cuda.get_device_properties(device)  # not all fields are typed
    if torch.version.hip is not None:
        arch, shared = found.gcnArchName.split(":")[0], found.shared_memory_per_block
        return Device(arch, shared, shared, found.multi_processor_count, ptx=False)
    return _nvidia(
        f"sm_{10 * found.major + found.minor}",
        found.shared_memory_per_block_optin,
        found.shared_memory_per_multiprocessor,
        found.multi_processor_count,
    )
