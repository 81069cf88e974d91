"""The correctness gate of the tree-attention kernels on a GPU: every shape, layout and variant.

    python -m scripts.checks.tree_attention_check --every 2 --workers 14

Cases and their fp64 definitions are those of ``tests/support/kernels/kernels_cases.py``.
"""

import argparse
import random
import sys
from itertools import product
from typing import Any

import torch
from torch import Tensor

from scripts.checks.report import Report, in_shards, last_line, need_gpu, parser
from tests.support.kernels.kernels_cases import ERROR_LIMIT, Case, build, enough_seeds, random_tree, run_case
from triforce_tree.kernels.attention.configs import KernelConfig, choose
from triforce_tree.kernels.attention.launch import run
from triforce_tree.kernels.attention.plan import Heads, Plan, pack_mask, plan_trees
from triforce_tree.kernels.device import describe

SIZES = (1, 2, 7, 16, 63, 64, 65, 128, 257, 1024)
# Replays of one graph, each with one of so many trees.
REPLAYS, VARIANTS = 10_000, 40
LAYOUTS = ("heads", "rows", 1, 16, 64, 128, 256, ("view", 8), ("view", 64), ("cache", 8), ("cache", 64))
GROUPED, DTYPES = Heads(8, 2, 128), (torch.bfloat16, torch.float16, torch.float32)

# A configuration that the table may choose, though it does not today.
OTHER = KernelConfig(128, 64, 8, 2, 2, max_registers=128)


def cases() -> list[Case]:
    """The whole list, deterministic."""
    made = []
    for index, (size, step) in enumerate(product(SIZES, range(7))):
        block = choose(size * GROUPED.group, 128, 2, describe("cuda")).block_n
        length = (0, 1, block - 1, block, block + 1, 4097, 122880)[step]
        made.append(Case(GROUPED, ((length, size),), order=("depth", "breadth")[index % 2]))
    for layout, (query, kv), size in product(LAYOUTS, [(8, 8), (8, 2), (8, 1), (6, 2), (5, 1)], (16, 65)):
        made.append(Case(Heads(query, kv, 128), ((4097, size),), layout=layout))
    for dim, dtype, size in product((64, 96, 128, 256, 320, 512), DTYPES, (1, 16, 70)):
        made.append(Case(Heads(8, 2, dim), ((1000, size),), dtype))
    # Keys wider than their values, in whole parts and not, and values wider than keys.
    unequal = (192, 128), (96, 64), (176, 128), (64, 128), (512, 512), (576, 512)
    for (dim, value), layout, size in product(unequal, (*LAYOUTS, "packed"), (1, 16, 65)):
        made.append(Case(Heads(8, 4, dim, value), ((4097, size),), layout=layout))
    for dtype, length, window in product(DTYPES, (1000, 122880), (None, 300)):
        made.append(Case(Heads(8, 8, 192, 128), ((length, 33), (70, 5)), dtype, "packed", window=window))
    for dtype, heads, window in product(DTYPES, (Heads(8, 2, 512), Heads(8, 1, 576, 512)), (None, 300)):
        made.append(Case(heads, ((122880, 33), (70, 5)), dtype, "packed", window=window))
    single = {"dtype": torch.float32, "window": 300, "softcap": 30.0, "sinks": True}
    for length, layout in [(122880, "heads"), (4097, "rows"), (4097, 16), (1500, ("view", 8))]:
        made.append(Case(GROUPED, ((length, 16),), torch.float32, layout))
        made.append(Case(GROUPED, ((length, 33), (70, 5)), layout=layout, **single))
    options = product((None, 128, 3), (None, 30.0), (False, True), ("heads", 16, 128), (7, 65))
    for window, cap, sinks, layout, size in options:
        how = {"layout": layout, "window": window, "softcap": cap, "sinks": sinks}
        made.append(Case(Heads(8, 2, 64), ((1500, size),), **how))
    ragged = ((0, 5), (300, 7), (4097, 33), (63, 64), (20000, 1), (1, 128))
    for layout, window in product(LAYOUTS, (None, 100)):
        made.append(Case(GROUPED, ragged, layout=layout, window=window))
    for size, length in product((1, 16, 65), (0, 1, 63, 65, 4097, 20001)):
        made.append(Case(GROUPED, ((length, size),), config=OTHER))
    for layout, (query, kv), size in product(LAYOUTS, [(8, 2), (5, 1)], (1, 16, 65)):
        for dtype in DTYPES:
            made.append(Case(Heads(query, kv, 128), ((4097, size),), dtype, layout, int8=True))
    for dim, dtype, size in product((64, 96, 256, 512), DTYPES, (1, 16, 70)):
        made.append(Case(Heads(8, 2, dim), ((1000, size),), dtype, int8=True))
    for window, cap, layout, size in product((None, 128), (None, 30.0), ("heads", 16, 128), (7, 65)):
        how = {"layout": layout, "window": window, "softcap": cap, "sinks": True, "int8": True}
        made.append(Case(Heads(8, 2, 64), ((1500, size),), **how))
        made.append(Case(Heads(8, 2, 192, 128), ((1500, size),), **how))
    made.append(Case(GROUPED, ((122880, 16),), int8=True))
    made.append(Case(GROUPED, ragged, int8=True))
    made.append(Case(Heads(32, 8, 128), ((19000, 16),) * 6))
    made.append(Case(Heads(4, 4, 128), ((700, 3),) * 70, layout=16))
    return made


def gate(workers: int, every: int) -> dict[str, Any]:
    """All cases, spread over processes; and the replays."""
    report = Report()
    shards = ["scripts.checks.tree_attention_check", "--workers", str(workers), "--every", str(every)]
    in_shards(report, shards, workers)
    judged = [row for row in report.rows if "error_ratio" in row]
    single = [row["error_ratio"] for row in judged if " float32 " in row["check"]]
    half = [row["error_ratio"] for row in judged if " float32 " not in row["check"]]
    return {
        "cases": len(report.rows), "failed": report.failed, "worst_error_ratio": max(half, default=None),
        "worst_error_ratio_fp32": max(single, default=None), "replays": replays(),
    }  # fmt: skip


def check(shard: int, shards: int, every: int = 1) -> list[dict]:
    """A share of every Nth case; of the first share, torch.compile as well."""
    report = Report()

    def judge(case: Case, seed: int) -> dict[str, Any]:
        ratio = run_case(case, "cuda", enough_seeds(case, seed))
        return {"passed": ratio <= ERROR_LIMIT, "error_ratio": round(ratio, 3)}

    for index, case in enumerate(cases()):
        if index % every == 0 and index // every % shards == shard:
            report.attempt(str(case), lambda case=case, seed=index: judge(case, seed))
    if shard == 0:
        report.attempt("compiled", compiled)
    return report.rows


def compiled() -> None:
    """torch.compile keeps the op in one graph."""
    problem = build(Case(Heads(8, 2, 128), ((500, 16),)), "cuda")
    plan = plan_trees(problem.case.heads, problem.masks, [500], device="cuda")

    def layer(q, k, v):
        out, lse = run(q * 2, k, v, plan, scale=0.09)
        return out + 1, lse

    plain = layer(problem.q, problem.k, problem.v)
    made = torch.compile(layer, fullgraph=True)(problem.q, problem.k, problem.v)
    for a, b in zip(made, plain, strict=True):
        torch.testing.assert_close(a, b)


def replays() -> dict:
    """Replay one captured graph with changing lengths and trees; bit-compare with eager runs."""
    rng = random.Random(0)
    heads, size, longest = Heads(32, 8, 128), 64, 9000
    q = torch.randn(size, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, longest + size, 128, device="cuda", dtype=q.dtype) for _ in range(2))
    masks = [random_tree(size, ("depth", "breadth")[i % 2], rng)[0].cuda() for i in range(VARIANTS)]
    lengths = [torch.tensor([rng.randrange(longest)], dtype=torch.int32, device="cuda") for _ in masks]
    plan = plan_trees(heads, masks[:1], [0], device="cuda")
    words, eager = [], []
    for mask, length in zip(masks, lengths, strict=True):
        words.append(pack_mask(mask))
        _set(plan, words[-1], length)
        eager.append(run(q, k, v, plan, scale=0.09))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = run(q, k, v, plan, scale=0.09)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        pick = rng.randrange(VARIANTS)
        _set(plan, words[pick], lengths[pick])
        out.fill_(float("nan"))
        graph.replay()
        wrong += (out != eager[pick][0]).sum() + (lse != eager[pick][1]).sum()
    return {"replays": REPLAYS, "different_elements": int(wrong)}


def _set(plan: Plan, words: Tensor, length: Tensor) -> None:
    """Another tree and another length, written into the buffers that a graph holds."""
    plan.mask.copy_(words)
    plan.lengths.copy_(length)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--every", type=int, default=1, metavar="N", help="check every Nth case only")
    made.add_argument("--workers", type=int, default=14, help="processes")
    made.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    args = made.parse_args()
    need_gpu(made)
    if args.shard is not None:
        last_line(check(args.shard, args.workers, args.every))
        return 0
    found = gate(args.workers, args.every)
    last_line(found)
    return int(bool(found["failed"] or found["replays"]["different_elements"]))


if __name__ == "__main__":
    sys.exit(main())
