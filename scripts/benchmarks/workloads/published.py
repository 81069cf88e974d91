"""Published kernels for texts that branch, where their packages can be imported: FlashInfer's multi-level
cascade, FastTree's kernel, and DeFT's as FastTree's authors ported it.

The latter two are files, not packages: the folder ``kernel_bench`` of FastTree's artifact in ``PYTHONPATH``
makes them importable. Each has the options of that artifact's own benchmark.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.workloads.storage import Problem, in_pages, page_table

Calls = list[Callable[[], Tensor]]

# FastTree's settings for an H100: query rows of a tile in its two phases, those of all heads of a group.
_QUERY_ROWS, _KV_TILES = (64, 16), [32, 32]
_SPLITS, _PROGRAMS = [1024, 128], ([132, 528], [132, 132])
# DeFT's block of KV positions, and queries of a group.
_SUBTREE, _MASK = 128, 64


def _on_gpu(problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise NotImplementedError("it needs a GPU")


def _only_leaves_ask(problem: Problem) -> None:
    parents = set(problem.workload.parents)
    if any(asks and node in parents for node, asks in enumerate(problem.workload.asks)):
        raise NotImplementedError("queries at inner nodes")


def cascade(problem: Problem, q: Tensor) -> Calls:
    """FlashInfer's ``MultiLevelCascadeAttentionWrapper``: a kernel for each depth, results merged."""
    import flashinfer

    _on_gpu(problem)
    _only_leaves_ask(problem)
    paths = [feed.node.path for feed in problem.layout.feeds]
    depth = len(paths[0])
    if any(len(path) != depth for path in paths):
        raise NotImplementedError("leaves of several depths")
    place = {node: number for number, node in enumerate(problem.layout.nodes)}
    table = page_table(problem.lengths, problem.page, problem.device)
    pages = [-(-length // problem.page) for length in problem.lengths]
    levels: list[list[Tensor]] = []
    for level in range(depth):
        # Queries are in depth-first order, so that those of a node follow each other.
        asking = Counter(place[path[level]] for path in paths)
        nodes, counts = list(asking), list(asking.values())
        indices = torch.cat([table[node, : pages[node]] for node in nodes])
        last = [problem.lengths[node] - (pages[node] - 1) * problem.page for node in nodes]
        own = (_offsets(counts), _offsets([pages[node] for node in nodes]), indices, torch.tensor(last))
        levels.append([part.to(problem.device, torch.int32) for part in own])
    space = torch.empty(256 * 2**20, dtype=torch.uint8, device=problem.device)
    wrapper: Any = flashinfer.MultiLevelCascadeAttentionWrapper(depth, space, "NHD")
    heads = problem.heads
    wrapper.plan(
        *[[level[part] for level in levels] for part in range(4)],
        heads.query, heads.kv, heads.dim, problem.page, q_data_type=problem.dtype,
        kv_data_type=problem.dtype,
    )  # fmt: skip
    made: Calls = []
    for seed in range(problem.copies(problem.workload.stored)):
        k, v = (in_pages(rows, problem.runs, problem.page).transpose(1, 2) for rows in problem.rows(seed))
        made.append(partial(wrapper.run, q, (k.contiguous(), v.contiguous())))
    return made


def _offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def _tree_info(problem: Problem) -> tuple[list[Any], list[int]]:
    """Returns the artifact's nodes, parents before their children, and the first position of each."""
    from kv_tree_simple import KVTreeNode

    nodes = problem.layout.nodes
    children = Counter(node.parent for node in nodes)
    place = {node: number for number, node in enumerate(nodes)}
    made = []
    for number, node in enumerate(nodes):
        own = KVTreeNode()
        own.id, own.seqlen, own.num_children = number, len(node.tokens), children[node]
        own.parent = -1 if node.parent is None else place[node.parent]
        made.append(own)
    for query, feed in enumerate(problem.layout.feeds):
        for node in feed.node.path:
            made[place[node]].requests.append(query)
    return made, [*problem.starts, problem.workload.stored]


def _check_artifact(problem: Problem) -> None:
    _on_gpu(problem)
    _only_leaves_ask(problem)
    if problem.workload.parents.count(-1) > 1:
        raise NotImplementedError("one root only")


def fasttree(problem: Problem, q: Tensor) -> Calls:
    """FastTree's ``fasttree_decode``; its plan is not timed."""
    from fasttree import FastTreeParams, fasttree_decode, fasttree_preparation

    _check_artifact(problem)
    info, starts = _tree_info(problem)
    group, heads = problem.heads.group, problem.heads
    tiles = [max(1, rows // group) for rows in _QUERY_ROWS]
    params = FastTreeParams()
    params.set_values(0.66, 0.33, 0.1)
    params.set_q_tile_sizes(tiles)
    params.set_kv_tile_sizes(_KV_TILES)
    params.set_kv_group_num(group)
    # It prints what it has chosen, and keeps it in ``params``.
    with redirect_stdout(sys.stderr):
        plan, _ = fasttree_preparation(
            info, starts, len(q), heads.query, heads.kv, heads.dim, _SPLITS, *_PROGRAMS, params
        )
    out = torch.empty_like(q)

    def call(k: Tensor, v: Tensor) -> Tensor:
        fasttree_decode(q, k, v, out, *plan, params.TSQs, params.TSKs, problem.scale)
        return out

    made: Calls = []
    for seed in range(problem.copies(problem.workload.stored)):
        k, v = (rows.transpose(0, 1).contiguous() for rows in problem.rows(seed))
        made.append(partial(call, k, v))
    return made


def deft(problem: Problem, q: Tensor) -> Calls:
    """``DeFT_decode`` of FastTree's artifact, over KV stored for each text, as its benchmark has it."""
    import DeFT

    _check_artifact(problem)
    info, _ = _tree_info(problem)
    heads, longest = problem.heads, max(map(len, problem.paths))
    # The kernel is written for fp16, which holds random values of bf16 exactly.
    q = q.half()
    out = torch.empty_like(q)

    def stored(seed: int) -> list[Tensor]:
        made = []
        for rows in problem.rows(seed):
            cache = rows.new_zeros(len(q), longest, heads.kv, rows.shape[2], dtype=torch.float16)
            for own, path in zip(cache, problem.paths, strict=True):
                own[: len(path)] = rows[:, path].transpose(0, 1)
            made.append(cache)
        return made

    caches = [stored(seed) for seed in range(problem.copies(len(q) * longest))]
    # A module's global that one plan leaves as it is, and the next one needs at 0.
    DeFT.cur_length = 0
    plan = DeFT.DeFT_preparation(info, caches[0][0], _SUBTREE, _MASK, heads.query, heads.dim)

    def call(k: Tensor, v: Tensor) -> Tensor:
        DeFT.DeFT_decode(
            q, k.flatten(0, 1), v.flatten(0, 1), out, *plan, max(1, _QUERY_ROWS[0] // heads.group),
            _KV_TILES[0], problem.scale, _MASK,
        )  # fmt: skip
        return out

    return [partial(call, *cache) for cache in caches]
