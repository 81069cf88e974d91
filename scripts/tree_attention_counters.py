"""Bytes that plans count beside those that the hardware's counters saw, through Nsight Compute.

Run as a script it makes the calls alone, for the profiler to watch.
"""

import csv
import subprocess
import sys

import torch
from tree_attention_timing import Cell, random_kv, tree_mask

from triforce_tree.kernels.attention.launch import run
from triforce_tree.kernels.attention.plan import plan_trees

COUNTED = (Cell(32, 8, 122880, 16), Cell(32, 8, 32768, 64))


def calls() -> None:
    """One call of each cell."""
    for cell in COUNTED:
        plan = plan_trees(cell.heads, [tree_mask(cell.size)], [cell.length], device="cuda")
        q = torch.randn(cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
        run(q, *random_kv(cell)[0], plan, scale=cell.dim**-0.5)
    torch.cuda.synchronize()


def counters() -> list[dict]:
    """Run this file under the profiler and read what it says."""
    names = {
        "dram__bytes_read.sum": "dram_bytes_read",
        "dram__bytes_write.sum": "dram_bytes_written",
        "lts__t_bytes.sum": "l2_bytes",
    }
    command = [
        "ncu", "--clock-control", "none", "--print-units", "base", "--csv",
        "--kernel-name", "regex:tree_attention_kernel", "--metrics", ",".join(names),
        sys.executable, __file__,
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    lines = [line for line in said.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise RuntimeError(f"ncu read nothing: {(said.stdout + said.stderr)[-200:]}")
    read: dict[str, dict[str, int]] = {}
    for line in csv.DictReader(lines):
        if line["Metric Name"] in names:
            value = int(float(line["Metric Value"].replace(",", "")))
            read.setdefault(line["ID"], {})[names[line["Metric Name"]]] = value
    rows = []
    for cell, found in zip(COUNTED, read.values(), strict=True):
        heads, size = cell.heads, 2  # bytes of an element
        moved = 2 * (cell.length + cell.size) * heads.kv * heads.dim * size
        moved += 2 * cell.size * heads.query * heads.dim * size
        rows.append({"cell": str(cell), "counted_kv_and_queries": moved, **found})
    return rows


if __name__ == "__main__":
    calls()
