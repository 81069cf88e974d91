"""The tree-attention kernels against fp64 in every shape, layout and variant; compiled, and in a CUDA graph.

All problems take an hour of one core, most of it in Triton's compiler. ``--sample`` takes two of each test,
and ``-n`` spreads them over processes.
"""

import random
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.kernels_cases import ERROR_LIMIT, Case, build, enough_seeds, random_tree, run_case
from triforce_tree.kernels.attention.backend import backend
from triforce_tree.kernels.attention.configs import KernelConfig, choose
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, Plan, pack_mask, plan_trees
from triforce_tree.kernels.device import describe

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 7, 16, 63, 64, 65, 128, 257, 1024)
LAYOUTS = ("heads", "rows", 1, 16, 64, 128, 256, ("view", 8), ("view", 64), ("cache", 8), ("cache", 64))
GROUPED, DTYPES = Heads(8, 2, 128), (torch.bfloat16, torch.float16, torch.float32)
RAGGED = ((0, 5), (300, 7), (4097, 33), (63, 64), (20000, 1), (1, 128))
# A configuration that the table may choose, though it does not today.
OTHER = KernelConfig(128, 64, 8, 2, 2, max_registers=128)
# Replays of one graph, each with one of so many trees.
REPLAYS, VARIANTS = 10_000, 40


def problems(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [*cases], ids=str)


def check(case: Case) -> None:
    assert run_case(case, "cuda", enough_seeds(case, 0)) <= ERROR_LIMIT


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", ["0", "1", "a block less 1", "a block", "a block and 1", "4097", "122880"])
@pytest.mark.parametrize("order", ["depth", "breadth"])
def test_sizes(size: int, length: str, order: str) -> None:
    block = choose(size * GROUPED.group, 128, 2, describe("cuda")).block_n
    blocks = {"a block less 1": block - 1, "a block": block, "a block and 1": block + 1}
    check(Case(GROUPED, ((blocks[length] if length in blocks else int(length), size),), order=order))


@problems(
    Case(Heads(query, kv, 128), ((4097, size),), layout=layout)
    for layout, (query, kv), size in product(LAYOUTS, [(8, 8), (8, 2), (8, 1), (6, 2), (5, 1)], (16, 65))
)
def test_layouts_and_groups(case: Case) -> None:
    check(case)


@problems(
    Case(Heads(8, 2, dim), ((1000, size),), dtype)
    for dim, dtype, size in product((64, 96, 128, 256, 320, 512), DTYPES, (1, 16, 70))
)
def test_head_dims(case: Case) -> None:
    check(case)


@problems(
    Case(Heads(8, 4, dim, value), ((4097, size),), layout=layout)
    for (dim, value), layout, size in product(
        [(192, 128), (96, 64), (176, 128), (64, 128), (512, 512), (576, 512)],
        (*LAYOUTS, "packed"),
        (1, 16, 65),
    )
)
def test_keys_and_values_of_unequal_widths(case: Case) -> None:
    """Keys wider than their values, in whole parts and not, and values wider than keys."""
    check(case)


@problems(
    Case(heads, ((length, 33), (70, 5)), dtype, "packed", window=window)
    for dtype, heads, length, window in product(
        DTYPES, (Heads(8, 8, 192, 128), Heads(8, 2, 512), Heads(8, 1, 576, 512)), (1000, 122880), (None, 300)
    )
)
def test_long_packed_caches(case: Case) -> None:
    check(case)


SINGLE: dict[str, Any] = {"dtype": torch.float32, "window": 300, "softcap": 30.0, "sinks": True}


@problems(
    case
    for length, layout in [(122880, "heads"), (4097, "rows"), (4097, 16), (1500, ("view", 8))]
    for case in (
        Case(GROUPED, ((length, 16),), torch.float32, layout),
        Case(GROUPED, ((length, 33), (70, 5)), layout=layout, **SINGLE),
    )
)
def test_single_precision(case: Case) -> None:
    check(case)


@problems(
    Case(Heads(8, 2, 64), ((1500, size),), layout=layout, window=window, softcap=cap, sinks=sinks)
    for window, cap, sinks, layout, size in product(
        (None, 128, 3), (None, 30.0), (False, True), ("heads", 16, 128), (7, 65)
    )
)
def test_windows_caps_and_sinks(case: Case) -> None:
    check(case)


@problems(
    [
        *(Case(GROUPED, RAGGED, layout=layout, window=w) for layout, w in product(LAYOUTS, (None, 100))),
        Case(GROUPED, RAGGED, int8=True),
        Case(Heads(32, 8, 128), ((19000, 16),) * 6),
        Case(Heads(4, 4, 128), ((700, 3),) * 70, layout=16),
        Case(Heads(32, 8, 128), ((2000, 8),) * 32, layout=16),
        Case(Heads(28, 4, 128), ((300, 16),) * 32, window=128, sinks=True),
        Case(Heads(24, 4, 64), ((300, 16),) * 32, torch.float32),
    ]
)
def test_batches(case: Case) -> None:
    check(case)


@problems(
    Case(GROUPED, ((length, size),), config=OTHER)
    for size, length in product((1, 16, 65), (0, 1, 63, 65, 4097, 20001))
)
def test_another_configuration(case: Case) -> None:
    check(case)


@problems(
    [
        *(
            Case(Heads(query, kv, 128), ((4097, size),), dtype, layout, int8=True)
            for layout, (query, kv), size, dtype in product(LAYOUTS, [(8, 2), (5, 1)], (1, 16, 65), DTYPES)
        ),
        *(
            Case(Heads(8, 2, dim), ((1000, size),), dtype, int8=True)
            for dim, dtype, size in product((64, 96, 256, 512), DTYPES, (1, 16, 70))
        ),
        *(
            Case(heads, ((1500, size),), layout=layout, window=window, softcap=cap, sinks=True, int8=True)
            for heads, window, cap, layout, size in product(
                (Heads(8, 2, 64), Heads(8, 2, 192, 128)),
                (None, 128),
                (None, 30.0),
                ("heads", 16, 128),
                (7, 65),
            )
        ),
        Case(GROUPED, ((122880, 16),), int8=True),
    ]
)
def test_keys_and_values_in_8_bits(case: Case) -> None:
    check(case)


def test_one_graph_of_torch_compile() -> None:
    problem = build(Case(Heads(8, 2, 128), ((500, 16),)), "cuda")
    plan = plan_trees(problem.case.heads, problem.masks, [500], device="cuda")
    attention, params = backend("triton").trees(plan, torch.bfloat16), AttentionParams(0.09)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention.states(q * 2, KV(k, v), params)
        return out + 1, lse

    plain = layer(problem.q, problem.k, problem.v)
    made = torch.compile(layer, fullgraph=True)(problem.q, problem.k, problem.v)
    for a, b in zip(made, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_replays_with_other_lengths_and_trees() -> None:
    """A captured graph gives the bits of eager runs."""
    rng = random.Random(0)
    heads, size, longest = Heads(32, 8, 128), 64, 9000
    q = torch.randn(size, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, longest + size, 128, device="cuda", dtype=q.dtype) for _ in range(2))
    masks = [random_tree(size, ("depth", "breadth")[i % 2], rng)[0].cuda() for i in range(VARIANTS)]
    lengths = [torch.tensor([rng.randrange(longest)], dtype=torch.int32, device="cuda") for _ in masks]
    plan, params = plan_trees(heads, masks[:1], [0], device="cuda"), AttentionParams(0.09)
    attention = backend("triton").trees(plan, q.dtype)
    words, eager = [], []
    for mask, length in zip(masks, lengths, strict=True):
        words.append(pack_mask(mask))
        _set(plan, words[-1], length)
        eager.append(attention.states(q, KV(k, v), params))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = attention.states(q, KV(k, v), params)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        pick = rng.randrange(VARIANTS)
        _set(plan, words[pick], lengths[pick])
        out.fill_(float("nan"))
        graph.replay()
        wrong += (out != eager[pick][0]).sum() + (lse != eager[pick][1]).sum()
    assert int(wrong) == 0


def _set(plan: Plan, words: Tensor, length: Tensor) -> None:
    """Another tree and another length, written into the buffers that a graph holds."""
    plan.mask.copy_(words)
    plan.lengths.copy_(length)
