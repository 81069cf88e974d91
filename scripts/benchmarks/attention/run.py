"""Tree attention on one GPU: the correctness gate, then time per call beside the peers that are there.

    python -m scripts.benchmarks tree_attention --check                           # the gate alone
    python -m scripts.benchmarks tree_attention --build --out docs/results        # gate, timings, results

A speed is never reported on a red gate. Calls are timed in a CUDA graph over KV copies that together do not
fit L2; the roof of a cell is the larger of its bytes over the read bandwidth and its FLOPs over the matmul
rate, both measured in the same run. All that the results file holds comes from one run, which writes it anew
after each step.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

import torch

from scripts.benchmarks.attention.peers import PEERS, peers
from scripts.benchmarks.attention.problems import Ceilings, Cell, measure_ceilings, random_kv, tree_mask
from scripts.benchmarks.attention.tables import FILE
from scripts.benchmarks.attention.tables import cells as cell_table
from scripts.benchmarks.common.results import header, write
from scripts.benchmarks.common.timing import time_calls
from scripts.checks.tree_attention_check import gate
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.launch import run
from triforce_tree.kernels.attention.plan import plan_trees

CELLS = [
    Cell(32, 32, 122880, 16),
    Cell(32, 32, 122880, 64),
    Cell(32, 8, 122880, 1),
    Cell(32, 8, 122880, 16),
    Cell(32, 8, 122880, 64),
    Cell(32, 8, 32768, 16),
    Cell(32, 8, 32768, 64),
    Cell(32, 32, 4096, 16),
    Cell(32, 8, 4096, 64),
]
SLOW = "FlexAttention"  # autotunes for long in each cell, so it gets what time is left
MORE = [Cell(32, 8, 122880, 256), Cell(32, 8, 32768, 256), Cell(32, 8, 19456, 16, batch=6)]


def ours(cell: Cell, kv: list, layout: str | int = "heads", split: str = "flatten") -> float:
    """Microseconds of one call; with a page size for ``layout``, through a shuffled page table."""
    mask, scale = tree_mask(cell.size), cell.dim**-0.5
    plan = plan_trees(cell.heads, [mask] * cell.batch, [cell.length] * cell.batch, device="cuda", split=split)
    q = torch.randn(cell.batch * cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
    table = None
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
    mask, scale, group = tree_mask(cell.size), cell.dim**-0.5, cell.heads.group
    plan = plan_trees(cell.heads, [mask] * cell.batch, [cell.length] * cell.batch, device="cuda")
    q = torch.randn(cell.batch * cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
    out, _ = run(q, *kv, plan, scale=scale)
    packed = q[: cell.size, :group].transpose(0, 1)[None]
    k, v = (x[:1, :1] for x in kv)
    exact, _ = reference.tree_attention(packed.double(), k.double(), v.double(), mask, scale=scale)
    seen = torch.ones(cell.size, cell.rows, dtype=torch.bool, device="cuda")
    seen[:, cell.length :] = mask
    scores = (packed @ k.transpose(-1, -2)) * scale
    plain = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    mine = out[: cell.size, :group].transpose(0, 1)[None]
    return ((mine - exact).abs().max() / (plain - exact).abs().max()).item()


def measure(cell: Cell, ceilings: Ceilings, names: list[str]) -> dict:
    kv = random_kv(cell)
    took, roof = ours(cell, kv), cell.roof_us(ceilings)
    row = {
        "hq": cell.query_heads,
        "hkv": cell.kv_heads,
        "l": cell.length,
        "t": cell.size,
        "batch": cell.batch,
        "layout": "unpaged [B, H_kv, S, D]",
        "ours_us": round(took, 2),
        "roof_us": round(roof, 2),
        "percent_of_roof": round(100 * roof / took, 1),
        "error_ratio": round(error_ratio(cell, kv[0]), 3),
        "peers": {},
        "peers_without_a_time": {},
    }
    add_peers(row, peers(cell, kv, names))
    print(json.dumps(row), flush=True)
    return row


def add_peers(row: dict, found: dict[str, float | str]) -> None:
    for name, took in found.items():
        row["peers_without_a_time" if isinstance(took, str) else "peers"][name] = took


def layouts(ceilings: Ceilings) -> list[dict]:
    """The same cell unpaged in both storage orders and paged."""
    rows = []
    for cell in [Cell(32, 8, 122880, 16), Cell(32, 8, 122880, 64)]:
        for layout in ("heads", "rows", 1, 16, 64, 128, 256):
            kv = random_kv(cell, layout) if isinstance(layout, str) else random_kv(cell)
            took = ours(cell, kv, layout)
            name = f"page {layout}" if isinstance(layout, int) else layout
            percent = round(100 * cell.roof_us(ceilings) / took, 1)
            rows.append({"cell": str(cell), "layout": name, "us": round(took, 2), "percent_of_roof": percent})
            print(json.dumps(rows[-1]), flush=True)
            del kv
    return rows


class Report:
    """What is known so far, written after every step: a run that is cut short leaves all it measured."""

    def __init__(self, folder: Path | None, commit: str | None):
        self.path = folder / FILE if folder else None
        self.began = perf_counter()
        self.result: dict = {
            **header(0, "attention"),
            "gpu": torch.cuda.get_device_name(),
            **{name: _version(package) for name, package in _PACKAGES.items()},
        }
        if commit:
            self.result["commit"] = commit

    def passed(self) -> float:
        return perf_counter() - self.began

    def add(self, name: str, make: Callable[[], object]) -> None:
        """One section; a failure is recorded and leaves the others to run."""
        try:
            self.result[name] = make()
        except Exception as error:
            self.result[name] = []
            self.result.setdefault("sections_that_failed", {})[name] = repr(error)[:300]
        self.save()

    def save(self) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, self.result)


_PACKAGES = {"torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python"}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def slow_peer(report: Report, cells: list[Cell], seconds: float) -> None:
    """FlexAttention in the cells that the time allows, those with the fewest rows a KV head first.

    There it has come nearest to ours, so those say most.
    """
    rows_a_head = [cell.batch * cell.size * cell.heads.group for cell in cells]
    order = sorted(range(len(cells)), key=rows_a_head.__getitem__)
    longest = 0.0
    for at in order:
        began, row = perf_counter(), report.result["rows"][at]
        if report.passed() + longest > seconds:
            row["peers_without_a_time"][SLOW] = "its autotuning was cut off by the time of the run"
            continue
        add_peers(row, peers(cells[at], random_kv(cells[at]), [SLOW]))
        longest = max(longest, perf_counter() - began)
        report.save()


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
    parser.add_argument("--only", help="time the cells whose name contains this, and nothing else")
    parser.add_argument("--workers", type=int, default=14, help="processes of the gate")
    parser.add_argument("--out", type=Path, help=f"folder for {FILE}")
    parser.add_argument("--commit", help="of this tree, for the results file, where no .git says it")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; the tests run these kernels in Triton's interpreter")

    report = Report(args.out, args.commit)
    result = report.result
    build = [sys.executable, "-m", "scripts.benchmarks.attention.peers", "--build"]
    builder = subprocess.Popen(build) if args.build else None
    if not args.no_gate:
        report.add("gate", lambda: gate(args.workers, args.every))
        print(json.dumps(result["gate"], indent=1), flush=True)
        if not result["gate"] or result["gate"]["failed"] or result["gate"]["replays"]["different_elements"]:
            sys.exit("the gate is red: no speeds are reported")
    if builder:
        builder.wait()
    if args.check:
        return
    ceilings = measure_ceilings()
    result["ceilings"] = vars(ceilings)
    print(json.dumps(result["ceilings"]), flush=True)
    cells = [c for c in CELLS + MORE if args.only is None or args.only in str(c)]
    quick = [name for name in args.peers if name != SLOW]
    report.add("rows", list)
    for cell in cells:
        result["rows"].append(measure(cell, ceilings, quick))
        report.save()
    if args.only is None:
        report.add("layouts", lambda: layouts(ceilings))
    if SLOW in args.peers:
        slow_peer(report, cells, args.seconds)
    print(cell_table(result))
    print(json.dumps(result))
