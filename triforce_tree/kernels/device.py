"""Describes the limits and features of a GPU, from which tile shapes and code paths are chosen.

``describe`` reads them from the driver. ``KNOWN`` lists GPUs that need not be present. Tests compile kernels
for them, and a larger GPU can emulate one of them (``TRIFORCE_TREE_DEVICE=sm_89``). It then uses the tiles of
the emulated GPU, and only the features that this GPU has.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

VARIABLE = "TRIFORCE_TREE_DEVICE"
"""Environment variable that names the entry of ``KNOWN`` to emulate."""


@dataclass(frozen=True)
class Device:
    """Limits and features of one GPU.

    Attributes:
        arch: compute capability as in ``"sm_89"``, AMD's name as in ``"gfx942"``, or ``"interpreter"``.
        shared_bytes: the most shared memory that a thread block can opt in to.
        shared_bytes_per_sm: shared memory of a multiprocessor; each block reserves 1 KiB in addition to its
            own.
        processors: number of multiprocessors (AMD: compute units).
        tma: whether it has bulk tensor copies through descriptors.
        dependent_launch: whether it has programmatic dependent launch.
        bulk_prefetch: whether it has ``cp.async.bulk.prefetch`` into L2.
        fp64_products: whether Triton multiplies fp64 on tensor cores.
        ptx: whether it supports inline PTX.
        bf16_sub: whether inline PTX may use ``sub.bf16x2``.
        emulated: whether another GPU emulates this device.
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
    emulated: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """Returns the major and minor compute capability; (0, 0) for AMD and the interpreter."""
        if not self.arch.startswith("sm_"):
            return 0, 0
        major, minor = divmod(int(self.arch.removeprefix("sm_")), 10)
        return major, minor

    @property
    def shared_products(self) -> bool:
        """Returns whether products of 64 or more rows read both operands from shared memory (wgmma)."""
        return 9 <= self.capability[0] <= 11

    def resident(self, shared_bytes: int) -> int:
        """Returns how many blocks of ``shared_bytes`` each fit on a multiprocessor, at least 1."""
        return max(1, self.shared_bytes_per_sm // (shared_bytes + 1024))


def _nvidia(arch: str, shared_bytes: int, per_sm: int, processors: int) -> Device:
    later = int(arch.removeprefix("sm_")) >= 90  # Hopper or later
    return Device(
        arch, shared_bytes, per_sm, processors, tma=later, dependent_launch=later, bulk_prefetch=later,
        bf16_sub=later, fp64_products=arch in ("sm_80", "sm_90"),
    )  # fmt: skip


INTERPRETER = Device("interpreter", 232_448, 233_472, 13, tma=True, fp64_products=True, ptx=False)
"""Triton's interpreter on a CPU, with descriptors, and with 13 processors to test uneven divisions."""

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
    """Returns the GPU of a torch device, an emulated GPU, or the interpreter for a CPU.

    Raises:
        ValueError: ``TRIFORCE_TREE_DEVICE`` names a GPU that is not in ``KNOWN``.
    """
    if _told is not None:
        return _told
    return _described(torch.device(device), os.environ.get(VARIABLE, ""))


class KernelError(RuntimeError):
    """Raised if a kernel does not run on this device; the message names the remedy."""


@contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Turns errors of Triton's compiler or launcher in its context into a :class:`KernelError`."""
    try:
        yield
    except KernelError:
        raise
    except Exception as error:
        # Triton may not be installed, so its errors are recognised by module name; its passes raise
        # RuntimeError.
        own = any(kind.__module__.partition(".")[0] == "triton" for kind in type(error).__mro__)
        if not own and "PassManager" not in str(error):
            raise
        gpu = describe(device)
        first_line = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise KernelError(
            f"a kernel does not run on {device} ({gpu.arch}, {gpu.shared_bytes:,} bytes of shared memory a "
            f"block): {first_line[:200]}; run on the CPU (device='cpu'), and please report this line"
        ) from error


@contextmanager
def emulated(device: Device) -> Iterator[None]:
    """Makes ``describe`` return ``device`` for every device within its context."""
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
        return replace(KNOWN[name], emulated=True)
    if device.type != "cuda":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)  # not all fields are typed
    if torch.version.hip is not None:
        arch, shared_bytes = properties.gcnArchName.split(":")[0], properties.shared_memory_per_block
        return Device(arch, shared_bytes, shared_bytes, properties.multi_processor_count, ptx=False)
    return _nvidia(
        f"sm_{10 * properties.major + properties.minor}",
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
        properties.multi_processor_count,
    )
