"""What more rows cost on a CPU, and by which route: docs/results/cpu_tree_forward.json.

    python scripts/bench_tree_forward.py

``rows``: one level-2 forward of T tree rows. The embedded target stands behind a prompt of Python's help
topics on its full cache; the forwards of all sizes take turns, so that whatever else the machine does meets
them alike, and their rows are dropped again. ``routes``: the attention of one layer (3 heads of 128) by
the routes that were tried.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triforce_tree.level import Level

import triforce_tree
from triforce_tree.bench import results, text
from triforce_tree.caches import FullCache
from triforce_tree.kernels import host, reference
from triforce_tree.token_tree import Context, TokenTree

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def forward_times(level: Level, context: Context, sizes: list[int], rounds: int) -> dict[int, list[float]]:
    """Seconds of each forward; a tree of T rows is the root and T - 1 children."""
    trees = {size: TokenTree([context[-1]] + [5] * (size - 1), [-1] + [0] * (size - 1)) for size in sizes}
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 2):
        for size, tree in trees.items():
            start = time.perf_counter()
            level.forward_tree(context, tree)
            if number >= 2:  # two rounds of warm-up
                taken[size].append(time.perf_counter() - start)
    return taken


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """torch's fused attention under a dense mask."""
    dense = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    dense[:, -mask.shape[1] :] = mask
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=scale)


def split(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Batched products over pieces of the prefix, merged by their log-sum-exp."""
    rows = 512
    whole = (k.shape[2] - mask.shape[1]) // rows * rows
    heads, queries = q.shape[1], q.shape[2]
    parts = []
    for head in range(heads):
        pieces_k = k[0, head, :whole].unflatten(0, (-1, rows))
        scores = torch.bmm((q[0, head] * scale).expand(len(pieces_k), -1, -1), pieces_k.mT)
        lse = scores.logsumexp(-1)
        out = torch.bmm((scores - lse[..., None]).exp(), v[0, head, :whole].unflatten(0, (-1, rows)))
        parts.append(reference.merge_states(out, lse))
    outs, lses = (torch.stack(x)[None] for x in zip(*parts, strict=True))
    rest = reference.tree_attention(q, k[:, :, whole:], v[:, :, whole:], mask, scale=scale)
    return reference.merge_states(torch.stack([outs, rest[0]]), torch.stack([lses, rest[1]]))[0].view(
        1, heads, queries, -1
    )


ROUTES: dict[str, Callable[..., Tensor]] = {
    "batched GEMM, one softmax": lambda *x, scale: reference.tree_attention(*x, scale=scale)[0],
    "batched GEMM over pieces of 512 rows, merged": split,
    "fused attention, dense mask": fused,
    "oneDNN, head by head": host.tree_attention,
}


def route_times(context: int, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Median milliseconds of one layer's attention by each route, on caches too large for the L3."""
    caches = [torch.randn(2, 1, 3, context + max(sizes), 128) for _ in range(4)]
    result = []
    for size in sizes:
        mask = torch.eye(size, dtype=torch.bool)
        q = torch.randn(1, 3, size, 128)
        taken: dict[str, list[float]] = {name: [] for name in ROUTES}
        expected = None
        for number in range(rounds + 2):
            k, v = caches[number % len(caches)][:, :, :, : context + size]
            for name, route in ROUTES.items():
                start = time.perf_counter()
                out = route(q, k, v, mask, scale=128**-0.5)
                taken[name].append(time.perf_counter() - start)
                expected = out if name == next(iter(ROUTES)) else expected
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        medians = {name: round(1e3 * statistics.median(t[2:]), 2) for name, t in taken.items()}
        result.append({"t": size, "ms": medians})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--context", type=int, default=16_384, help="tokens in the cache")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 13, 16, 25, 32], help="T")
    parser.add_argument("--rounds", type=int, default=15, help="timed forwards of each size")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_tree_forward.json", help="results file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results.check_writable(args.out)
    engine = triforce_tree.load(device="cpu", dtype=torch.float32)
    assert engine.tokenizer is not None
    prompt = text.prompts([text.pydoc_text()], engine.tokenizer, args.context, 1)[0]
    target = engine.hierarchy.target
    with engine.hierarchy.active():
        level = Level(target, FullCache(target.layers, args.context + 2 * max(args.rows)))
        context = Context(list(prompt))
        level.prefill(context)
        taken = forward_times(level, context, args.rows, args.rounds)
    medians = {size: statistics.median(seconds) for size, seconds in taken.items()}
    rows: list[dict[str, Any]] = [
        {
            "t": size,
            "ratio_to_one_row": round(seconds / medians[args.rows[0]], 3),
            "ms": round(1e3 * seconds, 2),
        }
        for size, seconds in medians.items()
    ]
    result = {**results.header(0), "context": args.context, "warm_up_rounds": 2, "rows": rows}
    result["routes"] = route_times(args.context, [1, 16, 32], args.rounds)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
