"""Tree-shaped KV, one query a leaf: the three splits, beside the published kernels of DeFT and FastTree.

Those kernels have no mask between tree queries, so this is all that they and ours both compute. Their code
is no part of this repository and is not installed: it is imported from ``.carry/DeFT`` (the package ``deft``
of LINs-lab/DeFT, MIT) and ``.carry/FastTree`` (the files of ``kernel_bench`` of PanZaifeng/FastTree-Artifact,
Apache-2.0) where somebody put it there, and reported as not run elsewhere.
"""

import contextlib
import io
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import timed
from torch import Tensor
from tree_attention_timing import L2_BYTES, Ceilings, time_calls

from triforce_tree.kernels.attention.launch import run
from triforce_tree.kernels.attention.plan import NODE, Heads, plan_nodes

PUBLISHED = Path(__file__).parents[1] / ".carry"
HEADS = Heads(32, 8, 128)
SHAPES = {
    "one 16K prompt, 64 branches of 256": ((1, 64), (16384, 256)),
    "4K prompt, 4 x 2K, 16 x 512, 64 x 128": ((1, 4, 16, 64), (4096, 2048, 512, 128)),
    "32 separate sequences of 4K": ((32,), (4096,)),
}
SPLITS = {"flatten": ("flatten", None), "node": (NODE, None), "node-chunk 512": (NODE, 512)}
# Attention of q ``[queries, H_q, D]`` over k and v ``[rows, H_kv, D]``.
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Node:
    """``size`` rows from ``start`` on, seen by ``count`` queries from ``first`` on."""

    parent: int
    start: int
    size: int
    first: int
    count: int


def grow(levels: tuple[int, ...], sizes: tuple[int, ...], rooted: bool = False) -> list[Node]:
    """A regular tree, level by level, a query a leaf; each level divides the next.

    With ``rooted``, several roots get one empty parent.
    """
    nodes: list[Node] = []
    at, above = 0, 0
    if rooted and levels[0] > 1:
        levels, sizes = (1, *levels), (0, *sizes)
    for depth, (count, size) in enumerate(zip(levels, sizes, strict=True)):
        each, begin = levels[-1] // count, len(nodes)
        for index in range(count):
            parent = above + index * levels[depth - 1] // count if depth else -1
            nodes.append(Node(parent, at, size, index * each, each))
            at += size
        above = begin
    return nodes


@contextlib.contextmanager
def _published(folder: str) -> Iterator[None]:
    """Import from a folder of somebody else's code; it may name packages that its kernels do not need."""
    if not (PUBLISHED / folder).is_dir():
        raise ImportError(f"{folder} is not in {PUBLISHED.name}")
    sys.path.insert(0, str(PUBLISHED / folder))
    held = sys.modules.get("transformers")
    sys.modules["transformers"] = types.SimpleNamespace(AutoTokenizer=None)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.path.pop(0)
        del sys.modules["transformers"]
        if held:
            sys.modules["transformers"] = held


def deft(nodes: list[Node], queries: int) -> Call:
    """DeFT-Flatten as published: blocks of 128 rows and 32 queries, partials added by atomics."""
    with _published("DeFT"):
        from deft.layers.attention.tree_attention import tree_attention_subtree_fwd
        from deft.tree_decoding import tree_cache
    # By default a node is stepped through by its own length, which an empty root does not have.
    tree_cache.BLOCK_CONFIG["MAX_BLOCK_LEN"] = 2**30
    made = [tree_cache.TreeNode(index) for index in range(len(nodes))]
    leaves = made[len(nodes) - queries :]
    for node, info in zip(made, nodes, strict=True):
        node.kv_indices = list(range(info.start, info.start + info.size))
        node.token_ids = node.kv_indices or [0]
        node.refs = set(leaves[info.first : info.first + info.count])
        if info.parent >= 0:
            made[info.parent].children[node.id] = node
    tree = types.SimpleNamespace(root=made[0], leaves={n.id: n for n in leaves}, use_paged_memory=True)
    meta = tree_cache.TreeMetadata.from_tree_cache(tree)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        tree_attention_subtree_fwd(
            q, k, v, out, meta.block_len, meta.block_q, meta.block_q_cnts, meta.block_q_offset,
            meta.block_bitmasks, meta.block_kv, meta.block_lens,
        )  # fmt: skip
        return out

    return call


def fasttree(nodes: list[Node], queries: int) -> Call:
    """FastTree with the options of its own benchmark for this group size."""
    with _published("FastTree"), contextlib.redirect_stdout(io.StringIO()):
        from fasttree import FastTreeParams, fasttree_decode, fasttree_preparation
        from kv_tree_simple import KVTreeNode

        params = FastTreeParams()
        params.set_kv_group_num(HEADS.group)
        params.set_q_tile_sizes([64 // HEADS.group, 16 // HEADS.group])
        params.set_kv_tile_sizes([32, 32])
        made = []
        for index, info in enumerate(nodes):
            node = KVTreeNode()
            node.id, node.parent, node.seqlen = index, info.parent, info.size
            node.requests = list(range(info.first, info.first + info.count))
            node.num_children = sum(other.parent == index for other in nodes)
            made.append(node)
        starts = [*(info.start for info in nodes), nodes[-1].start + nodes[-1].size]
        shape, tuned = (queries, HEADS.query, HEADS.kv, HEADS.dim), ([1024, 128], [132, 528], [132, 132])
        work, _ = fasttree_preparation(made, starts, *shape, *tuned, params)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        # Its preparation may change the tiles, so they are read from what it leaves.
        fasttree_decode(q, k, v, out, *work, params.TSQs, params.TSKs, HEADS.dim**-0.5)
        return out

    return call


def _host_ms(make: Callable[[], object]) -> tuple[object, float]:
    made, seconds = timed(torch.device("cuda"), make)
    return made, round(1e3 * seconds, 2)


def measure(name: str, ceilings: Ceilings) -> dict:
    """Microseconds of every split and published kernel on one tree, and what a plan cost the host."""
    levels, sizes = SHAPES[name]
    nodes, queries = grow(levels, sizes), levels[-1]
    rooted, rows = grow(levels, sizes, rooted=True), nodes[-1].start + nodes[-1].size
    # fp16, because the published kernels take nothing else.
    q = torch.randn(queries, HEADS.query, HEADS.dim, device="cuda", dtype=torch.float16)
    kv_bytes = rows * HEADS.kv * HEADS.dim * 4
    kv = [
        tuple(torch.randn(1, HEADS.kv, rows, HEADS.dim, device="cuda", dtype=q.dtype) for _ in range(2))
        for _ in range(max(2, -(-4 * L2_BYTES // kv_bytes)))
    ]
    roof = round(kv_bytes / ceilings.read_bandwidth * 1e6, 1)
    row: dict = {"tree": name, "kv_bytes": kv_bytes, "roof_us": roof, "us": {}, "plan_ms": {}}
    spans = [(n.start, n.size, n.first, n.count) for n in nodes]
    for label, (split, chunk) in SPLITS.items():
        how = {"device": "cuda", "dtype": q.dtype, "split": split, "chunk": chunk}
        plan_nodes(HEADS, spans, queries, **how)
        plan, row["plan_ms"][label] = _host_ms(lambda how=how: plan_nodes(HEADS, spans, queries, **how))
        calls = [lambda k=k, v=v, p=plan: run(q, k, v, p, scale=HEADS.dim**-0.5)[0] for k, v in kv]
        if label == "flatten":
            ours = calls[0]().float()
        row["us"][label] = round(time_calls(calls), 2)
    for label, make in {"DeFT, published": deft, "FastTree, published": fasttree}.items():
        try:
            call, row["plan_ms"][label] = _host_ms(lambda make=make: make(rooted, queries))
            pairs = [[x[0].transpose(0, 1) for x in pair] for pair in kv]
            calls = [lambda call=call, pair=pair: call(q, *pair) for pair in pairs]
            apart = ((calls[0]().float() - ours).norm() / ours.norm()).item()
            same = apart < 2e-2
            row["us"][label] = round(time_calls(calls), 2) if same else f"another result: {apart:.3g} off"
        except ImportError as error:
            row["us"][label] = f"not run: {error}"
        except Exception as error:
            row["us"][label] = f"cannot run: {type(error).__name__}: {str(error)[:120]}"
        torch.cuda.empty_cache()
    print(json.dumps(row), flush=True)
    return row
