"""Tests of draws against a distribution that is known exactly."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0  # draws in each bin, the usual rule for chi-square


def chi_square(counts: Counter[int], probs: Tensor) -> tuple[float, int]:
    """Returns (statistic, degrees of freedom) of draws against probs ``[V]``; rare tokens share bins."""
    draws = sum(counts.values())
    probabilities, tokens = (probs.double() / probs.double().sum()).cpu().sort()
    left = (1 - probabilities.cumsum(0)) * draws
    statistic, bins = 0.0, 0
    expected = observed = 0.0
    # Rare tokens come first and share bins; what remains must be enough for one more bin.
    for token, probability, rest in zip(tokens.tolist(), probabilities.tolist(), left.tolist(), strict=True):
        expected += draws * probability
        observed += counts[token]
        if expected >= LEAST_EXPECTED and (rest >= LEAST_EXPECTED or rest < 1e-6):
            statistic += (observed - expected) ** 2 / expected
            bins += 1
            expected = observed = 0.0
    return statistic, max(0, bins - 1)


def chi_square_p(statistic: float, freedom: int) -> float:
    """Returns the probability of a chi-square at least this large; 1 if there are no degrees of freedom."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64, device="cpu")
    return float(torch.special.gammaincc(half[0], half[1]))


def detectable(draws: int, freedom: int, significance: float) -> float:
    """Returns the least total variation distance that a chi-square test finds nine times in ten.

    A distribution at distance d gives the statistic a noncentrality of at least 4 d^2 for each draw
    (Cauchy-Schwarz). The noncentral chi-square is approximated by a normal distribution with mean f + n and
    variance 2 (f + 2 n). That rare tokens share bins is not considered.

    Args:
        draws: number of draws of the test.
        freedom: degrees of freedom of the test, at least 1.
        significance: a smaller p-value counts as an error.
    """

    def root(grows: Callable[[float], float], high: float) -> float:
        low = 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if grows(middle) < 0 else (low, middle)
        return high

    wide = 100.0 * (freedom + 10)
    critical = root(lambda x: significance - chi_square_p(x, freedom), wide)
    above = root(lambda n: freedom + n - critical - 1.2816 * math.sqrt(2 * (freedom + 2 * n)), wide)
    return min(1.0, math.sqrt(above / max(1, draws)) / 2)


def shift(counts: Counter[int], probs: Tensor, draft: Tensor) -> tuple[float, float]:
    """Returns the shift of draws towards the draft, and its variance if they follow ``probs``.

    Each draw x is weighted by min(1, q(x) / p(x)), the probability with which a verifier accepts it from the
    draft. A wrong residual, or an acceptance that is too likely, emits more tokens of large weight.

    Args:
        counts: how often each token was drawn.
        probs: p, ``[V]``.
        draft: q, ``[V]``, which must not depend on the draws; 1 at each proposal of a deterministic drafter.

    Returns:
        The sum of the draws' weights less its expectation, and the sum's variance. Sums of several
        distributions may be added up.
    """
    p, q = (probs.double() / probs.double().sum()).cpu(), draft.double().cpu()
    weights = torch.where(q < p, q / p.clamp_min(1e-300), 1.0)
    mean = float((p * weights).sum())
    variance = float((p * (weights - mean) ** 2).sum())
    total = sum(count * (float(weights[token]) - mean) for token, count in counts.items())
    return total, sum(counts.values()) * variance


def shift_p(parts: Sequence[tuple[float, float]]) -> float:
    """Returns an upper bound of the two-sided p-value of a sum of shifts.

    It is Bennett's inequality, which holds for any number of draws, also if nearly all weights are equal. A
    normal approximation does not.
    """
    total, variance = (sum(column) for column in zip(*parts, strict=True))
    if variance < 1e-12:
        return 1.0
    ratio = abs(total) / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + ratio) * math.log1p(ratio) - ratio)))
