"""Times calls of tree attention and of the installed peers on one GPU.

    python -m scripts.benchmarks tree_attention --build --out docs/results

The tests of ``tests/gpu/test_tree_attention.py`` must pass on the same GPU first. Calls are timed in a CUDA
graph over copies of the KV that together exceed L2. The roofline of a cell is the larger of its bytes over
the read bandwidth and its FLOPs over the rate of matrix products, both measured in the same run. One run
makes the results file, which is written after each step.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from scripts.benchmarks.attention.peers import PEERS, peers
from scripts.benchmarks.attention.problems import Ceilings, Cell, measure_ceilings, random_kv, tree_mask
from scripts.benchmarks.attention.tables import FILE, cells
from scripts.benchmarks.common.results import Record, header, write
from scripts.benchmarks.common.timing import time_calls
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.launch import TritonAttention, prepare
from triforce_tree.kernels.attention.plan import KV, AttentionParams, plan_trees

# The arguments are query heads, KV heads, prefix, tree and sequences.
CELLS = [
    Cell(32, 32, 122880, 16), Cell(32, 32, 122880, 64), Cell(32, 8, 122880, 1), Cell(32, 8, 122880, 16),
    Cell(32, 8, 122880, 64), Cell(32, 8, 32768, 16), Cell(32, 8, 32768, 64), Cell(32, 32, 4096, 16),
    Cell(32, 8, 4096, 64), Cell(32, 8, 122880, 256), Cell(32, 8, 32768, 256), Cell(32, 8, 19456, 16, batch=6),
]  # fmt: skip
PAGED = [Cell(32, 8, 122880, 16), Cell(32, 8, 122880, 64)]
LAYOUTS = ("heads", "rows", 1, 16, 64, 128, 256)
SLOW = "FlexAttention"  # autotunes for long in each cell, so it is timed last


def _problem(cell: Cell) -> tuple[Tensor, TritonAttention]:
    mask = tree_mask(cell.size)
    plan = plan_trees(cell.heads, [mask] * cell.batch, [cell.length] * cell.batch, device="cuda")
    q = torch.randn(cell.batch * cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
    return q, prepare(plan, q.dtype)


def ours(cell: Cell, kv: list, layout: str | int = "heads") -> float:
    """Returns the microseconds of one call; if ``layout`` is a page size, with a shuffled page table."""
    (q, attention), params, table = _problem(cell), AttentionParams(cell.dim**-0.5), None
    if isinstance(layout, int):
        # The pages of all sequences are in one pool, with the same bytes as the copies without pages.
        pages = cell.rows // layout + 1
        table = torch.randperm(cell.batch * pages, device="cuda").int().view(cell.batch, pages)
        shape = (cell.batch * pages, layout, cell.kv_heads, cell.dim)
        kv = [
            tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
            for _ in kv
        ]
    return time_calls([lambda k=k, v=v: attention.states(q, KV(k, v, table), params) for k, v in kv])


def error_ratio(cell: Cell, kv: tuple) -> float:
    """Returns our largest error over torch's in bf16, against fp64, for the first sequence and KV head."""
    (q, attention), scale = _problem(cell), cell.dim**-0.5
    group, mask = cell.heads.group, tree_mask(cell.size)
    out = attention.run(q, KV(*kv), AttentionParams(scale))
    packed = q[: cell.size, :group].transpose(0, 1)[None]
    k, v = (x[:1, :1] for x in kv)
    exact, _ = reference.tree_attention(packed.double(), k.double(), v.double(), mask, scale=scale)
    visible = torch.ones(cell.size, cell.rows, dtype=torch.bool, device="cuda")
    visible[:, cell.length :] = mask
    scores = (packed @ k.transpose(-1, -2)) * scale
    plain = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
    mine = out[: cell.size, :group].transpose(0, 1)[None]
    return ((mine - exact).abs().max() / (plain - exact).abs().max()).item()


def measure(cell: Cell, ceilings: Ceilings) -> Record:
    """Returns a row with our time, to which the peers are added."""
    kv = random_kv(cell)
    took, roof = ours(cell, kv), cell.roof_us(ceilings)
    return {
        "hq": cell.query_heads, "hkv": cell.kv_heads, "l": cell.length, "t": cell.size, "batch": cell.batch,
        "layout": "unpaged [B, H_kv, S, D]", "ours_us": round(took, 2), "roof_us": round(roof, 2),
        "percent_of_roof": round(100 * roof / took, 1), "error_ratio": round(error_ratio(cell, kv[0]), 3),
        "peers": {}, "peers_without_a_time": {SLOW: "its autotuning was cut off with the run"},
    }  # fmt: skip


def add_peers(row: Record, cell: Cell, names: list[str]) -> None:
    for name, took in peers(cell, random_kv(cell), names).items():
        row["peers_without_a_time"].pop(name, None)
        row["peers_without_a_time" if isinstance(took, str) else "peers"][name] = took
    print(json.dumps(row), flush=True)


def time_layout(cell: Cell, layout: str | int, ceilings: Ceilings) -> Record:
    """Times a cell in one layout of KV slots, an order without pages or pages of one size."""
    took = ours(cell, random_kv(cell, "rows" if layout == "rows" else "heads"), layout)
    name = f"page {layout}" if isinstance(layout, int) else layout
    percent = round(100 * cell.roof_us(ceilings) / took, 1)
    return {"cell": str(cell), "layout": name, "us": round(took, 2), "percent_of_roof": percent}


def started() -> Record:
    """Returns the header of a results file."""
    try:
        flashinfer = version("flashinfer-python")
    except PackageNotFoundError:
        flashinfer = None
    versions = {"torch": torch.__version__, "triton": triton.__version__, "flashinfer": flashinfer}
    return header(0) | {"gpu": torch.cuda.get_device_name(), **versions}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks tree_attention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--build", action="store_true", help="compile FlashInfer's modules first")
    parser.add_argument("--out", type=Path, help=f"folder for {FILE}")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    result: dict[str, Any] = started()

    def save() -> None:
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            write(args.out / FILE, result)

    if args.build:
        subprocess.run([sys.executable, "-m", "scripts.benchmarks.attention.peers", "--build"], check=True)
    ceilings = measure_ceilings()
    result["ceilings"], result["rows"] = vars(ceilings), []
    for cell in CELLS:
        result["rows"].append(measure(cell, ceilings))
        add_peers(result["rows"][-1], cell, [name for name in PEERS if name != SLOW])
        save()
    result["layouts"] = [time_layout(cell, layout, ceilings) for cell in PAGED for layout in LAYOUTS]
    save()
    # With few query rows per KV head its time is closest to ours, so these cells are timed first.
    by_rows = sorted(
        zip(result["rows"], CELLS, strict=True), key=lambda p: p[1].batch * p[1].size * p[1].heads.group
    )
    for row, cell in by_rows:
        add_peers(row, cell, [SLOW])
        save()
    print(cells(result))
    print(json.dumps(result))
