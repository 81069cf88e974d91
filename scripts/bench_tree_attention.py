"""Tree attention on one GPU: the correctness gate, then time per call beside the peers that are
there.

    python scripts/bench_tree_attention.py --check          # the gate alone
    python scripts/bench_tree_attention.py --out results    # gate, timings, JSON, table, plot

A speed is never reported on a red gate. Calls are timed in a CUDA graph over KV copies that
together do not fit L2; the roof of a cell is the larger of its bytes over the read bandwidth and
its FLOPs over the matmul rate, both measured in the same run. The last line on stdout is the result
as JSON.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from bench_peers import PEERS, peers
from tree_attention_check import check, replays
from tree_attention_timing import (
    Ceilings,
    Cell,
    chain_mask,
    measure_ceilings,
    random_kv,
    time_calls,
)

from triforce_tree.kernels import reference
from triforce_tree.kernels.launch import run
from triforce_tree.kernels.plan import NODE, Heads, plan_nodes, plan_trees

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
SLOW = "FlexAttention"  # autotunes for many seconds a cell, so it goes last
MORE = [Cell(32, 8, 122880, 256), Cell(32, 8, 32768, 256), Cell(32, 8, 19456, 16, batch=6)]


def gate(workers: int) -> list[dict]:
    """All cases, spread over processes because most of the time is compilation."""
    command = [sys.executable, __file__, "--workers", str(workers), "--shard"]
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
    return rows


def ours(cell: Cell, kv: list, layout: str | int = "heads", split: str = "flatten") -> float:
    """Microseconds of one call; with a page size for ``layout``, through a shuffled page table."""
    mask, scale = chain_mask(cell.size), cell.dim**-0.5
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
    mask, scale, group = chain_mask(cell.size), cell.dim**-0.5, cell.heads.group
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
        "peers": peers(cell, kv, names),
    }
    print(json.dumps(row), flush=True)
    return row


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


def splits() -> list[dict]:
    """Flatten, Node and Node-Chunk on tree-shaped KV (few-shot prompts, branching reasoning)."""
    heads, rows = Heads(32, 8, 128), []
    shapes = {
        "one 16K prompt, 64 branches of 256": ((1, 64), (16384, 256)),
        "4K prompt, 4 x 2K, 16 x 512, 64 x 128": ((1, 4, 16, 64), (4096, 2048, 512, 128)),
        "32 separate sequences of 4K": ((32,), (4096,)),
    }
    for name, (levels, sizes) in shapes.items():
        nodes, at = [], 0
        for count, size in zip(levels, sizes, strict=True):
            each = levels[-1] // count
            for index in range(count):
                nodes.append((at, size, index * each, each))
                at += size
        q = torch.randn(levels[-1], 32, 128, device="cuda").bfloat16()
        copies = max(2, -(-240 * 2**20 // (at * 8 * 128 * 4)))
        kv = [
            tuple(torch.randn(1, 8, at, 128, device="cuda", dtype=q.dtype) for _ in range(2))
            for _ in range(copies)
        ]
        row = {"tree": name, "roof_kv_us": None}
        for label, split, chunk in [("flatten", "flatten", None), ("node", NODE, None),
                                    ("node-chunk 512", NODE, 512)]:  # fmt: skip
            plan = plan_nodes(heads, nodes, levels[-1], device="cuda", split=split, chunk=chunk)
            calls = [lambda q=q, k=k, v=v, p=plan: run(q, k, v, p, scale=0.09) for k, v in kv]
            row[label] = round(time_calls(calls), 2)
        row["kv_bytes"] = at * 8 * 128 * 4
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def plan_cost() -> dict:
    """Host microseconds of a plan and of updating one in place."""
    heads, mask = Heads(32, 8, 128), chain_mask(64, "cpu")
    plan = plan_trees(heads, [mask], [4096], device="cuda")
    words = plan.mask.clone()
    lengths = torch.tensor([5000], dtype=torch.int32, device="cuda")

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
        "update_from_host_us": host_us(lambda: plan.update(mask, [5000])),
        "update_from_device_us": host_us(lambda: plan.update(words, lengths)),
    }


def save(result: dict, folder: Path | None) -> None:
    """Write what there is; a run that is cut short leaves all it measured."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tree_attention_h200.json").write_text(json.dumps(result, indent=1) + "\n")
        plot(result["rows"], folder / "tree_attention_h200.png")


def count_io() -> None:
    """One call of some cells and the bytes their plans count, for a profiler to compare."""
    for cell in (Cell(32, 8, 122880, 16), Cell(32, 8, 32768, 64)):
        plan = plan_trees(cell.heads, [chain_mask(cell.size)], [cell.length], device="cuda")
        q = torch.randn(cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
        run(q, *random_kv(cell)[0], plan, scale=cell.dim**-0.5)
        print(cell, json.dumps(plan.io_bytes([cell.length], [cell.size])), flush=True)


def table(rows: list[dict]) -> str:
    names = sorted({name for row in rows for name in row["peers"]})
    head = ["Hq/Hkv", "L", "T", "batch", "ours", "roof", "% of roof", "error", *names]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{row['hq']}/{row['hkv']}", row["l"], row["t"], row["batch"], row["ours_us"],
                 row["roof_us"], row["percent_of_roof"], row["error_ratio"]]  # fmt: skip
        cells += [row["peers"].get(name, "-") for name in names]
        lines.append("| " + " | ".join(str(c) for c in cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ["ours", *sorted({name for row in rows for name in row["peers"]})]
    figure, axis = plt.subplots(figsize=(11, 4.5))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        took = [row["ours_us"] if name == "ours" else row["peers"].get(name) for row in rows]
        known = [at for at, us in enumerate(took) if isinstance(us, (int, float))]
        heights = [100 * rows[at]["roof_us"] / took[at] for at in known]
        axis.bar([at + index * width for at in known], heights, width, label=name)
    labels = [
        f"{r['hq']}/{r['hkv']}\nL={r['l']}\nT={r['t']}" + (f" x{r['batch']}" if r["batch"] > 1 else "")
        for r in rows
    ]
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(rows))], labels, fontsize=8)
    axis.set_ylabel("percent of the roof")
    axis.set_title("Tree attention, one layer, bf16, head_dim 128, one H200")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run the correctness gate only")
    parser.add_argument("--no-gate", action="store_true", help="skip the gate (while tuning)")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], help="peers to time")
    parser.add_argument("--io", action="store_true", help="count bytes; run it under a profiler")
    parser.add_argument("--only", help="time the cells whose name contains this")
    parser.add_argument("--workers", type=int, default=14, help="processes of the gate")
    parser.add_argument("--out", type=Path, help="folder for tree_attention_h200.json and .png")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.io:
        count_io()
        return
    if args.shard is not None:
        print(json.dumps(check(args.shard, args.workers)))
        return

    result: dict = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if not args.no_gate:
        rows = gate(args.workers)
        failed = [row for row in rows if not row["ok"]]
        ratios = [row["error_ratio"] for row in rows if "error_ratio" in row]
        result["gate"] = {
            "cases": len(rows),
            "failed": failed,
            "worst_error_ratio": max(ratios, default=None),
        }
        result["gate"]["replays"] = replays()
        print(json.dumps(result["gate"], indent=1), flush=True)
        if failed or result["gate"]["replays"]["different_elements"]:
            sys.exit("the gate is red: no speeds are reported")
    if not args.check:
        ceilings = measure_ceilings()
        result["ceilings"] = vars(ceilings)
        print(json.dumps(result["ceilings"]), flush=True)
        cells = [c for c in CELLS + MORE if args.only is None or args.only in str(c)]
        result["rows"] = []
        for cell in cells:
            result["rows"].append(measure(cell, ceilings, [n for n in args.peers if n != SLOW]))
            save(result, args.out)
        if args.only is None:
            result["plan"] = plan_cost()
            result["layouts"] = layouts(ceilings)
            result["splits"] = splits()
            save(result, args.out)
        if SLOW in args.peers:
            for cell, row in zip(cells, result["rows"], strict=True):
                row["peers"] |= peers(cell, random_kv(cell), [SLOW])
                save(result, args.out)
        print(table(result["rows"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
