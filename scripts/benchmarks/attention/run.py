"""Tree attention on one GPU: the correctness gate, then time per call beside the peers that are there.

    python -m scripts.benchmarks tree_attention --check                           # the gate alone
    python -m scripts.benchmarks tree_attention --build --out docs/results        # gate, timings, results

A speed is never reported where the gate failed. Calls are timed in a CUDA graph over KV copies that together
exceed L2; the roofline of a cell is the larger of its bytes over the read bandwidth and its FLOPs over the
matmul rate, both measured in the same run. One run makes the results file, which is written after each step.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from scripts.benchmarks.attention.peers import PEERS, peers
from scripts.benchmarks.attention.problems import Ceilings, Cell, measure_ceilings, random_kv, tree_mask
from scripts.benchmarks.attention.tables import FILE, cells
from scripts.benchmarks.common.results import header, write
from scripts.benchmarks.common.timing import time_calls
from scripts.checks.report import need_gpu
from scripts.checks.tree_attention_check import gate
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.launch import run
from triforce_tree.kernels.attention.plan import Plan, plan_trees

# Query heads, KV heads, prefix, tree, sequences.
CELLS = [
    Cell(32, 32, 122880, 16), Cell(32, 32, 122880, 64), Cell(32, 8, 122880, 1), Cell(32, 8, 122880, 16),
    Cell(32, 8, 122880, 64), Cell(32, 8, 32768, 16), Cell(32, 8, 32768, 64), Cell(32, 32, 4096, 16),
    Cell(32, 8, 4096, 64), Cell(32, 8, 122880, 256), Cell(32, 8, 32768, 256), Cell(32, 8, 19456, 16, batch=6),
]  # fmt: skip
PAGED = [Cell(32, 8, 122880, 16), Cell(32, 8, 122880, 64)]
LAYOUTS = ("heads", "rows", 1, 16, 64, 128, 256)
SLOW = "FlexAttention"  # autotunes for long in each cell, so it is timed last


def _problem(cell: Cell) -> tuple[torch.Tensor, Plan]:
    mask = tree_mask(cell.size)
    plan = plan_trees(cell.heads, [mask] * cell.batch, [cell.length] * cell.batch, device="cuda")
    q = torch.randn(cell.batch * cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
    return q, plan


def ours(cell: Cell, kv: list, layout: str | int = "heads") -> float:
    """Microseconds of one call; with a page size for ``layout``, through a shuffled page table."""
    (q, plan), scale, table = _problem(cell), cell.dim**-0.5, None
    if isinstance(layout, int):
        # Pages of all sequences in one pool; the same bytes as the unpaged copies.
        pages = cell.rows // layout + 1
        table = torch.randperm(cell.batch * pages, device="cuda").int().view(cell.batch, pages)
        shape = (cell.batch * pages, layout, cell.kv_heads, cell.dim)
        kv = [
            tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
            for _ in kv
        ]
    return time_calls([lambda k=k, v=v: run(q, k, v, plan, scale=scale, table=table) for k, v in kv])


def error_ratio(cell: Cell, kv: tuple) -> float:
    """Our largest error over torch's in bf16, against fp64, on the first sequence and KV head."""
    (q, plan), scale, group, mask = _problem(cell), cell.dim**-0.5, cell.heads.group, tree_mask(cell.size)
    out, _ = run(q, *kv, plan, scale=scale)
    packed = q[: cell.size, :group].transpose(0, 1)[None]
    k, v = (x[:1, :1] for x in kv)
    exact, _ = reference.tree_attention(packed.double(), k.double(), v.double(), mask, scale=scale)
    visible = torch.ones(cell.size, cell.rows, dtype=torch.bool, device="cuda")
    visible[:, cell.length :] = mask
    scores = (packed @ k.transpose(-1, -2)) * scale
    plain = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
    mine = out[: cell.size, :group].transpose(0, 1)[None]
    return ((mine - exact).abs().max() / (plain - exact).abs().max()).item()


def measure(cell: Cell, ceilings: Ceilings) -> dict:
    kv = random_kv(cell)
    took, roof = ours(cell, kv), cell.roof_us(ceilings)
    return {
        "hq": cell.query_heads, "hkv": cell.kv_heads, "l": cell.length, "t": cell.size, "batch": cell.batch,
        "layout": "unpaged [B, H_kv, S, D]", "ours_us": round(took, 2), "roof_us": round(roof, 2),
        "percent_of_roof": round(100 * roof / took, 1), "error_ratio": round(error_ratio(cell, kv[0]), 3),
        "peers": {}, "peers_without_a_time": {},
    }  # fmt: skip


def add_peers(row: dict, cell: Cell, names: list[str]) -> None:
    for name, took in peers(cell, random_kv(cell), names).items():
        row["peers_without_a_time" if isinstance(took, str) else "peers"][name] = took
    print(json.dumps(row), flush=True)


def time_layout(cell: Cell, layout: str | int, ceilings: Ceilings) -> dict:
    """The same cell unpaged in both storage orders, or paged."""
    took = ours(cell, random_kv(cell, "rows" if layout == "rows" else "heads"), layout)
    name = f"page {layout}" if isinstance(layout, int) else layout
    percent = round(100 * cell.roof_us(ceilings) / took, 1)
    return {"cell": str(cell), "layout": name, "us": round(took, 2), "percent_of_roof": percent}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks tree_attention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="run the correctness gate only")
    parser.add_argument("--no-gate", action="store_true", help="skip the gate (while tuning)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check every Nth case only")
    parser.add_argument("--build", action="store_true", help="compile FlashInfer's modules during the gate")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], help="peers to time")
    parser.add_argument("--seconds", type=float, default=360, help=f"when to stop timing {SLOW}")
    parser.add_argument("--only", default="", help="time only the cells whose name contains this")
    parser.add_argument("--workers", type=int, default=14, help="processes of the gate")
    parser.add_argument("--out", type=Path, help=f"folder for {FILE}")
    parser.add_argument("--commit", help="of this tree, for the results file, where no .git says it")
    args = parser.parse_args(words)
    need_gpu(parser)
    began, result = time.perf_counter(), header(0, "attention")
    result |= {"gpu": torch.cuda.get_device_name(), "torch": _version("torch"), "triton": _version("triton")}
    result |= {"flashinfer": _version("flashinfer-python")}
    result |= {"commit": args.commit} if args.commit else {}

    def save() -> None:
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            write(args.out / FILE, result)

    build = [sys.executable, "-m", "scripts.benchmarks.attention.peers", "--build"]
    builder = subprocess.Popen(build) if args.build else None
    if not args.no_gate:
        result["gate"] = found = gate(args.workers, args.every)
        save()
        print(json.dumps(found, indent=1), flush=True)
        if found["failed"] or found["replays"]["different_elements"]:
            sys.exit("the gate failed: no speeds are reported")
    if builder:
        builder.wait()
    if args.check:
        return
    ceilings = measure_ceilings()
    result["ceilings"], result["rows"] = vars(ceilings), []
    chosen = [cell for cell in CELLS if args.only in str(cell)]
    for cell in chosen:
        result["rows"].append(measure(cell, ceilings))
        add_peers(result["rows"][-1], cell, [name for name in args.peers if name != SLOW])
        save()
    if not args.only:
        result["layouts"] = [time_layout(cell, layout, ceilings) for cell in PAGED for layout in LAYOUTS]
        save()
    if SLOW in args.peers:
        for row in result["rows"]:
            row["peers_without_a_time"][SLOW] = "its autotuning was cut off by the time of the run"
        # With few rows a KV head it comes nearest to ours, so those cells say most.
        by_rows = sorted(
            zip(result["rows"], chosen, strict=True), key=lambda p: p[1].batch * p[1].size * p[1].heads.group
        )
        longest = 0.0
        for row, cell in by_rows:
            start = time.perf_counter()
            if start - began + longest > args.seconds:
                break
            del row["peers_without_a_time"][SLOW]
            add_peers(row, cell, [SLOW])
            save()
            longest = max(longest, time.perf_counter() - start)
    print(cells(result))
    print(json.dumps(result))
