"""The distribution of what ``accept_tree`` emits, by enumeration: drawn trees and deterministic ones."""

import itertools
import math

import pytest
import torch
from enumeration import NOISE, exact_law, total_variation
from torch import Tensor

from triforce_tree.kernels.step.accept import accept_drawn

VOCABULARY = 3
TREES = {
    # Tokens (None: drawn), parents, and by node the row of q that its children were drawn from.
    "siblings": ([0, 2, 0, 1], [-1, 0, 0, 0], [-1] * 4),
    "some": ([0, 2, 1], [-1, 0, 0], [-1] * 3),
    "equal siblings": ([0, 1, 1, 2], [-1, 0, 0, 0], [-1] * 4),
    "below": ([0, 2, 0, 1, 1, 0], [-1, 0, 0, 1, 1, 2], [-1] * 6),
    "drawn": ([0, None, None, None], [-1, 0, 0, 1], [0, 1, -1, -1]),
    "drawn below": ([0, 2, 0, None, None, 1], [-1, 0, 0, 1, 1, 3], [-1, 0, -1, -1, -1, -1]),
    "below drawn": ([0, None, None, 1, 2, 0], [-1, 0, 0, 1, 1, 2], [1, -1, -1, -1, -1, -1]),
}


class EnumeratedDraws:
    """Decisions of an :class:`enumeration.EnumeratingRandom`."""

    def __init__(self, random) -> None:
        self.random = random

    def accept(self, chance: Tensor, *place: int) -> bool:
        return self.random.accept(float(chance))

    def choose(self, weights: Tensor, *place: int) -> Tensor:
        return torch.tensor(self.random.choose(weights))


def target_probs(path: tuple[int, ...]) -> Tensor:
    """A target whose next token depends on all tokens so far."""
    seed = sum((token + 1) * 5**at for at, token in enumerate(path))
    return (1.5 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))).softmax(-1)


@pytest.mark.parametrize("name", TREES)
def test_the_output_follows_the_target(name: str) -> None:
    proposed, parents, rows = TREES[name]
    length = 3 if len(proposed) > 4 else 2
    q = (1.5 * torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))).softmax(-1)

    def run(random):
        tokens = list(proposed)
        for parent in range(len(tokens)):
            children = [i for i, above in enumerate(parents) if above == parent]
            if children and tokens[children[0]] is None:
                [drawn] = random.choose_distinct(q[rows[parent]][None], [len(children)])
                for child, token in zip(children, drawn, strict=True):
                    tokens[child] = token
        paths: list[tuple[int, ...]] = [(0,)]
        for node in range(1, len(tokens)):
            paths.append((*paths[parents[node]], tokens[node]))
        path, count, following = accept_drawn(
            EnumeratedDraws(random), torch.tensor([tokens]), torch.tensor([parents]),
            torch.stack([target_probs(path) for path in paths])[None],
            q[None] if max(rows) >= 0 else q[None, :0], torch.tensor([rows]), 3,
        )  # fmt: skip
        new = [*(tokens[i] for i in path[0, 1 : int(count)].tolist()), int(following)]
        while len(new) < length:
            new.append(random.choose(target_probs((0, *new))))
        return new[:length]

    expected = {
        tokens: math.prod(float(target_probs((0, *tokens[:i]))[t]) for i, t in enumerate(tokens))
        for tokens in itertools.product(range(VOCABULARY), repeat=length)
    }
    assert total_variation(exact_law(run), expected) < NOISE
