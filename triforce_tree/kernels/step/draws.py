"""Sources of random draws for the definitions in ``accept``, ``grow`` and ``traversal``."""

from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """A source of the random draws of one operator, which calls it in the order of the algorithm.

    ``place`` indexes the leading dimensions of the operator's random numbers, so that draws at different
    indices are independent.
    """

    def accept(self, chance: Tensor, *place: int) -> bool:
        """Returns True with probability min(1, ``chance``); ``chance`` is a scalar tensor."""

    def choose(self, weights: Tensor, *place: int) -> Tensor:
        """Draws one token by each of the ``weights`` ``[..., V]``, which need not sum to 1; NaN counts as 0.

        Returns:
            int64 ``[...]``; -1 where no token has a positive weight.
        """

    def choose_distinct(self, probs: Tensor, count: int) -> Tensor:
        """Draws ``count`` (at most V) tokens without replacement from each of ``probs`` ``[B, F, V]``.

        Returns:
            int64 ``[B, F, count]``, in draw order; -1 where no token of positive probability is left.
        """


class NoiseDraws:
    """Draws from given random numbers, as the operators compute them.

    Args:
        exponential: fp32 ``[..., V]``, Exp(1) noise. The token with the largest weight / exponential is
            drawn, the lowest id among equals. Tokens in descending order are draws without replacement.
        uniforms: fp32 in [0, 1); ``accept`` returns True where they are below the chance.
    """

    def __init__(self, exponential: Tensor, uniforms: Tensor | None = None) -> None:
        self._exponential, self._uniforms = exponential, uniforms

    def accept(self, chance: Tensor, *place: int) -> bool:
        assert self._uniforms is not None
        return bool(self._uniforms[place] < chance)

    def choose(self, weights: Tensor, *place: int) -> Tensor:
        top, token = torch.where(weights > 0, weights / self._exponential[place], 0.0).max(-1)
        return torch.where(top > 0, token, -1)

    def choose_distinct(self, probs: Tensor, count: int) -> Tensor:
        scores = probs / self._exponential
        draws = largest(scores, count)
        return torch.where(scores.gather(2, draws) > 0, draws, -1)


FIRST_CHANCE, LATER_CHANCE = 0.45, 0.6
"""Chances that a verifier accepts draws without replacement: the first one with f + (1 - f) m³, where f is
``FIRST_CHANCE`` and m the largest probability, and the r-th one with ``LATER_CHANCE / r``, once all before it
were rejected (docs/log/2026-11-30-which-nodes-a-sampled-tree-has.md)."""


def draw_tokens(draws: Draws | None, probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns child tokens of the F frontier nodes of a tree, and their chances; see ``grow.expand_nodes``.

    Args:
        draws: None takes the most probable tokens.
        probs: fp32 ``[B, F, V]``.
        count: K, tokens of each node.
    """
    most = min(count, probs.shape[-1])
    if draws is None:
        tokens = largest(probs, most)
        chances = probs.gather(2, tokens)
    else:
        tokens = draws.choose_distinct(probs, most)
        chances = torch.where(tokens >= 0, _chances_by_rank(probs.amax(2), most), 0.0)
    missing, pad = (0, count - most), torch.nn.functional.pad
    return pad(tokens, missing, value=-1), pad(chances, missing)


def _chances_by_rank(top: Tensor, count: int) -> Tensor:
    """Returns the chance of each draw, ``[B, F, K]``, from the largest probabilities ``[B, F]``."""
    chance, left, chances = FIRST_CHANCE + (1 - FIRST_CHANCE) * top**3, torch.ones_like(top), []
    for rank in range(count):
        chances.append(left * chance)
        left, chance = left - chances[-1], torch.full_like(top, LATER_CHANCE / (rank + 2))
    return torch.stack(chances, 2)


def largest(numbers: Tensor, count: int) -> Tensor:
    """Returns the indices of the ``count`` largest of ``numbers`` ``[..., R]``, ordered by ``ranked``."""
    values, order = numbers.topk(count)
    # topk breaks ties arbitrarily. If no other number equals the smallest one that it returned, only the
    # order among the returned numbers has to be corrected.
    if (numbers >= values[..., -1:]).sum(-1).eq(count).all():
        order = order.sort(-1).values
        falling = numbers.gather(-1, order).sort(stable=True, descending=True).indices
        return order.gather(-1, falling)
    return ranked(numbers).topk(count).indices


def ranked(numbers: Tensor) -> Tensor:
    """Returns int64 sort keys of non-negative fp32 ``[..., R]``: NaN first, of equals the lower index."""
    bits = torch.where(numbers.isnan(), 0x7FC00000, numbers.view(torch.int32))
    return (bits.long() << 32) - torch.arange(numbers.shape[-1], device=numbers.device)
