"""Attention alone over the KV of texts that branch: one call of a layer, by several ways of grouping."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from scripts.benchmarks.attention.peers import compared
from scripts.benchmarks.attention.problems import Ceilings
from scripts.benchmarks.workloads import published
from scripts.benchmarks.workloads.storage import Problem, in_pages, page_table
from triforce_tree.bench.results import Record
from triforce_tree.branching.layout import Sizes
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.configs import config_for
from triforce_tree.kernels.attention.plan import KV, AttentionParams, plan_trees

Calls = list[Callable[[], Tensor]]
Way = Callable[[Problem, Tensor], Calls]

BY_SEQUENCES, SHARED_PAGES = "by sequences", "by sequences, shared pages"
BLOCKS = "by blocks of queries"


def by_sequences(problem: Problem, q: Tensor) -> Calls:
    """Makes calls of paged decoding in which every text is stored and read by itself."""
    lengths = [len(path) for path in problem.paths]
    table = page_table(lengths, problem.page, problem.device)

    def stored(seed: int) -> tuple[Tensor, Tensor]:
        k, v = problem.rows(seed)
        return in_pages(k, problem.paths, problem.page), in_pages(v, problem.paths, problem.page)

    return _sequences(problem, q, lengths, table, problem.workload.read_by_sequences, stored)


def shared_pages(problem: Problem, q: Tensor) -> Calls:
    """Makes calls in which each position is stored once, in a page of one slot (as RadixAttention), and read
    by each path.
    """
    lengths = [len(path) for path in problem.paths]
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32, device=problem.device)
    for row, path in zip(table, problem.paths, strict=True):
        row[: len(path)] = path

    def stored(seed: int) -> tuple[Tensor, Tensor]:
        k, v = problem.rows(seed)
        return k.transpose(0, 1)[:, :, None], v.transpose(0, 1)[:, :, None]

    return _sequences(problem, q, lengths, table, problem.workload.stored, stored)


def _sequences(
    problem: Problem,
    q: Tensor,
    lengths: Sequence[int],
    table: Tensor,
    positions: int,
    stored: Callable[[int], tuple[Tensor, Tensor]],
) -> Calls:
    nothing = [torch.ones(1, 0, dtype=torch.bool)] * len(lengths)
    plan = plan_trees(problem.heads, nothing, lengths, device=problem.device)
    attention, params = (
        chosen("auto", problem.device).trees(plan, problem.dtype),
        AttentionParams(problem.scale),
    )
    attention.begin()
    copies = range(problem.copies(positions))
    return [partial(attention.run, q, KV(*stored(seed), table), params) for seed in copies]


def by_blocks(problem: Problem, q: Tensor) -> Calls:
    """Makes calls of the engine's kernels on a GPU. What a block of neighbouring queries sees is one list of
    tiles.
    """
    if problem.device.type != "cuda":
        raise NotImplementedError("a CPU attends by nodes")
    from triforce_tree.kernels.attention.blocks import launch

    device, dtype, page = problem.device, problem.dtype, problem.page
    counts = [-(-length // page) for length in problem.lengths]
    sizes = Sizes.of(problem.layout, on_gpu=False)
    capacities = sizes.queries, sizes.segments, sizes.owners, sizes.tail, sum(counts), page
    plan = BlockPlan(problem.heads, *capacities, device=device, dtype=dtype)
    firsts = accumulate(counts, initial=0)
    pages = [range(first, first + n) for first, n in zip(firsts, counts, strict=False)]
    plan.set(problem.layout.segments, pages)

    def call(k: Tensor, v: Tensor) -> Tensor:
        return launch.run(q, k, v, plan, scale=problem.scale)[0]

    made: Calls = []
    for seed in range(problem.copies(problem.workload.stored)):
        k, v = (in_pages(rows, problem.runs, page) for rows in problem.rows(seed))
        made.append(partial(call, k, v))
    return made


WAYS: dict[str, Way] = {
    BY_SEQUENCES: by_sequences,
    SHARED_PAGES: shared_pages,
    BLOCKS: by_blocks,
    "FlashInfer cascade": published.cascade,
    "FastTree's kernel": published.fasttree,
    "DeFT's kernel": published.deft,
}


def positions_read(problem: Problem, way: str) -> int:
    """Returns the KV positions that a way reads by its definition; what L2 holds is not deducted."""
    own, heads = problem.workload, problem.heads
    if way in (BY_SEQUENCES, SHARED_PAGES):
        return own.read_by_sequences
    if way != BLOCKS:
        return own.stored
    rows = config_for(own.queries * heads.group, heads, problem.dtype, problem.device).block_m
    return sum(
        segment.length
        * (-(-(segment.first + segment.queries) * heads.group // rows) - segment.first * heads.group // rows)
        for segment in problem.layout.segments
    )


def measure(problem: Problem, way: str, ceilings: Ceilings) -> Record:
    """Microseconds of a call with its bytes on paper, or the reason why there is none.

    The result is compared with :attr:`Problem.expected` before it is timed.
    """
    read = positions_read(problem, way)
    record: Record = {"kv_bytes": read * problem.slot_bytes, "queries": problem.workload.queries}
    most = 1e-3 if problem.dtype == torch.float32 else 2e-2
    found = compared(lambda: WAYS[way](problem, problem.queries), problem.expected, most)
    if isinstance(found, str):
        return record | {"reason": found}
    head_flops = 2 * (problem.heads.dim + problem.heads.value_dim) * problem.heads.query
    # The least of any way: each node once.
    least = problem.bytes(problem.workload.stored)
    roof = ceilings.roof_us(least, head_flops * problem.workload.read_by_sequences)
    return record | {"us": found, "roof_us": round(roof, 3)}
