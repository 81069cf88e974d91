"""The kernels of the decoding cycle on a GPU: equal to their references, captured too, and how fast.

    python -m scripts.checks.step_kernels_check [--no-times]

Problems are those of ``step_cases.py`` and ``grow_cases.py`` in ``tests/support/kernels``. Prints what
failed, a table of times inside CUDA graphs, and one line of JSON. Ends with status 1 where an op
differs from its reference.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

import grow_cases
import step_cases
import torch
from step_cases import Problem
from torch import Tensor

from scripts.benchmarks.common.timing import time_calls
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
            lambda s=shape, h=how, i=seed: step_cases.acceptance(*s, GPU, *h, seed=i),
        )
    for nodes, vocab in [(16, 128256), (64, 128256), (32, 152064)]:
        yield (
            f"accept {(2, nodes, vocab)}",
            lambda n=nodes, v=vocab: step_cases.acceptance(2, n, v, GPU, 0.3, 10.0, seed=n),
        )
    for seed, nodes in enumerate((1, 2, 16, 63, 64, 65, 128, 256)):
        yield f"greedy {nodes}", lambda n=nodes, i=seed: step_cases.greedy(6, n, 3 + i, GPU, seed=i)
    for shape in [(1, 1, 5), (6, 12, 4096), (2, 12, 128256), (1, 4, 4095)]:
        for exponential in (True, False):
            yield (
                f"runner-up {shape} {exponential}",
                lambda s=shape, r=exponential: step_cases.runner_up(*s, r, GPU),
            )
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
            exponential, ties, dtype = seed % 2 == 1, seed // 2 % 2 == 1, (HALF, SINGLE)[seed // 4]
            how = dtype, exponential, GPU, (None, 0.7)[exponential], ties, seed
            name = f"expand {shape} {dtype} race {exponential} ties {ties}"
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
    yield "accept", lambda i: cut(step_cases.acceptance(4, 16, 4096, GPU, 0.3, 10.0, seed=i))
    yield "greedy", lambda i: cut(step_cases.greedy(4, 16, 5, GPU, seed=i))
    yield "runner-up", lambda i: step_cases.runner_up(4, 6, 4096, True, GPU, seed=i)
    yield "begin", lambda i: grow_cases.beginning(4, 5, (8, 6, 4), 300, GPU, seed=i)
    for vocab in (4096, 32000):
        for exponential in (False, True):
            yield (
                f"expand {vocab} {exponential}",
                lambda i, v=vocab, r=exponential: grow_cases.expansion(
                    4, 8, v, 6, HALF, r, GPU, 0.5 + i, seed=i
                ),
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


def times() -> Iterator[tuple[str, float]]:
    """Name, and microseconds of a call in a graph, of problems of the size that decoding has."""
    for name, make in _timed():
        torch.manual_seed(0)
        problem = make()
        yield name, time_calls([partial(getattr(step, problem.op), *problem.args)])


def _timed() -> Iterator[tuple[str, Callable[[], Problem]]]:
    for batch, size in [(1, 16_000), (6, 4000)]:
        where = f"B={batch} S={size}"
        yield f"append {where} T=16", partial(step_cases.append, batch, 32, size, 16, 128, HALF, GPU)
        yield f"move {where} T=32", partial(step_cases.move, 64, batch, 32, size, 32, 128, HALF, GPU)
        yield f"means {where}", partial(step_cases.means, 32, batch, 32, size, 4, 128, 8, HALF, GPU)
    for shape in [(1, 32, 1, 15360, 128, 480), (1, 8, 4, 15360, 128, 480), (6, 32, 1, 2375, 128, 128)]:
        yield f"select {shape}", partial(step_cases.selection, *shape, HALF, GPU)
    for shape in [(1, 16, 4096), (6, 16, 4096), (1, 64, 32000), (6, 64, 128256)]:
        yield f"accept {shape}", partial(step_cases.acceptance, *shape, GPU, 0.3, 10.0)
    yield "greedy 64", partial(step_cases.greedy, 6, 64, 4, GPU)
    yield "runner-up (1, 12, 128256)", partial(step_cases.runner_up, 1, 12, 128256, True, GPU)
    for batch in (1, 6):
        yield f"begin B={batch}", partial(grow_cases.beginning, batch, 5, (8, 6, 4), 9000, GPU)
        yield f"place B={batch} F=8 K=6", partial(grow_cases.placement, batch, 8, 6, 6, GPU, False)
    for shape in [(1, 8, 4096, 6), (6, 8, 4096, 6), (1, 8, 128256, 6)]:
        yield f"expand {shape}", partial(grow_cases.expansion, *shape, HALF, True, GPU, 0.7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-times", action="store_true", help="check only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; the tests run these kernels in Triton's interpreter")
    with torch.inference_mode():
        count, failed = check()
        for line in failed:
            print("WRONG", line)
        print(f"{count - len(failed)} of {count} checks passed")
        made = []
        for name, took in () if options.no_times else times():
            print(f"{name:40} {took:9.1f} us", flush=True)
            made.append({"name": name, "us": round(took, 2)})
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "failed": failed, "times": made}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
