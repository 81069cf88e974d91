"""Problems for the kernels that grow a token tree; see ``step_cases``."""

import random

import torch
from torch import Tensor

from tests.support.kernels.step_cases import Problem
from triforce_tree.drafters.token_map import ABSENT
from triforce_tree.kernels.attention.plan import pack_mask
from triforce_tree.kernels.step.draws import NoiseDraws, draw_tokens


def beginning(
    batch: int, again: int, widths: tuple[int, ...], size: int, device: str, seed: int = 0
) -> Problem:
    """Sequences of different lengths, one that has just enough tokens to refeed, one of a single token."""
    rng = random.Random(seed)
    depths = [0] + [d + 1 for d, width in enumerate(widths) for _ in range(width)]

    def made(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, -99, dtype=dtype, device=device)

    columns = again - 1 + len(depths)
    written = made(batch, again), made(batch, columns), made(batch, len(depths)), made(len(widths), batch)
    end = [rng.randrange(again, size) for _ in range(batch - 2)] + [again - 1, 0][-batch:]
    dropped = [rng.randrange(max(1, e - again)) if e >= again else e - again + 1 for e in end]
    offsets = [*range(1 - again, 0), *depths]
    ahead = [1 - again, *(sum(widths[:d]) + 1 for d in range(len(widths) - 1))]
    read = (torch.tensor(x, device=device) for x in (end, dropped, offsets, ahead))
    tokens = torch.randint(50000, (batch, size + 3), device=device)[:, :size]
    args = (*written, made(batch, dtype=torch.int32), tokens, *read)
    return Problem("begin_tree", args, (0, 1, 2, 3, 4))


def expansion(
    batch: int,
    frontier: int,
    vocab: int,
    count: int,
    dtype: torch.dtype,
    exponential: bool,
    device: str,
    temperature: float | None = None,
    ties: bool = False,
    seed: int = 0,
) -> Problem:
    """Returns peaked logits, some -inf; some nodes have one possible token, equal logits or NaN, or lack most
    tokens.
    """
    torch.manual_seed(seed)
    scores = torch.randn(batch, frontier, vocab, device=device) * 4
    scores = scores.round() if ties else scores
    scores[torch.rand_like(scores) < 0.2] = -torch.inf
    rows = scores.view(-1, vocab)
    rows[0, vocab // 2] = 0.0  # where all logits are -inf, the softmax is NaN
    for row in range(1, len(rows)):
        if row % 5 == 2:
            rows[row] = -torch.inf
            rows[row, vocab - 1 - row % 3] = 1.0
        elif row % 5 == 3:
            rows[row] = 0.5
        elif row % 5 == 4:
            rows[row, 0] = torch.nan
        elif row % 5 == 1:
            rows[row, 1 + vocab // 3 :] = ABSENT
    logits = torch.full((batch, frontier + 1, vocab + 5), torch.nan, dtype=dtype, device=device)
    logits = logits[:, 1:, :vocab].copy_(scores)
    probs = torch.full((batch, frontier + 2, vocab), torch.nan, device=device)[:, 1:-1]
    noise = None
    if exponential:
        noise = torch.empty(batch, frontier + 2, vocab, device=device).exponential_()[:, 2:]
    heat = None
    if temperature is not None:  # each sequence has its own
        heat = temperature * (1 + torch.arange(batch, device=device) / 3)
    return Problem("expand_nodes", (logits, heat, noise, probs, count), (3,), _consistent_draws)


def scattered(
    batch: int, frontier: int, vocab: int, count: int, exponential: bool, device: str, seed: int = 0
) -> Problem:
    """Returns few equal logits, far apart, and -inf for the others, so sums of exponentials are exact.

    The noise takes four values only, so that the draws have ties too.
    """
    torch.manual_seed(seed)
    logits = torch.full((batch, frontier, vocab), -torch.inf, device=device)
    for row, scores in enumerate(logits.view(-1, vocab)):
        # The first holds tokens of the second half alone; the last has a single one.
        first, apart = (vocab // 2, 7 + row) if row == 0 else (row, max(2, vocab // (9 + row)))
        # Below -104 the exponential of a score that is not relative to the largest underflows.
        scores[first :: vocab if row == batch * frontier - 1 else apart] = (3.0, -300.0)[row % 2]
    noise = None
    if exponential:
        noise = torch.randint(1, 5, (batch, frontier, vocab), device=device).float()
    probs = torch.full_like(logits, torch.nan)
    return Problem("expand_nodes", (logits, None, noise, probs, count), (3,), _consistent_draws)


def _consistent_draws(problem: Problem, made: list[Tensor], exact: list[Tensor]) -> None:
    """Probs may differ by rounding; draws must follow exactly from them, and chances but for rounding."""
    _, _, exponential, _, count = problem.args
    draws, chances, probs = made
    torch.testing.assert_close(probs, exact[2], rtol=2e-5, atol=1e-30, equal_nan=True)
    noise = None if exponential is None else NoiseDraws(exponential)
    tokens, expected = draw_tokens(noise, probs, count)
    assert torch.equal(draws, tokens)
    torch.testing.assert_close(
        chances,
        expected,
        rtol=0 if noise is None else 1e-5,
        atol=0 if noise is None else 1e-7,
        equal_nan=True,
    )


def placement(
    batch: int,
    frontier: int,
    count: int,
    width: int,
    device: str,
    fixed: bool = False,
    ties: bool = False,
    last: bool = False,
    seed: int = 0,
    first: int = 3,
    before: int = 5,
) -> Problem:
    """Returns a frontier after ``first`` older nodes; missing draws, paths without a chance, a sequence of
    NaN.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab = 40
    nodes = first + frontier + width + (0 if last else 2)
    mask_words = torch.randint(-(2**63), 2**63 - 1, (batch, nodes, -(-nodes // 64)), device=device)
    # Clear the bits of nodes that do not exist yet.
    mask_words[:, : first + frontier] &= pack_mask(
        torch.ones(1, first + frontier, dtype=torch.bool, device=device), mask_words.shape[2]
    )

    def tree(most: int) -> Tensor:
        return torch.randint(-1, most, (batch, nodes), device=device)

    path_chances = torch.rand(batch, nodes, device=device)
    chances = torch.randn(batch, frontier, vocab, device=device).softmax(-1).topk(min(count, vocab)).values
    chances = torch.nn.functional.pad(chances, (0, count - chances.shape[2]))
    if ties:
        path_chances, chances = path_chances.mul(2).ceil() / 2, chances.mul(16).ceil() / 16
    draws = torch.randint(-1, vocab, (batch, frontier, count), device=device)
    path_chances[0, first] = 0.0
    if batch > 1:
        path_chances[-1], chances[-1] = torch.nan, torch.nan
    pairs = None
    if fixed:
        chosen = sorted(rng.sample(range(frontier * count), width))
        parents = [place // count for place in chosen]
        ranks = [parents[:i].count(parent) for i, parent in enumerate(parents)]
        pairs = torch.tensor([parents, ranks], device=device)
    ids = torch.full((batch, width), -99, device=device)
    bits = before + first + frontier + width
    mask = None if last else torch.full((batch * width, -(-bits // 64)), -99, device=device)
    changed = (0, 1, 2, 3, 4) if last else (0, 1, 2, 3, 4, 5)
    args = (tree(9), tree(9), mask_words, path_chances, ids, mask, draws, chances, pairs, first, before)
    return Problem("place_nodes", args, changed)
