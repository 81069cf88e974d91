"""What more rows cost: time of one level-2 forward of T tree rows: docs/results/cpu_tree_forward.json.

    python scripts/bench_tree_forward.py

The embedded target stands behind a prompt of Python's help topics on its full cache; the forwards of all
sizes take turns, so that whatever else the machine does meets them alike, and their rows are dropped again.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import triforce_tree
from triforce_tree.bench import results, text
from triforce_tree.caches import FullCache
from triforce_tree.level import Level
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
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
