"""Compile every kernel ahead of time for GPUs that are not at hand, and hold it to their limits.

    python -m scripts.checks.kernels_by_arch                     # all: an hour of one core
    python -m scripts.checks.kernels_by_arch --arch sm_89 --every 20
    python -m scripts.checks.kernels_by_arch --out docs/results/kernels_by_arch.jsonl

Needs no GPU; run without TRITON_INTERPRET. A run that was cut short goes on where it ended. Exit code 1 where
a kernel does not assemble, wants more shared memory than the GPU has, or spills more than ``MAY_SPILL`` says.

Kernels are compiled through the very calls that launch them: a driver that names the described GPU as the
target replaces Triton's, and each launch ends after the compiler. So signature, specialisation and options
are those of the product, and what a kernel uses is what the assembler says.
"""

import contextlib
import io
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from scripts.benchmarks.common.results import grouped, header, write
from scripts.checks.kernels_by_arch.variants import variants
from scripts.checks.report import last_line, parser
from triforce_tree.bench.results import Records
from triforce_tree.kernels.device import KNOWN, Device, emulated

Row = dict[str, Any]
SPARED = 64
"""Bytes of a thread that compilers differ by; a tile that does not fit spills hundreds."""

# Kernels and architectures whose threads may spill more, and how many bytes: a tenth more than they do.
# gfx1100 has half as many registers as others, too few for wide heads and tiles of many rows.
MAY_SPILL: dict[str, dict[str, int]] = {
    # 64 rows and more: sums, scores and operands of a product fill 255 registers. Keys in 8 bits also need
    # some for their scales, on gfx90a and gfx942 more than there are.
    "tree_attention_kernel": {
        "sm_80": 368, "sm_86": 80, "sm_89": 80, "sm_90": 480, "sm_100": 752, "sm_120": 424,
        "gfx90a": 1536, "gfx942": 1424, "gfx1100": 7680,
    },
    "block_attention_kernel": {"sm_100": 176, "sm_120": 80, "gfx90a": 88, "gfx1100": 6784},
    # Windows, and heads of unequal or 512 columns, under a limit of registers for five programs at a time.
    "exact_near_kernel": {
        "sm_80": 328, "sm_86": 328, "sm_89": 328, "sm_90": 328, "sm_100": 328, "sm_120": 304,
        "gfx90a": 88, "gfx1100": 2920,
    },
    "exact_far_kernel": {"sm_80": 104, "sm_86": 120, "sm_89": 120, "sm_120": 192, "gfx1100": 1664},
    # Keys of 512 columns beside their variances; 15,360 chunks and more, of which a program keeps the best.
    "_score_kernel": {"sm_80": 264, "sm_86": 264, "sm_89": 264, "sm_90": 280, "sm_100": 280, "sm_120": 280},
    "_choose_kernel": {"sm_80": 328, "sm_86": 400, "sm_89": 400, "sm_90": 432, "sm_100": 432, "sm_120": 456},
    # 64 rows and more of packed weights; unaligned rows.
    "linear_kernel": {"sm_80": 288, "sm_100": 256, "sm_120": 208, "gfx1100": 576},
    "expert_linear_kernel": {"gfx1100": 264},
}  # fmt: skip
NOT_COMPILED: dict[str, set[str]] = {
    "tree_attention_kernel": {f"{kv}, int8 for bf16, head_dim 64, 1 x 4 rows" for kv in ("dense", "window")}
}
"""Variants that Triton 3.6 cannot compile for AMD's GPUs, for an error of its own; 3.9 compiles them."""
_SPILLS = re.compile(r"(\d+) bytes spill stores")
_AMD_SPILLS = re.compile(r"\.vgpr_spill_count:\s*(\d+)")
_REGISTERS = re.compile(r"Used (\d+) registers|\.vgpr_count:\s*(\d+)")


class _Driver:
    """Implements as much of Triton's driver as compiling needs."""

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


def compiled(device: Device, call: Callable[[], object]) -> list[Row]:
    """Returns the kernels that a call launches, compiled for a GPU and not run; those compiled before are
    left out.

    Args:
        call: launches kernels on CPU tensors, whose values do not matter.

    Returns:
        For each kernel its name, and either ``error``, the compiler's or assembler's last line, or the shared
        memory of a block, registers and spilled bytes of a thread, and whether the assembler serialised the
        products of tensor cores, which only its remarks tell.
    """
    found: list[Row] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        output = io.StringIO()
        known = set(map(id, self.device_caches[device.arch][0].values()))
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                made = run(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # whatever the compiler raises is the result
            found.append({"kernel": self.__name__, "error": _error_line(f"{output.getvalue()}\n{error}")})
            return None
        if id(made) not in known:
            found.append({"kernel": self.__name__, **_usage(made, output.getvalue())})
        # No metadata: the launch would hold it to the limit, and take a smaller tile.
        return None

    before = driver._active, knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log
    JITFunction.run = compile_only
    driver.set_active(_Driver(device))
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    try:
        with emulated(device):
            call()
    finally:
        JITFunction.run = run
        driver._active, knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = before
    return found


def _usage(made: Any, log: str) -> Row:
    if "amdgcn" in made.asm:
        log = made.asm["amdgcn"]
        spills = 4 * int(_AMD_SPILLS.search(log)[1])
    else:
        spills = int(_SPILLS.search(log)[1])
    row = {"shared_bytes": made.metadata.shared, "spill_bytes": spills}
    if registers := _REGISTERS.search(log):
        row["registers"] = int(registers[1] or registers[2])
    return row | ({"serialized": True} if "serialized" in log else {})


def _error_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() or "requires" in line or "failed" in line]
    return (wrong or lines or ["no message"])[0][:300]


def compile_share(task: tuple[str, int, int, int]) -> list[Row]:
    """Returns rows of one architecture's variants ``first``, ``first + every``, ... of the share ``share``.

    Architectures begin at different variants, so that a small sample has several kinds of kernels.
    """
    arch, every, share, shares = task
    first = [*KNOWN].index(arch) * every // len(KNOWN)
    place = {"arch": arch, "limit_bytes": KNOWN[arch].shared_bytes}
    return [
        row | place | {"variant": variant.name}
        for variant in list(variants(KNOWN[arch]))[first::every][share::shares]
        for row in compiled(KNOWN[arch], variant.call)
    ]


def shares_of(tasks: list[tuple[str, int, int, int]], jobs: int) -> Iterator[list[Row]]:
    """Yields what ``compile_share`` returns for each task, from so many processes; from this one for 1."""
    if jobs == 1:
        yield from map(compile_share, tasks)
        return
    # Forks of this process would share the state of a compiler that is not made for it.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(compile_share, tasks)


def faults(kernels: list[Row]) -> Iterator[str]:
    """Yields a line for each thing that is wrong in a summary."""
    for kind in kernels:
        name = f"{kind['arch']}, {kind['kernel']}"
        known = NOT_COMPILED.get(kind["kernel"], ()) if kind["arch"].startswith("gfx") else ()
        for variant, error in kind["failed"].items():
            if variant not in known:
                yield f"{name}, {variant}: {error}"
        if kind["shared_bytes"] > kind["limit_bytes"]:
            sizes = f"{kind['shared_bytes']:,} bytes of shared memory of {kind['limit_bytes']:,}"
            yield f"{name}, the largest: {sizes}"
        if kind["kernel"] == "linear_kernel":
            yield from (f"{name}, {variant}: products wait for each other" for variant in kind["serialized"])
        most = MAY_SPILL.get(kind["kernel"], {}).get(kind["arch"], SPARED)
        for variant, size in kind["spills"].items():
            if size > most:
                yield f"{name}, {variant}: spills {size} bytes, {most} are allowed"


def summary(rows: list[Row]) -> list[Row]:
    """Returns what the results file keeps: extremes by kernel and architecture, and all that spill."""
    found = []
    for (arch, kernel), some in grouped(rows, "arch", "kernel").items():
        made = [row for row in some if "error" not in row]
        kind = {"arch": arch, "kernel": kernel, "limit_bytes": some[0]["limit_bytes"], "compiled": len(made)}
        kind |= {key: max((row[key] for row in made), default=0) for key in ("shared_bytes", "spill_bytes")}
        kind["spills"] = {row["variant"]: row["spill_bytes"] for row in made if row["spill_bytes"] > SPARED}
        kind["failed"] = {row["variant"]: row["error"] for row in some if "error" in row}
        kind["serialized"] = [row["variant"] for row in made if row.get("serialized")]
        found.append(kind)
    return found


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--arch", nargs="*", default=[*KNOWN], choices=[*KNOWN], help="GPUs")
    made.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth variant only")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    made.add_argument("--out", type=Path, help="results file; beside it .part holds what is done so far")
    args = made.parse_args(arguments)
    if "TRITON_INTERPRET" in os.environ:
        made.error("TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it")

    part = args.out.with_suffix(".part") if args.out else None
    done = Records(part, {"triton": triton.__version__, "every": args.every})
    shares = max(1, 24 // args.every)
    tasks = [
        (arch, args.every, share, shares)
        for arch, share in product(args.arch, range(shares))
        if done.find(arch=arch, share=share) is None
    ]
    shown = track(shares_of(tasks, args.jobs), "compiling", len(tasks), console=Console(stderr=True))
    for task, rows in zip(tasks, shown, strict=True):
        done.add({"arch": task[0], "share": task[2], "rows": rows})
    rows = [row for record in done.all for row in record["rows"]]
    kernels = summary(rows)
    wrong = list(faults(kernels))
    if args.out and part:
        write(args.out, header(0) | {"triton": triton.__version__, "kernels": kernels})
        part.unlink()
    for line in wrong:
        print(line)
    last_line({"kernels": len(rows), "triton": triton.__version__, "faults": len(wrong)})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
