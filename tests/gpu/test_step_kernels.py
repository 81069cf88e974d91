"""The kernels of a decoding step at real sizes are equal to their definitions, in CUDA graphs too."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import step_cases
from tests.support.kernels.acceptance_cases import LIKENESS, greedy, runner_up, traversal
from tests.support.kernels.grow_cases import beginning, expansion, placement, scattered
from tests.support.kernels.step_cases import Problem, selection

pytestmark = pytest.mark.gpu

HALF, SINGLE = torch.bfloat16, torch.float32
BOTH = (HALF, SINGLE)
GPU = "cuda"
Make = Callable[[], Problem]


def problems() -> Iterator[Make]:
    """Returns the makers of all problems."""
    slots = {
        step_cases.append: [
            (1, 32, 400, 16, 128), (6, 8, 300, 33, 128), (2, 4, 5000, 2000, 64), (3, 2, 90, 1, 96),
            (2, 16, 400, 33, (192, 128)),
        ],
        step_cases.move: [
            (32, 1, 32, 300, 32, 128), (4, 6, 8, 400, 128, 128), (1, 3, 4, 2100, 1000, 64),
            (4, 2, 16, 400, 60, (192, 128)),
        ],
        step_cases.means: [
            (32, 1, 32, 330, 4, 128, 8), (4, 6, 8, 200, 7, 128, 8), (2, 3, 2, 1000, 40, 96, 16)
        ],
    }  # fmt: skip
    for make, shapes in slots.items():
        for shape, dtype in product(shapes, BOTH):
            yield partial(make, *shape, dtype, GPU)
    for shape, ring in [((1, 32, 1280, 16, 128), 1280), ((6, 8, 300, 97, 256), 299)]:
        yield partial(step_cases.append_to_ring, *shape, HALF, GPU, ring=ring)
    for shape, ring in [((32, 1, 8, 1280, 32, 256), 1280), ((4, 6, 8, 400, 128, (192, 128)), 399)]:
        yield partial(step_cases.move_in_ring, *shape, HALF, GPU, ring=ring)
    for shape, dtype in product(slots[step_cases.append], BOTH):
        yield partial(_append_int8, *shape, dtype, GPU)
    for shape, dtype in product(slots[step_cases.means], BOTH):
        yield partial(step_cases.means_int8, *shape, dtype, GPU)
        yield partial(step_cases.means, *shape, dtype, GPU, variances=True)
    selections = [
        (1, 32, 1, 15360, 128, 480), (6, 32, 1, 2375, 128, 128), (3, 8, 4, 15424, 128, 480),
        (2, 2, 1, 131072, 128, 480), (2, 2, 4, 40000, 128, 2000), (3, 1, 8, 700, 64, 100),
        (2, 1, 7, 16384, 96, 16000),
    ]  # fmt: skip
    for shape, ties in product(selections, (False, True)):
        yield partial(selection, *shape, HALF, GPU, integers=ties)
    for shape in selections[:3]:
        yield partial(selection, *shape, HALF, GPU, variances=True)
    for seed in range(30):
        nodes, vocab = (1, 8, 16, 64, 256)[seed % 5], (4096, 4096, 32000, 100, 4095)[seed // 6]
        kind: dict[str, float] = ({}, {"fixed": 0.5}, {"both": 0.7})[seed % 3]
        yield partial(traversal, 6, nodes, vocab, GPU, *LIKENESS[seed % 6], seed % 8 == 7, seed=seed, **kind)
    for nodes, vocab in [(16, 128256), (64, 128256), (32, 152064)]:
        yield partial(traversal, 2, nodes, vocab, GPU, 0.3, 10.0, seed=nodes)
    for seed, nodes in enumerate((1, 2, 16, 63, 64, 65, 128, 256)):
        yield partial(greedy, 6, nodes, 3 + seed, GPU, seed=seed)
    for shape, exponential in product(
        [(1, 1, 5), (6, 12, 4096), (2, 12, 128256), (1, 4, 4095)], (True, False)
    ):
        yield partial(runner_up, *shape, exponential, GPU)
    for widths, batch in product([(1,), (8, 6, 4), (1,) * 30, (20, 20, 19)], (1, 6)):
        yield partial(beginning, batch, len(widths) + 2, widths, 5000, GPU)
    expansions = [
        (1, 1, 4096, 8), (1, 8, 4096, 6), (6, 8, 4096, 6), (6, 1, 4096, 1), (2, 5, 4095, 16), (2, 4, 100, 60),
        (2, 6, 5, 8), (1, 8, 32000, 8), (2, 8, 128256, 8), (1, 16, 152064, 16),
        (1, 1, 128256, 4), (1, 4, 128256, 17), (2, 5, 32000, 64), (1, 5, 32000, 65), (1, 3, 16385, 3),
        (1, 2, 262145, 8), (1, 64, 32000, 5), (1, 2, 128256, 300),
    ]  # fmt: skip
    for shape, seed in product(expansions, range(8)):
        exponential, ties, dtype = seed % 2 == 1, seed // 2 % 2 == 1, BOTH[seed // 4]
        yield partial(expansion, *shape, dtype, exponential, GPU, (None, 0.6)[exponential], ties, seed)
    for shape, exponential in product(
        [(2, 3, 32000, 4), (2, 3, 128256, 8), (1, 4, 128256, 17), (1, 2, 40000, 70)], (True, False)
    ):
        yield partial(scattered, *shape, exponential, GPU)
    placements = [
        (1, 1, 8, 8), (1, 8, 6, 6), (6, 8, 6, 6), (6, 1, 1, 1), (2, 29, 30, 30), (3, 16, 16, 16)
    ]  # fmt: skip
    for shape, seed in product(placements, range(8)):
        yield partial(placement, *shape, GPU, seed % 2 == 1, seed // 2 % 2 == 1, seed // 4 == 1, seed)


def _append_int8(*shape: Any) -> Problem:
    return step_cases.append_int8(step_cases.append(*shape))


def captured() -> Iterator[Callable[..., Problem]]:
    """Returns makers that take a seed, for one graph that is replayed with the inputs of other seeds."""

    def cut(make: Callable[..., Problem], seed: int) -> Problem:
        """Trees differ in depth, which a graph holds fixed."""
        problem = make(seed=seed)
        problem.args = (*problem.args[:-1], 3)
        return problem

    def expanded(vocab: int, exponential: bool, seed: int) -> Problem:
        return expansion(4, 8, vocab, 6, HALF, exponential, GPU, 0.5 + seed, seed=seed)

    yield partial(step_cases.append, 3, 4, 300, 16, 128, HALF, GPU)
    yield partial(step_cases.move, 8, 3, 4, 300, 32, 128, HALF, GPU)
    yield partial(step_cases.means, 4, 3, 4, 300, 4, 128, 8, HALF, GPU)
    yield partial(selection, 3, 4, 1, 3000, 128, 100, HALF, GPU)
    yield partial(selection, 3, 4, 4, 20000, 128, 100, HALF, GPU)
    yield partial(cut, partial(traversal, 4, 16, 4096, GPU, 0.3, 10.0))
    yield partial(cut, partial(greedy, 4, 16, 5, GPU))
    yield partial(runner_up, 4, 6, 4096, True, GPU)
    yield partial(beginning, 4, 5, (8, 6, 4), 300, GPU)
    for vocab, exponential in product((4096, 32000, 128256), (False, True)):
        yield partial(expanded, vocab, exponential)
    for fixed in (False, True):
        yield partial(placement, 4, 8, 6, 6, GPU, fixed)
    yield partial(cut, partial(traversal, 4, 32, 4096, GPU, 0.3, 10.0, both=0.5))


def named(make: object) -> str:
    """The name of a test: the maker of its problem and the arguments."""
    if not isinstance(make, partial):
        return getattr(make, "__name__", str(make)).removeprefix("torch.")
    keywords = (f"{name}={value}" for name, value in make.keywords.items())
    return f"{make.func.__name__}({', '.join([*map(named, make.args), *keywords])})"


@pytest.mark.parametrize("make", [*problems()], ids=named)
@torch.inference_mode()
def test_kernels_agree_with_their_definitions(make: Make) -> None:
    problem = make()
    step_cases.agree(problem, problem.package)


@pytest.mark.parametrize("make", [*captured()], ids=named)
@torch.inference_mode()
def test_replays_with_other_inputs(make: Callable[..., Problem]) -> None:
    """A graph is captured with one set of inputs and replayed with that and two others, twice each."""
    torch.manual_seed(0)
    sets = [make(seed=seed) for seed in range(3)]
    op = getattr(sets[0].package, sets[0].op)
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
