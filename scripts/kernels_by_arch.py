"""Compile every kernel ahead of time for GPUs that are not at hand, and hold it to their limits.

    python scripts/kernels_by_arch.py                     # all: an hour of one core
    python scripts/kernels_by_arch.py --arch sm_89 --every 20
    python scripts/kernels_by_arch.py --out docs/results/kernels_by_arch.json

Needs no GPU; run without TRITON_INTERPRET. A run that was cut short goes on where it ended. Exit code 1 where
a kernel does not assemble, wants more shared memory than the GPU has, or spills more than ``MAY_SPILL`` says.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from kernel_variants import digest
from rich.console import Console
from rich.progress import track

from triforce_tree.bench.results import Records, header
from triforce_tree.kernels.device import KNOWN

Row = dict[str, Any]
SPARED = 64
"""Bytes of a thread that compilers differ by; a tile that does not fit spills hundreds."""

# Kernels and architectures whose threads may spill more, and how many bytes: a tenth more than they do.
MAY_SPILL: dict[str, dict[str, int]] = {
    # 64 rows and more: sums, scores and operands of a product fill 255 registers; gfx1100 has half as many.
    "tree_attention_kernel": {"sm_80": 272, "sm_90": 480, "sm_100": 752, "sm_120": 128, "gfx1100": 2480},
    # 64 rows and more of packed weights; unaligned rows; gfx1100 as above.
    "linear_kernel": {"sm_80": 288, "sm_100": 256, "sm_120": 208, "gfx1100": 576},
}


def compile_share(task: tuple[str, int, int, int]) -> list[Row]:
    """Rows of one architecture's variants ``first``, ``first + every``, ... of the share ``share``."""
    from compile_ahead import compiled
    from kernel_variants import variants

    arch, every, share, shares = task
    device = KNOWN[arch]
    rows = []
    for variant in list(variants(device))[::every][share::shares]:
        for made in compiled(device, variant.call):
            row = asdict(made) | {"variant": variant.name, "arch": arch, "limit_bytes": device.shared_bytes}
            rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def faults(rows: list[Row]) -> Iterator[str]:
    """What is wrong, a line each."""
    for row in rows:
        name = f"{row['arch']}, {row['kernel']}, {row['variant']}"
        if "error" in row:
            yield f"{name}: {row['error']}"
            continue
        if row["shared_bytes"] > row["limit_bytes"]:
            yield f"{name}: {row['shared_bytes']:,} bytes of shared memory of {row['limit_bytes']:,}"
        if row.get("serialized") and row["kernel"] == "linear_kernel":
            yield f"{name}: products wait for each other"
        most = MAY_SPILL.get(row["kernel"], {}).get(row["arch"], SPARED)
        if row["spill_bytes"] > most:
            yield f"{name}: spills {row['spill_bytes']} bytes, {most} are allowed"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=[*KNOWN], choices=[*KNOWN], help="GPUs; by default all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth variant only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", type=Path, help="results file; beside it .part holds what is done so far")
    args = parser.parse_args(arguments)
    if "TRITON_INTERPRET" in os.environ:
        parser.error("TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it")

    part = args.out.with_suffix(".part") if args.out else None
    done = Records(part, {"triton": triton.__version__, "every": args.every})
    shares = max(1, 24 // args.every)
    tasks = [
        (arch, args.every, share, shares)
        for arch in args.arch
        for share in range(shares)
        if done.find(arch=arch, share=share) is None
    ]
    # Forks of this process would share the state of a compiler that is not made for it.
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        results = pool.imap(compile_share, tasks)
        shown = track(results, "compiling", len(tasks), console=Console(stderr=True))
        for task, rows in zip(tasks, shown, strict=True):
            done.add({"arch": task[0], "share": task[2], "rows": rows})
    rows = [row for record in done.all for row in record["rows"]]
    wrong = list(faults(rows))
    if args.out and part:
        choices = {arch: digest(KNOWN[arch]) for arch in args.arch}
        result = header(0) | {"triton": triton.__version__, "choices": choices, "rows": rows}
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        body = json.dumps(result | {"rows": []}, indent=1).removesuffix("[]\n}")
        args.out.write_text(f"{body}[\n  {lines}\n ]\n}}\n", encoding="utf-8")
        part.unlink()
    for line in wrong:
        print(line)
    print(json.dumps({"kernels": len(rows), "triton": triton.__version__, "faults": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
