"""Problems of acceptance over token trees, for kernels and their definitions."""

import random

import torch
from torch import Tensor

from tests.support.kernels.step_cases import Problem
from triforce_tree.kernels.step.accept import FIXED

# How much draft and target agree: (sharp, likeness) of ``acceptance``, from not at all to almost always.
LIKENESS = ((1.0, 0.0), (2.0, 1.0), (0.3, 10.0), (30.0, 0.2), (0.1, 20.0), (0.5, 100.0))


def random_parents(size: int, rng: random.Random) -> list[int]:
    """Parents of a random tree, a third of the nodes extending the newest path."""
    return [-1] + [node - 1 if rng.random() < 0.35 else rng.randrange(node) for node in range(1, size)]


def depth_of(parents: list[list[int]]) -> int:
    deepest = 0
    for one in parents:
        depths = [0] * len(one)
        for node in range(1, len(one)):
            depths[node] = depths[one[node]] + 1
        deepest = max(deepest, *depths)
    return deepest


def honest_tokens(parents: list[list[int]], q: Tensor, q_rows: Tensor, absent: float = 0.1) -> Tensor:
    """Returns children drawn from their draft probs without replacement; some are absent, with all below
    them.
    """
    most = min(len(parents[0]), q.shape[-1])
    scores, order = (q / torch.empty_like(q).exponential_()).topk(most, dim=-1)
    order = order.masked_fill(scores <= 0, -1).cpu()
    removed = torch.rand(len(parents), len(parents[0])) < absent
    tokens = torch.full(removed.shape, -1)
    for b, one in enumerate(parents):
        drawn = [0] * len(one)
        for node in range(1, len(one)):
            above = one[node]
            if (above and tokens[b, above] < 0) or drawn[above] >= most or removed[b, node]:
                continue
            tokens[b, node] = order[b, q_rows[b, above], drawn[above]]
            drawn[above] += 1
    return tokens


def traversal(
    batch: int,
    nodes: int,
    vocab: int,
    device: str,
    sharp: float = 2.0,
    likeness: float = 1.0,
    nan: bool = False,
    seed: int = 0,
    fixed: float = 0.0,
    both: float = 0.0,
) -> Problem:
    """Returns a random tree drawn from q; ``sharp`` scales the logits, ``likeness`` the part that p and q
    share.

    The children of a node are proposed deterministically with probability ``fixed``; of 1, q is empty.
    ``both`` is the part of the siblings after which all are deterministic.
    """
    rng = random.Random(seed)
    parents = [random_parents(nodes, rng) for _ in range(batch)]
    shared = torch.randn(batch, nodes, vocab, device=device) * likeness
    p, q = (((torch.randn_like(shared) + shared) * sharp).softmax(-1) for _ in range(2))
    rows = torch.stack([torch.randperm(nodes) for _ in range(batch)])
    q = q.gather(1, rows.argsort(1).to(device)[..., None].expand_as(q))
    tokens = honest_tokens(parents, q, rows)
    if fixed:
        # Rows of q that no node refers to must not be read.
        certain = torch.rand(batch, nodes) < fixed
        at = torch.arange(batch)[:, None].expand_as(rows)[certain], rows[certain]
        q[at[0].to(device), at[1].to(device)] = torch.nan
        rows[certain] = -1
        q = q if fixed < 1 else q[:, :0]
    for b, above in enumerate(parents if both else []):
        for node in range(2, nodes):
            if above[node] in above[1:node] and random.Random(f"{b} {node}").random() < both:
                later = [n for n in range(node, nodes) if above[n] == above[node]]
                tokens[b, later] = torch.randint_like(tokens[b, later], vocab)
                rows[b, later] = FIXED
    if nan:
        p[0] = torch.nan
    random_numbers = torch.rand(batch, nodes, device=device), torch.empty(batch, vocab, device=device)
    random_numbers[1].exponential_()
    tree = tokens.to(device), torch.tensor(parents, device=device)
    return Problem("traverse_tree", (*tree, p, q, rows.to(device), *random_numbers, depth_of(parents)))


def greedy(batch: int, nodes: int, vocab: int, device: str, seed: int = 0) -> Problem:
    """Returns a random tree in which half of the nodes hold the target's argmax."""
    rng = random.Random(seed)
    parents = [random_parents(nodes, rng) for _ in range(batch)]
    tokens = torch.randint(-1, vocab, (batch, nodes))
    best = torch.randint(vocab, (batch, nodes))
    for b in range(batch):
        for node in range(1, nodes):
            if tokens[b, node] >= 0 and rng.random() < 0.5:
                best[b, parents[b][node]] = tokens[b, node]
    args = (tokens.to(device), torch.tensor(parents, device=device), best.to(device), depth_of(parents))
    return Problem("accept_greedy", args)


def runner_up(batch: int, count: int, vocab: int, exponential: bool, device: str, seed: int = 0) -> Problem:
    """Half of the tokens are impossible. Some probs have one possible token, none, NaN or ties."""
    torch.manual_seed(seed)
    probs = torch.rand(batch, count, vocab, device=device)
    probs = torch.where(torch.rand_like(probs) < 0.5, probs, 0.0 if exponential else -torch.inf)
    chosen = torch.randint(-1, vocab, (batch, count), device=device)
    special = probs.view(-1, vocab)
    special[0], special[-1] = 0.0 if exponential else -torch.inf, torch.nan
    special[1 % len(special)] = 0.25
    if len(special) > 2:
        special[2] = 0.0 if exponential else -torch.inf
        special[2, chosen.view(-1)[2].clamp_min(0)] = 1.0
    noise = torch.empty_like(probs).exponential_() if exponential else None
    return Problem("second_choice", (probs, chosen, noise))
