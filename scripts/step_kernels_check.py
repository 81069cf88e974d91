"""The kernels of the decoding cycle on a GPU: equal to their references, captured too, and how fast.

    PYTHONPATH=. python scripts/step_kernels_check.py [--no-times]

Problems are those of ``tests/step_cases.py`` and ``tests/grow_cases.py``. Prints what failed, a table of
times inside CUDA graphs, and one line of JSON. Ends with status 1 where an op differs from its reference.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import grow_cases
import step_cases
from step_cases import Problem
from tree_attention_timing import time_calls

from triforce_tree.kernels import step

HALF, SINGLE = torch.bfloat16, torch.float32
GPU = "cuda"


def problems() -> Iterator[tuple[str, Callable[[], Problem]]]:
    """Name and maker of every problem, deterministic."""
    for shape in [(1, 32, 400, 16, 128), (6, 8, 300, 33, 128), (2, 4, 5000, 2000, 64), (3, 2, 90, 1, 96)]:
        for dtype in (HALF, SINGLE):
            yield f"append {shape} {dtype}", lambda s=shape, d=dtype: step_cases.append(*s, d, GPU)
    for shape in [(64, 1, 32, 300, 32, 128), (8, 6, 8, 400, 128, 128), (2, 3, 4, 2100, 1000, 64)]:
        for dtype in (HALF, SINGLE):
            yield f"move {shape} {dtype}", lambda s=shape, d=dtype: step_cases.move(*s, d, GPU)
    for shape, ring in [((1, 32, 1280, 16, 128), 1280), ((6, 8, 300, 97, 256), 299)]:
        yield (
            f"append {shape} to a ring of {ring}",
            lambda s=shape, r=ring: step_cases.append_to_ring(*s, HALF, GPU, ring=r),
        )
    for shape, ring in [((64, 1, 8, 1280, 32, 256), 1280), ((8, 6, 8, 400, 128, 128), 399)]:
        yield (
            f"move {shape} in a ring of {ring}",
            lambda s=shape, r=ring: step_cases.move_in_ring(*s, HALF, GPU, ring=r),
        )
    for shape in [(32, 1, 32, 330, 4, 128, 8), (4, 6, 8, 200, 7, 128, 8), (2, 3, 2, 1000, 40, 96, 16)]:
        for dtype in (HALF, SINGLE):
            yield f"means {shape} {dtype}", lambda s=shape, d=dtype: step_cases.means(*s, d, GPU)
    for shape in [
        (1, 32, 1, 15360, 128, 480),
        (6, 32, 1, 2375, 128, 128),
        (3, 8, 4, 15424, 128, 480),
        (2, 2, 1, 131072, 128, 480),
        (2, 2, 4, 40000, 128, 2000),
        (3, 1, 8, 700, 64, 100),
        (2, 1, 7, 16384, 96, 16000),
    ]:
        for exact in (False, True):
            name = f"select {shape}{' ties' if exact else ''}"
            yield name, lambda s=shape, e=exact: step_cases.selection(*s, HALF, GPU, integers=e)
    for seed in range(30):
        shape = (6, (1, 8, 16, 64, 256)[seed % 5], (4096, 4096, 32000, 100, 4095)[seed // 6])
        how = *step_cases.LIKENESS[seed % 6], seed % 8 == 7
        yield (
            f"accept {shape} {how}",
            lambda s=shape, h=how, i=seed: step_cases.judgement(*s, GPU, *h, seed=i),
        )
    for nodes, vocab in [(16, 128256), (64, 128256), (32, 152064)]:
        yield (
            f"accept {(2, nodes, vocab)}",
            lambda n=nodes, v=vocab: step_cases.judgement(2, n, v, GPU, 0.3, 10.0, seed=n),
        )
    for seed, nodes in enumerate((1, 2, 16, 63, 64, 65, 128, 256)):
        yield f"greedy {nodes}", lambda n=nodes, i=seed: step_cases.greedy(6, n, 3 + i, GPU, seed=i)
    for shape in [(1, 1, 5), (6, 12, 4096), (2, 12, 128256), (1, 4, 4095)]:
        for race in (True, False):
            yield f"runner-up {shape} {race}", lambda s=shape, r=race: step_cases.runner_up(*s, r, GPU)
    yield from _problems_of_growth()


def _problems_of_growth() -> Iterator[tuple[str, Callable[[], Problem]]]:
    for widths in [(1,), (8, 6, 4), (1,) * 30, (20, 20, 19)]:
        for batch in (1, 6):
            again = len(widths) + 2
            yield (
                f"begin {batch} {widths}",
                lambda b=batch, a=again, w=widths: grow_cases.beginning(b, a, w, 5000, GPU),
            )
    for shape in [
        (1, 1, 4096, 8),
        (1, 8, 4096, 6),
        (6, 8, 4096, 6),
        (6, 1, 4096, 1),
        (2, 5, 4095, 16),
        (2, 4, 100, 60),
        (2, 6, 5, 8),
        (1, 8, 32000, 8),
        (2, 8, 128256, 8),
        (1, 16, 152064, 16),
    ]:
        for seed in range(8):
            race, ties, dtype = seed % 2 == 1, seed // 2 % 2 == 1, (HALF, SINGLE)[seed // 4]
            how = dtype, race, GPU, (None, 0.7)[race], ties, seed
            name = f"expand {shape} {dtype} race {race} ties {ties}"
            yield name, lambda s=shape, h=how: grow_cases.expansion(*s, *h)
    for shape in [(1, 1, 8, 8), (1, 8, 6, 6), (6, 8, 6, 6), (6, 1, 1, 1), (2, 29, 30, 30), (3, 16, 16, 16)]:
        for seed in range(8):
            how = seed % 2 == 1, seed // 2 % 2 == 1, seed // 4 == 1, seed
            yield f"place {shape} {how}", lambda s=shape, h=how: grow_cases.placement(*s, GPU, *h)


def captured() -> Iterator[tuple[str, Callable[[int], Problem]]]:
    """Name and maker by seed, for one graph that is replayed with the inputs of other seeds."""

    def cut(problem: Problem) -> Problem:
        """Trees differ in depth, which a graph holds fixed."""
        problem.args = (*problem.args[:-1], 3)
        return problem

    yield "append", lambda i: step_cases.append(3, 4, 300, 16, 128, HALF, GPU, seed=i)
    yield "move", lambda i: step_cases.move(8, 3, 4, 300, 32, 128, HALF, GPU, seed=i)
    yield "means", lambda i: step_cases.means(4, 3, 4, 300, 4, 128, 8, HALF, GPU, seed=i)
    yield "select", lambda i: step_cases.selection(3, 4, 1, 3000, 128, 100, HALF, GPU, seed=i)
    yield "select, group", lambda i: step_cases.selection(3, 4, 4, 20000, 128, 100, HALF, GPU, seed=i)
    yield "accept", lambda i: cut(step_cases.judgement(4, 16, 4096, GPU, 0.3, 10.0, seed=i))
    yield "greedy", lambda i: cut(step_cases.greedy(4, 16, 5, GPU, seed=i))
    yield "runner-up", lambda i: step_cases.runner_up(4, 6, 4096, True, GPU, seed=i)
    yield "begin", lambda i: grow_cases.beginning(4, 5, (8, 6, 4), 300, GPU, seed=i)
    for vocab in (4096, 32000):
        for race in (False, True):
            yield (
                f"expand {vocab} {race}",
                lambda i, v=vocab, r=race: grow_cases.expansion(4, 8, v, 6, HALF, r, GPU, 0.5 + i, seed=i),
            )
    for fixed in (False, True):
        yield "place", lambda i, f=fixed: grow_cases.placement(4, 8, 6, 6, GPU, f, seed=i)


def replayed(make: Callable[[int], Problem]) -> None:
    """Capture with one set of inputs, replay with that and two others; each replay twice, bit for bit."""
    torch.manual_seed(0)
    sets = [make(seed) for seed in range(3)]
    op = getattr(step, sets[0].op)
    buffers = tuple(step_cases.copy(x) if isinstance(x, Tensor) else x for x in sets[0].args)

    def fill(problem: Problem) -> None:
        for buffer, value in zip(buffers, problem.args, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(value)

    sets[0].run(op, sets[0].copied())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = sets[0].run(op, buffers)
    for problem in (sets[1], sets[2], sets[0]):
        runs = []
        for _ in range(2):
            fill(problem)
            for result in made[: len(made) - len(problem.changed)]:
                result.fill_(-99)
            graph.replay()
            runs.append([result.clone() for result in made])
        problem.judge(runs[0], problem.expected())
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check() -> tuple[int, list[str]]:
    """How many checks ran, and what failed."""
    count, failed = 0, []
    runs = [(name, lambda m=make: step_cases.agree(m(), step)) for name, make in problems()]
    runs += [(f"graph: {name}", lambda m=make: replayed(m)) for name, make in captured()]
    for seed, (name, one) in enumerate(runs):
        torch.manual_seed(seed)
        count += 1
        try:
            one()
        except Exception as error:
            failed.append(f"{name}: {str(error) or repr(error)}"[:400])
    return count, failed


def times() -> Iterator[tuple[str, float, int]]:
    """Name, microseconds of a call in a graph, and the bytes it must move (0: latency is all)."""
    yield from _times_of_rows()
    yield from _times_of_selection()
    yield from _times_of_acceptance()
    yield from _times_of_growth()


def _times_of_rows() -> Iterator[tuple[str, float, int]]:
    for batch, size in [(1, 123392), (6, 19000)]:
        gc.collect()
        torch.cuda.empty_cache()
        wanted = 64 * batch * 32 * size * 128 * 2
        free = torch.cuda.mem_get_info()[0] - 4 * 2**30
        size = size if wanted < free else int(size * free / wanted) // 64 * 64
        yield from _times_of_cache(torch.empty(64, batch, 32, size, 128, dtype=HALF, device=GPU))


def _times_of_cache(rows: Tensor) -> Iterator[tuple[str, float, int]]:
    """The engine's cache of a 7B: keys and values of 32 layers, 32 heads of 128."""
    _, batch, _, size, _ = rows.shape
    name = f"B={batch} S={size}"
    start = torch.full((batch,), size - 200, device=GPU)
    index = torch.arange(32, device=GPU).repeat(batch, 1)
    took = time_calls([partial(step.move_rows, rows, index * 2 + 1, start)])
    yield f"move_rows {name} R=32", took, 64 * batch * 32 * 32 * 256 * 2
    yield f"move_rows {name}, all in place", time_calls([partial(step.move_rows, rows, index, start)]), 0
    keys = rows.view(32, 2, *rows.shape[1:])[:, 0]
    means = torch.empty(32, batch, 32, size // 8, 128, dtype=HALF, device=GPU)
    took = time_calls([partial(step.chunk_means, means, keys, start // 8, 4, 8)])
    yield f"chunk_means {name} 4 chunks, 32 layers", took, 32 * batch * 32 * 4 * 256 * 9
    for count in (1, 16, 64):
        k = torch.randn(batch, count, 32, 128, dtype=HALF, device=GPU).transpose(1, 2)
        layers = [partial(step.append_rows, rows[2 * i], rows[2 * i + 1], k, k, start) for i in range(8)]
        yield f"append_rows {name} T={count}", time_calls(layers), batch * 32 * count * 256 * 4


def _times_of_selection() -> Iterator[tuple[str, float, int]]:
    for batch, heads, group, chunks, dim, slots in [
        (1, 32, 1, 15360, 128, 480),
        (1, 32, 1, 15360, 16, 480),
        (1, 8, 4, 15360, 128, 480),
        (6, 32, 1, 2375, 128, 128),
        (1, 32, 1, 131072, 128, 480),
    ]:
        q = torch.randn(batch, heads * group, dim, dtype=HALF, device=GPU)
        means = [torch.randn(batch, heads, chunks, dim, dtype=HALF, device=GPU) for _ in range(2)]
        limit = torch.full((batch,), chunks, device=GPU)
        table = torch.empty(batch, heads, slots, dtype=torch.int32, device=GPU)
        calls = [partial(step.select_chunks, q, m, limit, table, slots, dim**-0.5) for m in means]
        name = f"select_chunks B={batch} {heads * group}/{heads} C={chunks} D={dim} slots={slots}"
        yield name, time_calls(calls), means[0].numel() * 2


def _times_of_acceptance() -> Iterator[tuple[str, float, int]]:
    for batch, nodes, vocab in [
        (1, 16, 4096),
        (6, 16, 4096),
        (1, 64, 4096),
        (1, 64, 32000),
        (1, 16, 128256),
        (6, 64, 128256),
    ]:
        torch.manual_seed(0)
        kinds = [step_cases.judgement(batch, nodes, vocab, GPU, 0.3, 10.0, seed=i) for i in range(4)]
        took = time_calls([partial(step.accept_tree, *problem.args) for problem in kinds])
        yield f"accept_tree B={batch} N={nodes} V={vocab}", took, 0
    for nodes in (16, 64, 256):
        took = time_calls([partial(step.accept_greedy, *step_cases.greedy(6, nodes, 4, GPU).args)])
        yield f"accept_greedy B=6 N={nodes}", took, 0
    for shape in [(1, 12, 4096), (6, 12, 4096), (1, 12, 128256)]:
        for race in (True, False):
            problem = step_cases.runner_up(*shape, race, GPU)
            took = time_calls([partial(step.second_choice, *problem.args)])
            bytes_read = problem.args[0].numel() * (8 if race else 4)
            yield f"second_choice {shape}{' race' if race else ''}", took, bytes_read


def _times_of_growth() -> Iterator[tuple[str, float, int]]:
    for batch in (1, 6):
        took = time_calls(
            [partial(step.begin_tree, *grow_cases.beginning(batch, 5, (8, 6, 4), 9000, GPU).args)]
        )
        yield f"begin_tree B={batch}", took, 0
        for fixed in (False, True):
            problem = grow_cases.placement(batch, 8, 6, 6, GPU, fixed)
            took = time_calls([partial(step.place_nodes, *problem.args)])
            yield f"place_nodes B={batch} F=8 K=6{' fixed' if fixed else ''}", took, 0
    for shape in [
        (1, 1, 4096, 8),
        (1, 8, 4096, 6),
        (6, 8, 4096, 6),
        (1, 8, 32000, 6),
        (1, 8, 128256, 6),
        (6, 8, 128256, 6),
    ]:
        for race in (False, True):
            for dtype in (HALF, SINGLE):
                problem = grow_cases.expansion(*shape, dtype, race, GPU, 0.7)
                took = time_calls([partial(step.expand_nodes, *problem.args)])
                yield f"expand_nodes {shape} {dtype}{' race' if race else ''}", took, 0
    for batch in (1, 6):
        for race in (False, True):
            grown = grow_cases.expansion(batch, 8, 4096, 6, HALF, race, GPU, 0.7).args
            placed = grow_cases.placement(batch, 8, 6, 6, GPU).args
            took = time_calls([partial(_depth, grown, placed)])
            yield f"from logits to tokens B={batch} F=8 K=6 V=4096{' race' if race else ''}", took, 0


def _depth(grown: tuple[Any, ...], placed: tuple[Any, ...]) -> None:
    """All that is done between two forwards of the draft model."""
    draws, by_rank = step.expand_nodes(*grown)
    step.place_nodes(*placed[:6], draws, by_rank, grown[3], *placed[9:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-times", action="store_true", help="check only")
    options = parser.parse_args()
    with torch.inference_mode():
        count, failed = check()
        for line in failed:
            print("WRONG", line)
        print(f"{count - len(failed)} of {count} checks passed")
        made = []
        for name, took, size in () if options.no_times else times():
            rate = f"{size / took / 1e3:8.0f} GB/s" if size else ""
            print(f"{name:64} {took:9.1f} us {rate}", flush=True)
            made.append({"name": name, "us": round(took, 2), "bytes": size})
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "failed": failed, "times": made}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
