"""Compile every kernel ahead of time for GPUs that are not at hand, and hold it to their limits.

    python -m scripts.checks.kernels_by_arch                     # all: an hour of one core
    python -m scripts.checks.kernels_by_arch --arch sm_89 --every 20
    python -m scripts.checks.kernels_by_arch --out docs/results/kernels_by_arch.json

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
from rich.console import Console
from rich.progress import track

from scripts.benchmarks.common.results import header, write
from scripts.checks.kernel_variants import digest
from triforce_tree.eval.results import Records
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
}  # fmt: skip


def compile_share(task: tuple[str, int, int, int]) -> list[Row]:
    """Rows of one architecture's variants ``first``, ``first + every``, ... of the share ``share``."""
    from scripts.checks.compile_ahead import compiled
    from scripts.checks.kernel_variants import variants

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


def summary(rows: list[Row]) -> list[Row]:
    """What the results file keeps: of each kernel on each architecture the extremes, and all that spill."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["arch"], row["kernel"]), []).append(row)
    found = []
    for (arch, kernel), some in kinds.items():
        made = [row for row in some if "error" not in row]
        kind = {"arch": arch, "kernel": kernel, "limit_bytes": some[0]["limit_bytes"], "compiled": len(made)}
        kind |= {key: max((row[key] for row in made), default=0) for key in ("shared_bytes", "spill_bytes")}
        kind["spills"] = {row["variant"]: row["spill_bytes"] for row in made if row["spill_bytes"] > SPARED}
        kind["failed"] = {row["variant"]: row["error"] for row in some if "error" in row}
        kind["serialized"] = [row["variant"] for row in made if row.get("serialized")]
        found.append(kind)
    return found


def rows_of(kernels: list[Row]) -> Iterator[Row]:
    """The rows of a summary that ``faults`` may find something in."""
    for kind in kernels:
        row = {key: kind[key] for key in ("arch", "kernel", "limit_bytes", "shared_bytes", "spill_bytes")}
        yield row | {"variant": "the largest"}
        yield from (row | {"variant": name, "serialized": True} for name in kind["serialized"])
        yield from (row | {"variant": name, "error": error} for name, error in kind["failed"].items())


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
        result = header(0, "kernels") | {"triton": triton.__version__, "choices": choices}
        write(args.out, result | {"kernels": summary(rows)})
        part.unlink()
    for line in wrong:
        print(line)
    print(json.dumps({"kernels": len(rows), "triton": triton.__version__, "faults": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
