"""The exact law of a computation that draws: every outcome, with its probability.

:class:`EnumeratingRandom` stands in for :class:`triforce_tree.sampling.Random`. Each draw is a
branching of a decision tree; the computation is run once for every leaf of it, depth first, by
repeating a script of choices and taking the first outcome wherever the script ends.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from triforce_tree import sampling

Result = TypeVar("Result")
Law = dict[tuple[int, ...], float]

# Outcomes less likely than this come from rounding in fp32; leaving one out costs its mass at most.
DUST = 1e-7
# What rounding may leave between two laws that are equal.
NOISE = 1e-6


class EnumeratingRandom:
    """Takes the branches that ``script`` names, then first ones; notes what else was possible."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.script = script
        self.trace: list[tuple[int, int]] = []  # (choice, choices there were)
        self.probability = 1.0

    def accept(self, probability: float) -> bool:
        sure = min(1.0, probability)
        return self._branch([1 - sure, sure]) == 1

    def choose(self, law: Tensor) -> int:
        return self._branch(law.tolist())

    def choose_distinct(self, laws: Tensor, counts: Sequence[int]) -> list[list[int]]:
        return [self._distinct(law, count) for law, count in zip(laws, counts, strict=True)]

    def _distinct(self, law: Tensor, count: int) -> list[int]:
        drawn: list[int] = []
        rest: Tensor | None = law
        while rest is not None and len(drawn) < count:
            drawn.append(self.choose(rest))
            rest = sampling.without(rest, drawn[-1])
        return drawn

    def _branch(self, weights: list[float]) -> int:
        total = sum(weights)
        possible = [i for i, weight in enumerate(weights) if weight > DUST * total]
        if len(possible) == 1:
            return possible[0]
        at = len(self.trace)
        choice = self.script[at] if at < len(self.script) else 0
        self.trace.append((choice, len(possible)))
        self.probability *= weights[possible[choice]] / total
        return possible[choice]


def outcomes(
    run: Callable[[EnumeratingRandom], Result], limit: int = 20_000
) -> Iterator[tuple[Result, float]]:
    """(result, probability) of every way that ``run`` can go, at most ``limit`` of them."""
    script: list[int] = []
    for _ in range(limit):
        random = EnumeratingRandom(script)
        yield run(random), random.probability
        trace = random.trace
        while trace and trace[-1][0] + 1 == trace[-1][1]:
            trace.pop()
        if not trace:
            return
        script = [choice for choice, _ in trace]
        script[-1] += 1
    raise RuntimeError(f"more than {limit} outcomes; make the case smaller")


def exact_law(run: Callable[[EnumeratingRandom], Sequence[int]]) -> Law:
    """Probability of every result of ``run``."""
    return summed((tuple(result), chance) for result, chance in outcomes(run))


Key = TypeVar("Key", bound=Hashable)


def summed(pairs: Iterator[tuple[Key, float]]) -> dict[Key, float]:
    """Masses of equal keys put together."""
    law: dict[Key, float] = defaultdict(float)
    for key, chance in pairs:
        law[key] += chance
    return dict(law)


def total_variation(a: Law, b: Law) -> float:
    """Half the L1 distance; missing mass counts."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2


def chi_square_p(counts: dict[Hashable, int], law: dict[Hashable, float]) -> float:
    """Chance of counts at least as far from ``law``; rare outcomes share a bin."""
    assert counts.keys() <= {key for key, chance in law.items() if chance > 0}, "impossible outcomes"
    total = sum(counts.values())
    pairs = [(counts.get(key, 0), chance * total) for key, chance in law.items() if chance > 0]
    bins = [pair for pair in pairs if pair[1] >= 5]
    rare = [pair for pair in pairs if pair[1] < 5]
    if rare:
        bins.append((sum(seen for seen, _ in rare), sum(mean for _, mean in rare)))
    x = sum((seen - mean) ** 2 / mean for seen, mean in bins)
    half = torch.tensor([(len(bins) - 1) / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
