"""Try tile shapes of the tree-attention kernel on one GPU: what filled the table in ``configs.py``.

    python -m scripts.benchmarks.attention.tune --out sweep.json

Configurations are compiled in parallel processes first, so that the timing process finds them
cached.
"""

import argparse
import json
import subprocess
import sys

import torch

from scripts.benchmarks.attention.problems import Cell, random_kv, tree_mask
from scripts.benchmarks.common.timing import time_calls
from triforce_tree.kernels.configs import KernelConfig as C
from triforce_tree.kernels.launch import run
from triforce_tree.kernels.plan import plan_trees

# The first configuration of a group is the one of the table; the others must give its result.
SWEEP = [
    (
        [Cell(32, 32, 4096, 16), Cell(32, 32, 122880, 16), Cell(32, 8, 122880, 1)],
        [
            C(16, 128, 4, 3, 1), C(16, 64, 4, 3, 2), C(16, 64, 4, 2, 3), C(16, 64, 2, 3, 2),
            C(16, 128, 8, 3, 1),
        ],
    ),
    (
        [Cell(32, 8, 32768, 16), Cell(32, 8, 122880, 16), Cell(32, 32, 122880, 64)],
        [C(64, 64, 4, 3, 2), C(64, 64, 4, 3, 2, align=64), C(64, 128, 8, 3, 1)],
    ),
    (
        [Cell(32, 8, 4096, 64), Cell(32, 8, 32768, 64), Cell(32, 8, 122880, 64), Cell(32, 8, 32768, 256)],
        [
            C(64, 64, 4, 3, 2), C(128, 64, 8, 3, 1), C(128, 64, 8, 4, 1), C(128, 128, 8, 3, 1),
            C(256, 64, 8, 3, 1), C(64, 32, 4, 3, 3, max_registers=168),
            # Two resident programs of two warp groups each: half of the traffic through L2.
            C(128, 64, 8, 2, 2, max_registers=128), C(128, 32, 8, 4, 2, max_registers=128),
        ],
    ),
]  # fmt: skip


def attempt(cell: Cell, config: C, kv: list, warm: bool, first: C) -> dict:
    row = {"cell": str(cell), "config": str(config)[13:-1]}
    try:
        q = torch.randn(cell.size, cell.query_heads, cell.dim, device="cuda", dtype=torch.bfloat16)
        trees = [tree_mask(cell.size)]
        plan = plan_trees(cell.heads, trees, [cell.length], device="cuda", config=config)
        calls = [lambda k=k, v=v: run(q, k, v, plan, scale=cell.dim**-0.5) for k, v in kv]
        if warm:
            calls[0]()
            torch.cuda.synchronize()
        else:
            usual = plan_trees(cell.heads, trees, [cell.length], device="cuda", config=first)
            known = run(q, *kv[0], usual, scale=cell.dim**-0.5)[0].float()
            row["apart"] = round(((calls[0]()[0].float() - known).norm() / known.norm()).item(), 5)
            row["us"] = round(time_calls(calls, 15.0), 2)
    except Exception as error:
        row["error"] = repr(error)[:200]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="sweep.json")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shard is not None:
        every = [(cells, config, many[0]) for cells, many in SWEEP for config in many]
        for cells, config, first in every[args.shard :: args.workers]:
            for cell in cells:
                small = Cell(cell.query_heads, cell.kv_heads, 4096, cell.size)
                attempt(small, config, random_kv(small)[:1], True, first)
        return
    command = [sys.executable, "-m", "scripts.benchmarks.attention.tune", "--workers", str(args.workers)]
    workers = [subprocess.Popen([*command, "--shard", str(i)]) for i in range(args.workers)]
    for worker in workers:
        worker.wait()
    rows = []
    for cells, configs in SWEEP:
        for cell in cells:
            kv = random_kv(cell)
            for config in configs:
                rows.append(attempt(cell, config, kv, False, configs[0]))
                print(*rows[-1].values(), flush=True)
            del kv
            with open(args.out, "w") as file:
                json.dump(rows, file, indent=0)


if __name__ == "__main__":
    main()
