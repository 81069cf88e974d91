"""Sources of the random decisions that the definitions in ``accept`` and ``grow`` make."""

from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """The random decisions of one operator, called in the order in which the algorithm makes them.

    ``place`` indexes the leading dimensions of the random numbers that an operator is given, so that
    decisions at different indices are independent in any order.
    """

    def accept(self, chance: Tensor, *place: int) -> bool:
        """True with probability min(1, ``chance``); ``chance`` is a scalar, never NaN for an honest draft."""

    def choose(self, weights: Tensor, *place: int) -> Tensor:
        """Sample one token from each of ``weights`` ``[..., V]``, which need not sum to 1; NaN counts as 0.

        Returns:
            int64 ``[...]``; -1 where no token has a positive weight.
        """

    def choose_distinct(self, probs: Tensor, count: int) -> Tensor:
        """Returns ``count`` (at most V) draws without replacement from each of ``probs`` ``[B, F, V]``.

        Returns:
            int64 ``[B, F, count]``, in draw order; -1 where no token of positive probability is left.
        """


class NoiseDraws:
    """Decisions read from random numbers that were drawn before, as the operators make them.

    Args:
        exponential: fp32 ``[..., V]`` of Exp(1) noise. The token of the largest weight / exponential is
            drawn, the lowest id among equals; descending order gives draws without replacement.
        uniforms: fp32 in [0, 1): accept where they are below the chance.
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


def draw_tokens(draws: Draws | None, probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the child tokens of a tree's frontier ``[B, F, V]``, as ``grow.expand_nodes`` does.

    Args:
        draws: None takes the most probable tokens.
        probs: fp32 ``[B, F, V]``.
        count: K, tokens per node; those past V are -1.
    """
    most = min(count, probs.shape[-1])
    order = largest(probs, most)
    tokens = order if draws is None else draws.choose_distinct(probs, most)
    missing, pad = (0, count - most), torch.nn.functional.pad
    return pad(tokens, missing, value=-1), pad(probs.gather(2, order), missing)


def largest(numbers: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of non-negative numbers ``[..., R]``, in the order of ``ranked``."""
    values, order = numbers.topk(count)
    # topk breaks ties arbitrarily; where it returned all numbers that are at least its smallest, only their
    # order has to be mended.
    if (numbers >= values[..., -1:]).sum(-1).eq(count).all():
        order = order.sort(-1).values
        falling = numbers.gather(-1, order).sort(stable=True, descending=True).indices
        return order.gather(-1, falling)
    return ranked(numbers).topk(count).indices


def ranked(numbers: Tensor) -> Tensor:
    """Non-negative numbers ``[..., R]`` as int64 sort keys: NaN highest, of equals the lower index."""
    bits = torch.where(numbers.isnan(), 0x7FC00000, numbers.view(torch.int32))
    return (bits.long() << 32) - torch.arange(numbers.shape[-1], device=numbers.device)
