"""KV bytes that attention over texts that branch reads, counted by Nsight Compute, beside those on paper.

    python -m scripts.benchmarks workload_bytes       # docs/results/tree_workload_bytes_MACHINE.json

Needs ``ncu`` and the right to read hardware counters. Each way runs once under the profiler, every kernel
with empty caches: what one kernel leaves in L2 for the next counts as read again, partial results among it.
"""

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from scripts.benchmarks.common.command import device_of, machine_of, parser, results_folder
from scripts.benchmarks.common.results import Record, header, write
from triforce_tree.eval.workloads import attention
from triforce_tree.eval.workloads.shapes import chosen
from triforce_tree.eval.workloads.storage import Problem
from triforce_tree.kernels.attention.plan import Heads

FILE = "tree_workload_bytes_{}.json"
WORKLOADS = (
    "deft/few-shot-4000x20", "deft/few-shot-20000x50", "deft/sorting", "deft/speculative-256",
    "fasttree/1,1024:2048,32", "pat/1,8,512:512,512,256", "long/32x256",
)  # fmt: skip
HEADS, _PAGE = Heads(32, 8, 128), 64
_METRIC = "dram__bytes_read.sum"
# A kernel that no way launches stands between them.
_BETWEEN = "triu_indices"
_CHILD = "TRIFORCE_TREE_READ_BYTES"


def calls(names: Sequence[str], device: torch.device) -> None:
    """One call of every way that runs, under the profiler, each behind the kernel that separates them."""
    cuda = torch.cuda.cudart()
    for workload in chosen(names):
        problem = Problem(workload, HEADS, _PAGE, device, torch.bfloat16)
        for way in attention.WAYS:
            try:
                call, *_ = attention.WAYS[way](problem, problem.queries)
                call()  # compiles
            except (ImportError, NotImplementedError, RuntimeError) as error:
                print(f"{workload.name}, {way}: {str(error)[:80]}", file=sys.stderr)
                continue
            torch.cuda.synchronize()
            cuda.cudaProfilerStart()
            torch.triu_indices(2, 2, device=device)
            call()
            torch.cuda.synchronize()
            cuda.cudaProfilerStop()
            print(f"way\t{workload.name}\t{way}\t{attention.positions_read(problem, way)}", flush=True)


def rows_of(output: str) -> list[Record]:
    """Rows from what ncu and :func:`calls` print: megabytes counted and on paper."""
    lines = output.splitlines()
    ways = [line.split("\t")[1:] for line in lines if line.startswith("way\t")]
    table = csv.DictReader(io.StringIO("\n".join(line for line in lines if line.startswith('"'))))
    counted: list[float] = []
    for row in table:
        if _BETWEEN in row["Kernel Name"]:
            counted.append(0.0)
        elif row.get("Metric Name") == _METRIC:
            counted[-1] += float(row["Metric Value"].replace(",", ""))
    slot = HEADS.row * 2
    return [
        {
            "workload": name,
            "way": way,
            "paper_megabytes": int(positions) * slot / 1e6,
            "megabytes": size / 1e6,
        }
        for (name, way, positions), size in zip(ways, counted, strict=True)
    ]


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks workload_bytes", __doc__)
    made.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME")
    args = made.parse_args(words)
    device = device_of(made, tiny=False)
    if os.environ.get(_CHILD):
        calls(args.workloads, device)
        return 0
    if shutil.which("ncu") is None:
        made.error("ncu is not installed; install NVIDIA Nsight Compute")
    command = ["ncu", "--csv", "--metrics", _METRIC, "--print-units", "base", "--profile-from-start", "off"]
    command += [
        sys.executable,
        "-m",
        "scripts.benchmarks.workloads.read_bytes",
        "--workloads",
        *args.workloads,
    ]
    done = subprocess.run(
        command, env={**os.environ, _CHILD: "1"}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        print(done.stdout[-2000:], file=sys.stderr)
        return done.returncode
    rows = rows_of(done.stdout)
    path = results_folder(args.out, tiny=False) / FILE.format(machine_of(device))
    write(path, header(args.seed) | {"heads": "32/8 x 128", "rows": rows})
    print(*rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
