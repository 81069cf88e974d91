"""Tree attention on one GPU: the correctness gate, then time per call beside the peers that are
there.

    python scripts/bench_tree_attention.py --check                  # the gate alone
    python scripts/bench_tree_attention.py --build --out results    # gate, timings, JSON, plot

A speed is never reported on a red gate. Calls are timed in a CUDA graph over KV copies that
together do not fit L2; the roof of a cell is the larger of its bytes over the read bandwidth and
its FLOPs over the matmul rate, both measured in the same run. All that the results file holds comes
from one run, which writes it anew after each step. ``scripts/make_tables.py`` puts it into the docs.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from bench_peers import PEERS, peers
from bench_tree_shaped import SHAPES
from bench_tree_shaped import measure as measure_shape
from kernel_tables import cells as cell_table
from kernel_tables import plot
from tree_attention_check import check, replays
from tree_attention_counters import counters
from tree_attention_timing import Ceilings, Cell, measure_ceilings, random_kv, time_calls, tree_mask

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.launch import run
from triforce_tree.kernels.attention.plan import Heads, pack_mask, plan_trees

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


def gate(workers: int, every: int) -> dict:
    """All cases, spread over processes because most of the time is compilation; and the replays."""
    command = [sys.executable, __file__, "--workers", str(workers), "--every", str(every), "--shard"]
    running = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(workers)
    ]
    rows: list[dict] = []
    for index, process in enumerate(running):
        out = process.communicate()[0].strip().splitlines()
        if process.returncode or not out:
            rows.append({"case": f"shard {index}", "ok": False, "error": "the process died"})
        else:
            rows += json.loads(out[-1])
    judged = [row for row in rows if "error_ratio" in row]
    single = [row["error_ratio"] for row in judged if " float32 " in row["case"]]
    half = [row["error_ratio"] for row in judged if " float32 " not in row["case"]]
    return {
        "cases": len(rows),
        "failed": [row for row in rows if not row["ok"]],
        "worst_error_ratio": max(half, default=None),
        "worst_error_ratio_fp32": max(single, default=None),
        "replays": replays(),
    }


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
            rows.append(
                {
                    "cell": str(cell),
                    "layout": name,
                    "us": round(took, 2),
                    "percent_of_roof": percent,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            del kv
    return rows


def plan_cost() -> dict:
    """Host microseconds of a plan and of updating one in place."""
    heads, mask = Heads(32, 8, 128), tree_mask(64, "cpu")
    plan = plan_trees(heads, [mask], [4096], device="cuda")
    words = plan.mask.clone()
    lengths = torch.tensor([5000], dtype=torch.int32, device="cuda")

    def update(mask: torch.Tensor, lengths: torch.Tensor) -> None:
        plan.mask.copy_(mask, non_blocking=True)
        plan.lengths.copy_(lengths, non_blocking=True)

    def host_us(call: Callable[[], object]) -> float:
        times = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = perf_counter()
            call()
            times.append((perf_counter() - start) * 1e6)
        return round(median(times), 1)

    return {
        "plan_us": host_us(lambda: plan_trees(heads, [mask], [4096], device="cuda")),
        "update_from_host_us": host_us(lambda: update(pack_mask(mask), torch.tensor([5000]))),
        "update_from_device_us": host_us(lambda: update(words, lengths)),
    }


class Report:
    """What is known so far, written after every step: a run that is cut short leaves all it measured."""

    def __init__(self, folder: Path | None, commit: str | None):
        self.folder = folder
        self.began = perf_counter()
        self.result: dict = {
            "gpu": torch.cuda.get_device_name(),
            **{name: _version(package) for name, package in _PACKAGES.items()},
            "command": " ".join(["python", *sys.argv]).replace(str(folder), "docs/results"),
            "commit": commit,
            "seconds": {},
        }

    def passed(self) -> float:
        return perf_counter() - self.began

    def add(self, name: str, make: Callable[[], object]) -> None:
        """One section; a failure is recorded and leaves the others to run."""
        start = perf_counter()
        try:
            self.result[name] = make()
        except Exception as error:
            self.result[name] = []
            self.result.setdefault("sections_that_failed", {})[name] = repr(error)[:300]
        self.result["seconds"][name] = round(perf_counter() - start, 1)
        self.save()

    def save(self) -> None:
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.result, indent=1) + "\n"
            (self.folder / "tree_attention_h200.json").write_text(text)


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
    start, longest = perf_counter(), 0.0
    for at in order:
        began, row = perf_counter(), report.result["rows"][at]
        if report.passed() + longest > seconds:
            row["peers_without_a_time"][SLOW] = "its autotuning was cut off by the time of the run"
            continue
        add_peers(row, peers(cells[at], random_kv(cells[at]), [SLOW]))
        longest = max(longest, perf_counter() - began)
        report.save()
    report.result["seconds"][SLOW] = round(perf_counter() - start, 1)
    report.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run the correctness gate only")
    parser.add_argument("--no-gate", action="store_true", help="skip the gate (while tuning)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check every Nth case only")
    parser.add_argument("--build", action="store_true", help="compile FlashInfer's modules during the gate")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], help="peers to time")
    parser.add_argument("--seconds", type=float, default=360, help=f"when to stop timing {SLOW}")
    parser.add_argument("--only", help="time the cells whose name contains this, and nothing else")
    parser.add_argument("--workers", type=int, default=14, help="processes of the gate")
    parser.add_argument("--out", type=Path, help="folder for tree_attention_h200.json and .png")
    parser.add_argument("--commit", help="of this tree, for the results file")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shard is not None:
        print(json.dumps(check(args.shard, args.workers, args.every)))
        return

    report = Report(args.out, args.commit)
    result = report.result
    build = [sys.executable, str(Path(__file__).with_name("bench_peers.py")), "--build"]
    builder = subprocess.Popen(build) if args.build else None
    if not args.no_gate:
        report.add("gate", lambda: gate(args.workers, args.every))
        print(json.dumps(result["gate"], indent=1), flush=True)
        if not result["gate"] or result["gate"]["failed"] or result["gate"]["replays"]["different_elements"]:
            sys.exit("the gate is red: no speeds are reported")
    if builder:
        start = perf_counter()
        builder.wait()
        result["seconds"]["build, beyond the gate"] = round(perf_counter() - start, 1)
    if args.check:
        return
    ceilings = measure_ceilings()
    result["ceilings"] = vars(ceilings)
    print(json.dumps(result["ceilings"]), flush=True)
    cells = [c for c in CELLS + MORE if args.only is None or args.only in str(c)]
    quick = [name for name in args.peers if name != SLOW]
    report.add("rows", list)
    start = perf_counter()
    for cell in cells:
        result["rows"].append(measure(cell, ceilings, quick))
        report.save()
    result["seconds"]["rows"] = round(perf_counter() - start, 1)
    if args.only is None:
        report.add("plan", plan_cost)
        report.add("layouts", lambda: layouts(ceilings))
        report.add("splits", lambda: [measure_shape(name, ceilings) for name in SHAPES])
        report.add("counters", counters)
    if SLOW in args.peers:
        slow_peer(report, cells, args.seconds)
    if args.out:
        plot(result["rows"], args.out / "tree_attention_h200.png")
    print(cell_table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
