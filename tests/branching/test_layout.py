"""Tests what the queries of a forward over a tree see, and attention over it by the kernel and its
definition.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.kernels import triton_ops
from tests.support.kernels.kernels_cases import poisoned_memory
from triforce_tree.branching import attention
from triforce_tree.branching.layout import Feed, Sizes, arranged
from triforce_tree.branching.node import Node
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.backend import backend
from triforce_tree.kernels.attention.blocks import plan as block_plans
from triforce_tree.kernels.attention.blocks.plan import BlockPlan, Segment
from triforce_tree.kernels.attention.configs import KernelConfig
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads


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


@pytest.mark.parametrize("least", [2, 10**9], ids=["shared", "alone"])
@pytest.mark.parametrize(
    "heads, how",
    [
        (Heads(4, 2, 16), {}),
        (Heads(4, 2, 16), {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        # Without the C kernel, which takes widths that are multiples of 16.
        (Heads(2, 2, 16, 10), {"sinks": torch.tensor([0.5, -1.0])}),
    ],
)
def test_attention_on_a_cpu(
    heads: Heads, how: dict[str, Any], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LEAST_SPARED", least)
    for seed in range(20):
        rng, page = random.Random(seed), 4
        nodes = random_tree(rng)
        places = [*range(1, 40)]
        rng.shuffle(places)
        for node in nodes:
            node.pages = [places.pop() for _ in range(-(-len(node.tokens) // page))]
            node.stored = len(node.tokens)
        feeds = [Feed(node, 0, len(node.tokens)) for node in nodes if node.tokens and rng.random() < 0.6]
        feeds = feeds or [Feed(nodes[0], 0, 1)]
        store = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, attention=backend("cpu"))
        pages: Any = SimpleNamespace(page=page, count=39, store=store)
        layout = arranged(feeds)
        made = attention.PathAttention([heads], pages, Sizes.of(layout, on_gpu=False))
        made.set(layout)
        kv = KV(torch.randn(40, heads.kv, page, heads.dim), torch.randn(40, heads.kv, page, heads.value_dim))
        queries = [
            (node, index) for node, start, size in layout.feeds for index in range(start, start + size)
        ]
        q = torch.randn(len(queries), heads.query, heads.dim)
        found = made(heads, q, kv, AttentionParams(0.3, **how))
        keys, values = (t.transpose(0, 1).flatten(1, 2) for t in (kv.k, kv.v))
        for own, out, (node, index) in zip(q, found, queries, strict=True):
            slots = node.path_slots(index + 1, node.start + index + 1, page)
            nothing = torch.ones(1, 0, dtype=torch.bool)
            seen = keys[None, :, slots], values[None, :, slots]
            exact, _ = reference.tree_attention(own[None, :, None], *seen, nothing, scale=0.3, **how)
            torch.testing.assert_close(out, exact[0, :, 0], rtol=1e-4, atol=1e-5)


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
    monkeypatch.setattr(block_plans, "config_for", lambda *_: config)
    device = torch.device(triton_ops.DEVICE)
    blocks = BlockPlan(heads, queries, 9, 24, 3, PAGES, page, device=device, dtype=dtype)
    blocks.set([Segment(1, 5, 2, 0, 2)], TABLE)
    blocks.set(SEGMENTS, TABLE)
    q = torch.randn(queries, heads.query, heads.dim, dtype=dtype, device=device)
    shape = (PAGES, heads.kv, page)
    kv = [
        torch.full((*shape, d), torch.nan, dtype=dtype, device=device) for d in (heads.dim, heads.value_dim)
    ]
    sees = torch.zeros(7, 5, 80, dtype=torch.bool)
    for segment in SEGMENTS:
        for i in range(segment.queries):
            sees[segment.first + i, segment.node, : segment.length + min(segment.tail, i + 1)] = True
    rows = []
    for node, pages in enumerate(TABLE):
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
    return blocks, q, kv, dense, mask


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

    blocks, q, kv, dense, mask = problem(heads, dtype, queries, page, monkeypatch)
    sinks = torch.randn(heads.query, device=q.device) if how.pop("sinks", None) else None
    exact, exact_lse = reference.tree_attention(
        q[:7].transpose(0, 1)[None].float(), *dense, mask, scale=0.2, sinks=sinks, **how
    )
    with poisoned_memory():
        out, lse = block_launch.run(q, *kv, blocks, scale=0.2, sinks=sinks, **how)
    torch.testing.assert_close(out[:7].float(), exact[0].transpose(0, 1), atol=3e-3, rtol=0)
    torch.testing.assert_close(lse[:7], exact_lse[0].T, atol=3e-3, rtol=0)
    if sinks is None:
        assert not out[7:].any()
        assert (lse[7:] == -torch.inf).all()
