"""Problems for the kernels of suffix matching; see ``step_cases``."""

import random

import torch
from torch import Tensor

from tests.support.kernels.step_cases import Problem
from triforce_tree.kernels import suffix
from triforce_tree.kernels.suffix.ngrams import powers

LENGTHS = (2, 3, 5, 9, 17)
EXPECTED = (0.3, 0.5, 0.7, 0.9, 0.97)


def texts(batch: int, most: int, alphabet: int, seed: int) -> list[list[int]]:
    """Returns random tokens, in every second text with copies of what came before."""
    rng = random.Random(seed)
    made = []
    for b in range(batch):
        text = [rng.randrange(alphabet) for _ in range(rng.randint(1, most))]
        if b % 2:
            while len(text) < most:
                start = rng.randrange(len(text))
                text += [*text[start : start + rng.randint(1, 30)], rng.randrange(alphabet)]
        made.append(text[:most])
    return made


def buffers(sequences: list[list[int]], entries: int, device: str) -> tuple[Tensor, ...]:
    """Returns an empty table, tokens with others after the end of each sequence, n-gram lengths, powers."""
    width = max(map(len, sequences)) + 3
    tokens = torch.randint(3, (len(sequences), width))
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    table = torch.full((len(sequences), len(LENGTHS), entries), -1, dtype=torch.int32, device=device)
    lengths = torch.tensor(LENGTHS, device=device)
    return table, tokens.to(device), lengths, powers(max(LENGTHS), torch.device(device))


def indexing(batch: int, most: int, device: str, entries: int = 64, seed: int = 0, count: int = 0) -> Problem:
    """N-grams enter a table that holds others already; few entries make collisions."""
    torch.manual_seed(seed)
    sequences = texts(batch, most, 4, seed)
    table, *rest = buffers(sequences, entries, device)
    table.random_(-1, most)
    until = torch.tensor([len(sequence) for sequence in sequences], device=device)
    first = torch.randint(0, most, (batch,), device=device).clamp(max=until)
    args = (table, *rest, first, until, count or most)
    return Problem("index_ngrams", args, (0,), package=suffix)


def matching(
    batch: int,
    most: int,
    device: str,
    length: int = 8,
    alphabet: int = 3,
    seed: int = 0,
    entries: int = 1 << 12,
) -> Problem:
    """Sequences whose newest tokens are a provisional chain, after a proposal that partly followed."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    sequences = texts(batch, most, alphabet, seed)
    table, tokens, lengths, factors = buffers(sequences, entries, device)
    end = torch.tensor([len(sequence) - 1 for sequence in sequences])
    committed = torch.tensor([rng.randint(max(0, int(stop) - 4), int(stop)) for stop in end]).to(device)
    suffix.index_ngrams.definition(
        table, tokens, lengths, factors, torch.zeros_like(committed), committed, most
    )
    before = torch.tensor([rng.randint(-1, int(stop)) for stop in end])
    chain = torch.full((batch, length), -1)
    for b in range(batch):
        proposed = rng.randint(0, length)
        chain[b, :proposed] = torch.randint(alphabet, (proposed,))
        right = sequences[b][int(before[b]) + 1 :][: rng.randint(0, proposed)]
        chain[b, : len(right)] = torch.tensor(right, dtype=torch.int64)
    last = torch.stack([before, torch.randint(len(LENGTHS), (batch,))], 1)
    counts = torch.rand(batch, len(LENGTHS), 1) * torch.tensor([1.0, 1.0]) * 20
    counts[..., 0] *= torch.rand(batch, len(LENGTHS))
    args = (chain.to(device), last.to(device), counts.to(device), table, tokens, lengths, factors)
    expected = torch.tensor(EXPECTED, device=device)
    args = (*args, expected, committed, end.to(device), 0.1)
    return Problem("match_suffix", args, (0, 1, 2), _close, suffix)


def _close(problem: Problem, made: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(made, exact, strict=True):
        # A GPU adds and multiplies in one step.
        torch.testing.assert_close(a, b, rtol=1e-6 if a.is_floating_point() else 0, atol=0)
