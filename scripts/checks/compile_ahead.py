"""Compile Triton kernels for GPUs that are not at hand, through the very calls that launch them.

Triton asks a driver for the target; one that answers for a described GPU takes its place, and each launch
ends behind the compiler. So signature, specialisation and options are those of the product, and what a
kernel uses is what the assembler says. Run without ``TRITON_INTERPRET``.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from triforce_tree.kernels.device import Device, told

_SPILLS = re.compile(r"(\d+) bytes spill stores")
_AMD_SPILLS = re.compile(r"\.vgpr_spill_count:\s*(\d+)")
_REGISTERS = re.compile(r"Used (\d+) registers|\.vgpr_count:\s*(\d+)")


@dataclass(frozen=True)
class Compiled:
    """What one kernel uses on one GPU.

    Attributes:
        kernel: name of the Triton function.
        shared_bytes, spill_bytes: of a block and of a thread; None where compiling failed.
        registers: of a thread.
        serialized: the assembler had to wait for each product of tensor cores, which only its remarks tell.
        error: last line that compiler or assembler said; None where all is well.
    """

    kernel: str
    shared_bytes: int | None
    spill_bytes: int | None
    registers: int | None
    serialized: bool | None = None
    error: str | None = None


class _Driver:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def get_current_target(self) -> GPUTarget:
        if self.device.arch.startswith("sm_"):
            return GPUTarget("cuda", int(self.device.arch.removeprefix("sm_")), 32)
        return GPUTarget("hip", self.device.arch, 64 if self.device.arch.startswith("gfx9") else 32)

    def get_current_device(self) -> str:
        # Triton keeps what it compiled by device.
        return self.device.arch

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiled(device: Device, call: Callable[[], object]) -> list[Compiled]:
    """The kernels that a call launches, compiled for a GPU and not run; those compiled before are left out.

    Args:
        call: launches kernels on CPU tensors, whose values do not matter.
    """
    found: list[Compiled] = []
    with told(device), _stopped(device, found):
        call()
    return found


@contextlib.contextmanager
def _stopped(device: Device, found: list[Compiled]) -> Iterator[None]:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        said = io.StringIO()
        known = set(map(id, self.device_caches[device.arch][0].values()))
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                made = run(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # whatever the compiler raises is the result
            words = _last_words(f"{said.getvalue()}\n{error}")
            found.append(Compiled(self.__name__, None, None, None, error=words))
            return None
        if id(made) not in known:
            found.append(_usage(self.__name__, made, said.getvalue()))
        # No metadata: the launch would hold it to the limit, and take a smaller tile.
        return None

    before = driver._active, knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log
    JITFunction.run = compile_only
    driver.set_active(_Driver(device))
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active, knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = before


def _usage(name: str, made: Any, said: str) -> Compiled:
    if "amdgcn" in made.asm:
        said = made.asm["amdgcn"]
        spills = 4 * int(_AMD_SPILLS.search(said)[1])  # type: ignore[index]
    else:
        spills = int(_SPILLS.search(said)[1])  # type: ignore[index]
    registers = _REGISTERS.search(said)
    count = int(registers[1] or registers[2]) if registers else None
    return Compiled(name, made.metadata.shared, spills, count, "serialized" in said or None)


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() or "requires" in line or "failed" in line]
    return (wrong or lines or ["no message"])[0][:300]
