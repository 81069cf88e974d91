"""What more tokens cost on a CPU, and by which route: docs/results/cpu_tree_forward.json.

``rows``: one forward of level 2 over a tree of T tokens, the root and its children. The embedded target
stands behind a prompt of Python's help topics on its full cache; the forwards of all sizes take turns, so
that whatever else the machine does meets them alike. ``routes``: the attention of one layer (3 heads of 128)
by the routes that were tried.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import triforce_tree
from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, Record, header, write
from scripts.benchmarks.offload.engine import tree_forwards
from triforce_tree.bench import results, text
from triforce_tree.kernels import host, reference

_WARM_UP = 2


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
    merged = reference.merge_states(torch.stack([outs, rest[0]]), torch.stack([lses, rest[1]]))
    return merged[0].view(1, heads, queries, -1)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """torch's fused attention under a dense mask."""
    dense = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    dense[:, -mask.shape[1] :] = mask
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=scale)


ROUTES: dict[str, Callable[..., Tensor]] = {
    "batched GEMM, one softmax": lambda *x, scale: reference.tree_attention(*x, scale=scale)[0],
    "batched GEMM over pieces of 512 rows, merged": split,
    "fused attention, dense mask": fused,
    "oneDNN, head by head": host.tree_attention,
}


def in_turns(calls: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, which is given the number of the round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + _WARM_UP):
        for name, call in calls.items():
            start = time.perf_counter()
            call(number)
            taken[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(times[_WARM_UP:]) for name, times in taken.items()}


def route_times(context: int, sizes: Sequence[int], rounds: int) -> list[Record]:
    """One layer's attention by each route, on caches too large for the L3."""
    caches = [torch.randn(2, 1, 3, context + max(sizes), 128) for _ in range(4)]
    found = []
    for size in sizes:
        mask, q = torch.eye(size, dtype=torch.bool), torch.randn(1, 3, size, 128)

        def attend(name: str, number: int, q: Tensor = q, mask: Tensor = mask) -> Tensor:
            k, v = caches[number % len(caches)][:, :, :, : context + len(mask)]
            return ROUTES[name](q, k, v, mask, scale=128**-0.5)

        exact = attend(next(iter(ROUTES)), 0)
        for name in ROUTES:
            torch.testing.assert_close(attend(name, 0), exact, rtol=1e-4, atol=1e-5)
        calls = {name: lambda number, name=name, attend=attend: attend(name, number) for name in ROUTES}
        found.append({"t": size, "ms": {name: round(ms, 2) for name, ms in in_turns(calls, rounds).items()}})
    return found


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks tree_forward", __doc__, tiny=False)
    add = made.add_argument
    add("--context", type=int, default=16_384, help="tokens in the cache")
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 13, 16, 25, 32], help="T")
    add("--rounds", type=int, default=15, help="timed forwards of each size")
    add("--threads", type=int, default=2, help="of torch")
    args = made.parse_args(words)
    torch.set_num_threads(args.threads)
    out = results.check_writable(args.out or RESULTS / "cpu_tree_forward.json")
    engine = triforce_tree.load(device="cpu", dtype=torch.float32)
    assert engine.tokenizer is not None
    [prompt] = text.prompts([text.pydoc_text()], engine.tokenizer, args.context, 1)
    forwards = tree_forwards(engine.hierarchy.target, prompt, args.rows)
    calls = {str(size): lambda number, call=call: call() for size, call in forwards.items()}
    medians = {int(size): ms for size, ms in in_turns(calls, args.rounds).items()}
    first = medians[args.rows[0]]
    rows = [
        {"t": size, "ratio_to_one_row": round(ms / first, 3), "ms": round(ms, 2)}
        for size, ms in medians.items()
    ]
    result = header(args.seed, "engine") | {"context": args.context, "warm_up_rounds": _WARM_UP, "rows": rows}
    result["routes"] = route_times(args.context, [n for n in (1, 16, 32) if n <= max(args.rows)], args.rounds)
    write(out, result)
    print(json.dumps(result))
