"""The exact distribution of a computation that draws: every outcome, with its probability.

Each draw is a branching of a decision tree, and the computation is run once for every leaf of it. A
:class:`Walk` is one run: it follows a script of choices, and takes the first outcome after its end.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import pytest
from torch import Tensor

Result = TypeVar("Result")
Distribution = dict[tuple[int, ...], float]
# At each branching: which of the possible outcomes is taken, and how many there are.
Script = tuple[tuple[int, int], ...]

# Outcomes less probable than this come from rounding in fp32; leaving one out changes a result by its mass.
DUST = 1e-7
# The distance that rounding may cause between equal distributions.
NOISE = 1e-6


class Walk:
    """Takes the branches that ``script`` names, then first ones; records the number of alternatives.

    Attributes:
        trace: the script of this run so far.
        probability: of all choices so far.
        over: whether later draws do not affect the result; then first outcomes are taken, and not recorded.
        still: whether nothing is random, and the most probable outcome is taken.
    """

    def __init__(self, script: Script = ()) -> None:
        self.script = script
        self.trace: list[tuple[int, int]] = []
        self.probability = 1.0
        self.over = self.still = False

    def branch(self, weights: Sequence[float]) -> int:
        """Returns the index of one of ``weights``, which need not sum to 1; NaN counts as 0."""
        weights = [weight if weight > 0 else 0.0 for weight in weights]
        if self.still:
            return weights.index(max(weights))
        total = sum(weights)
        possible = [i for i, weight in enumerate(weights) if weight > DUST * total]
        if len(possible) == 1 or self.over:
            return possible[0]
        at = len(self.trace)
        choice, choices = self.script[at] if at < len(self.script) else (0, len(possible))
        assert choices == len(possible), (
            f"a computation that is repeated must meet the same choices: draw {at} of {self.script} now has "
            f"{len(possible)} possible outcomes with the weights {weights}"
        )
        self.trace.append((choice, choices))
        self.probability *= weights[possible[choice]] / total
        return possible[choice]

    def alternatives(self) -> Iterator[Script]:
        """Scripts of the runs that differ from this one after its own script."""
        for at in range(len(self.script), len(self.trace)):
            _, choices = self.trace[at]
            for other in range(1, choices):
                yield (*self.trace[:at], (other, choices))


class EnumeratingRandom(Walk):
    """A walk that draws from given probabilities."""

    def accept(self, probability: float) -> bool:
        probability = min(1.0, probability)
        return self.branch([1 - probability, probability]) == 1

    def choose(self, weights: Tensor) -> int:
        return self.branch(weights.tolist())

    def choose_distinct(self, probs: Tensor, counts: Sequence[int]) -> list[list[int]]:
        return [self._distinct(weights, count) for weights, count in zip(probs, counts, strict=True)]

    def _distinct(self, weights: Tensor, count: int) -> list[int]:
        drawn: list[int] = []
        rest: Tensor | None = weights
        while rest is not None and len(drawn) < count:
            drawn.append(self.choose(rest))
            rest = _without(rest, drawn[-1])
        return drawn


def outcomes(
    run: Callable[[EnumeratingRandom], Result], limit: int = 20_000
) -> Iterator[tuple[Result, float]]:
    """(result, probability) of every run of ``run``, at most ``limit`` of them."""
    scripts: list[Script] = [()]
    for _ in range(limit):
        random = EnumeratingRandom(scripts.pop())
        yield run(random), random.probability
        scripts += random.alternatives()
        if not scripts:
            return
    raise RuntimeError(f"more than {limit} outcomes; make the case smaller")


def exact_distribution(run: Callable[[EnumeratingRandom], Sequence[int]]) -> Distribution:
    """Returns the probability of every result of ``run``."""
    return summed((tuple(result), chance) for result, chance in outcomes(run))


Key = TypeVar("Key", bound=Hashable)


def summed(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Returns the sum of the probabilities of equal keys."""
    probs: dict[Key, float] = defaultdict(float)
    for key, chance in pairs:
        probs[key] += chance
    return dict(probs)


def total_variation(a: Distribution, b: Distribution) -> float:
    """Returns half the L1 distance; missing probability mass counts."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2


def chi_square_p(counts: dict[Hashable, int], probs: dict[Hashable, float]) -> float:
    """Returns the p-value of Pearson's chi-square test of ``counts`` against ``probs``; rare outcomes share a
    bin.
    """
    assert counts.keys() <= {key for key, chance in probs.items() if chance > 0}, "impossible outcomes"
    total = sum(counts.values())
    pairs = [(counts.get(key, 0), chance * total) for key, chance in probs.items() if chance > 0]
    bins = [pair for pair in pairs if pair[1] >= 5]
    rare = [pair for pair in pairs if pair[1] < 5]
    if rare:
        bins.append((sum(seen for seen, _ in rare), sum(mean for _, mean in rare)))
    chisquare = pytest.importorskip("scipy.stats").chisquare
    return float(chisquare(*zip(*bins, strict=True)).pvalue)


def _without(probs: Tensor, token: int) -> Tensor | None:
    """Returns the distribution ``[V]`` without ``token``, renormalised; None if nothing is left."""
    left = probs.clone()
    left[token] = 0
    total = left.sum()
    return left / total if total > 0 else None
