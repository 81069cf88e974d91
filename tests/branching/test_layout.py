"""Tests what the queries of a forward over a tree see, and attention over it by the kernel and its
definition.
"""

import random

import pytest
import torch

from tests.support.kernels import triton_ops
from tests.support.kernels.kernels_cases import poisoned_memory
from triforce_tree.branching.layout import Feed, arranged
from triforce_tree.branching.node import Node
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention import segments as node_plans
from triforce_tree.kernels.attention.backend import backend
from triforce_tree.kernels.attention.blocks import plan as block_plans
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.configs import KernelConfig
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads
from triforce_tree.kernels.attention.segments import NodePlan, Segment


def random_tree(rng: random.Random) -> list[Node]:
    nodes = [Node(None, [0] * rng.randrange(1, 9))]
    for _ in range(rng.randrange(1, 9)):
        parent = rng.choice(nodes)
        nodes.append(Node(parent, [0] * rng.choice([0, 1, 1, 2, 5])))
        parent.children.append(nodes[-1])
    return nodes


@pytest.mark.parametrize("seed", range(20))
def test_a_token_sees_its_text_up_to_itself_once(seed: int) -> None:
    rng = random.Random(seed)
    nodes = random_tree(rng)
    feeds = []
    for node in nodes:
        node.stored = len(node.tokens)
        if node.tokens and rng.random() < 0.6:
            start = rng.randrange(len(node.tokens))
            size = rng.randrange(1, len(node.tokens) - start + 1)
            if not node.children and rng.random() < 0.5:
                node.stored = start
            feeds.append(Feed(node, start, size))
    rng.shuffle(feeds)
    layout = arranged(feeds)
    queries = [(node, row) for node, start, size in layout.feeds for row in range(start, start + size)]
    assert len(queries) == sum(feed.size for feed in feeds)
    seen: list[list[tuple[Node, int]]] = [[] for _ in queries]
    for segment in layout.segments:
        node = layout.nodes[segment.node]
        for i in range(segment.queries):
            own = range(segment.length + (min(segment.tail, i + 1)))
            seen[segment.first + i] += [(node, row) for row in own]
    for (node, row), found in zip(queries, seen, strict=True):
        text = [(n, r) for n in node.path for r in range(row + 1 if n is node else len(n.tokens))]
        assert sorted(found, key=repr) == sorted(text, key=repr)
        assert len(set(found)) == len(found)
    # A node's rows are described once for those below it, and once for its own queries where these differ.
    assert len(layout.segments) <= len(layout.nodes) + len(feeds)


def test_the_next_forward_can_be_laid_out_before_its_tokens_are_known() -> None:
    root = Node(None, [0] * 5)
    leaves = [Node(root, [0] * n) for n in (1, 3)]
    root.children += leaves
    for node in (root, *leaves):
        node.stored = len(node.tokens)
    feeds = [Feed(leaf, len(leaf.tokens), 1) for leaf in leaves[::-1]]
    before = arranged(feeds)
    for leaf in leaves:
        leaf.append([0], [None])
        leaf.stored += 1
    assert before == arranged(feeds)


PAGES = 12
# A prompt of 70 positions, two nodes that bring several tokens, and two leaves below one of them.
SEGMENTS = [
    Segment(0, 70, 0, 0, 7),
    Segment(1, 3, 3, 0, 3),
    Segment(1, 6, 0, 3, 2),
    Segment(2, 17, 0, 3, 1),
    Segment(3, 1, 0, 4, 1),
    Segment(4, 0, 2, 5, 2),
]
TABLE = [[7, 1, 4, 5, 11], [0], [6, 3], [8], [2]]


def problem(heads: Heads, dtype: torch.dtype, queries: int, page: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    config = KernelConfig(16, 32, 4, 2, 1)
    for module in (node_plans, block_plans):
        monkeypatch.setattr(module, "config_for", lambda *_: config)
    device = torch.device(triton_ops.DEVICE)
    plan = NodePlan(heads, queries, 9, 24, 3, device=device, dtype=dtype)
    plan.set([Segment(0, 5, 2, 0, 2)])
    plan.set(SEGMENTS)
    blocks = BlockPlan(heads, queries, 9, 24, 3, PAGES, page, device=device, dtype=dtype)
    blocks.set([Segment(1, 5, 2, 0, 2)], TABLE)
    blocks.set(SEGMENTS, TABLE)
    q = torch.randn(queries, heads.query, heads.dim, dtype=dtype, device=device)
    shape = (PAGES, heads.kv, page)
    kv = [
        torch.full((*shape, d), torch.nan, dtype=dtype, device=device) for d in (heads.dim, heads.value_dim)
    ]
    table = torch.zeros(9, 5, dtype=torch.int32, device=device)
    sees = torch.zeros(7, 5, 80, dtype=torch.bool)
    for segment in SEGMENTS:
        for i in range(segment.queries):
            sees[segment.first + i, segment.node, : segment.length + min(segment.tail, i + 1)] = True
    rows = []
    for node, pages in enumerate(TABLE):
        table[node, : len(pages)] = torch.tensor(pages)
        count = int(sees[:, node].any(0).sum())
        for row in range(count):
            rows.append((node, row))
            for t in kv:
                t[pages[row // page], :, row % page] = torch.randn(t.shape[1], t.shape[3])
    mask = torch.stack([sees[:, node, row] for node, row in rows], 1).to(device)
    dense = [
        torch.stack([t[TABLE[node][row // page], :, row % page] for node, row in rows], 1)[None].float()
        for t in kv
    ]
    return plan, blocks, q, kv, table, dense, mask


@triton_ops.runs_kernels
@pytest.mark.parametrize(
    "heads, dtype, queries, page, how",
    [
        (Heads(4, 2, 32), torch.float16, 8, 16, {}),
        (Heads(4, 1, 32, 16), torch.float32, 7, 16, {"softcap": 5.0}),
        (Heads(2, 2, 64), torch.float16, 7, 32, {"sinks": True}),
    ],
)
def test_kernel_and_definition_over_ragged_nodes(
    heads: Heads,
    dtype: torch.dtype,
    queries: int,
    page: int,
    how: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages in any order, causal tails, a query that sees nothing, segments in several pieces."""
    triton_ops.require_triton()
    from triforce_tree.kernels.attention.blocks import launch as block_launch

    plan, blocks, q, kv, table, dense, mask = problem(heads, dtype, queries, page, monkeypatch)
    sinks = torch.randn(heads.query, device=q.device) if how.pop("sinks", None) else None
    exact, exact_lse = reference.tree_attention(
        q[:7].transpose(0, 1)[None].float(), *dense, mask, scale=0.2, sinks=sinks, **how
    )
    paged, params = KV(*kv, table), AttentionParams(0.2, sinks=sinks, **how)
    found = [node_plans.definition(q, paged, plan.plan, params)]
    if not q.is_cuda:
        found.append(backend("cpu").segments(plan.plan, dtype).states(q, paged, params))
    with poisoned_memory():
        found.append(backend("triton").segments(plan.plan, dtype).states(q, paged, params))
        found.append(block_launch.run(q, *kv, blocks, scale=0.2, sinks=sinks, **how))
    for out, lse in found:
        torch.testing.assert_close(out[:7].float(), exact[0].transpose(0, 1), atol=3e-3, rtol=0)
        torch.testing.assert_close(lse[:7], exact_lse[0].T, atol=3e-3, rtol=0)
        if sinks is None:
            assert not out[7:].any()
            assert (lse[7:] == -torch.inf).all()


def test_a_plan_that_is_too_small_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = NodePlan(Heads(2, 1, 16), 4, 2, 6, 0, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ValueError, match="exceed the plan's 3, 6 and 0; make a larger plan"):
        plan.set([Segment(0, 3, 0, 0, 4), Segment(1, 3, 0, 0, 2), Segment(2, 3, 0, 2, 2)])
    with pytest.raises(ValueError, match="tails of 2 exceed"):
        plan.set([Segment(0, 3, 2, 0, 2)])
