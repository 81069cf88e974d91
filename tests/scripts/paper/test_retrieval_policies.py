"""Retrieval policies of others, on random keys."""

import torch

from scripts.benchmarks.paper import policies
from tests.support.models.families import prompt_of, tiny
from triforce_tree.kernels import step

CHUNK, SLOTS, CHUNKS = 4, 5, 20
Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float]


def case() -> tuple[Arguments, torch.Tensor]:
    """Arguments of a policy, for two sequences, two KV heads of two query heads; and the keys."""
    torch.manual_seed(0)
    keys = torch.randn(2, 2, CHUNKS * CHUNK, 8)
    means = keys.unflatten(2, (CHUNKS, CHUNK)).mean(3)
    table = torch.full((2, 2, SLOTS + 2), -7, dtype=torch.int32)
    return (torch.randn(2, 4, 8), means, torch.tensor([20, 11]), table, SLOTS, 0.5), keys


def test_newest_chunks() -> None:
    args, _ = case()
    policies.newest(*args)
    assert args[3][0].tolist() == [[0, 16, 17, 18, 19, -7, -7]] * 2
    assert args[3][1].tolist() == [[0, 7, 8, 9, 10, -7, -7]] * 2


def test_one_build_keeps_its_scores_and_adds_newer_chunks() -> None:
    (q, means, _, table, *rest), keys = case()
    policy = policies.OneBuild()
    first, later = torch.tensor([11, 11]), torch.tensor([13, 13])
    policy(q, means, first, table, *rest, layer=0, keys=keys)
    built, default = table.clone(), table.clone()
    step.select_chunks(q, means, first, default, *rest)
    assert torch.equal(built, default)
    policy(torch.randn_like(q), means, later, table, *rest, layer=0, keys=keys)
    assert (table[..., 3:5] == torch.tensor([11, 12])).all()
    for b in range(2):
        for head in range(2):
            assert set(table[b, head, :3].tolist()) <= set(built[b, head, :5].tolist())


def test_bounds_are_not_below_any_key() -> None:
    """A chunk of one key has the product itself as its bound."""
    (q, _, _, table, *rest), keys = case()
    limit = torch.tensor([80, 40])
    policies.Bounds()(q, keys, limit, table, *rest, layer=0, keys=keys)
    exact = table.clone()
    step.select_chunks(q, keys, limit, exact, *rest)
    assert torch.equal(table, exact)
    args, keys = case()
    # A chunk whose mean hides its one key that matters.
    group = args[0][0, :2].mean(0)
    keys[0, 0, 40:44] = torch.stack([20 * group, -20 * group, 20 * group, -20 * group])
    policies.Bounds()(*args, layer=0, keys=keys)
    assert 10 in args[3][0, 0].tolist()


def test_received_attention_is_the_sum_over_all_queries() -> None:
    target, tokens = tiny("llama-gqa"), prompt_of(300)
    received = policies.received_attention(target, tokens)
    before = target.config._attn_implementation
    target.set_attn_implementation("eager")
    try:
        weights = target(torch.tensor([tokens]), output_attentions=True).attentions
    finally:
        target.set_attn_implementation(before)
    assert len(received) == len(weights)
    for own, layer in zip(received, weights, strict=True):
        torch.testing.assert_close(own, layer[0].sum(1).unflatten(0, (2, -1)).sum(1))
    hitters = policies.HeavyHitters(received, CHUNK)
    table = torch.zeros(1, 2, SLOTS, dtype=torch.int32)
    none = torch.zeros(1, 4, 8), torch.zeros(1, 2, 75, 8), torch.tensor([70]), table, SLOTS, 1.0
    hitters(*none, layer=1, keys=none[1])
    most = received[1].unflatten(1, (75, CHUNK)).sum(-1)[:, 1:70].topk(SLOTS - 1).indices + 1
    assert table[0, :, 1:].tolist() == most.sort(-1).values.tolist()
