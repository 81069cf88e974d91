"""Running estimates of acceptance, and of the tokens that a round of drafting brings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from triforce_tree.decoding.choice.passes import CostFactors, PassKind
from triforce_tree.decoding.choice.times.host_seconds import HostSeconds
from triforce_tree.decoding.choice.tree_acceptance import ByRank, TreeAcceptance
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.trees.shapes import DEFAULT_ACCEPTANCE

# Share of the evidence that is kept from one drafting pass to the next.
_KEPT = 0.98
# Expected estimates weigh as many as these judged tokens and rounds.
_PRIOR_TOKENS, _PRIOR_ROUNDS = 3.0, 2.0
_PRIOR_ACCEPTANCE = 0.9
# The upper end of a confidence interval is this many standard errors above the estimate.
_STANDARD_ERRORS = 1.0

Ranks = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]], int]
"""Tried and accepted children by depth and rank, and the number of trees; see :class:`TreeAcceptance`."""


class Tails(NamedTuple):
    """Trees at the ends of chains that a pass has judged, summed over sequences.

    Attributes:
        reached: how many: those behind chains of which all tokens were accepted.
        accepted: tokens of them that the target accepted.
        rejected: how many of them ended in a rejection.
    """

    reached: int
    accepted: int
    rejected: int


def judged(report: Sequence[Sequence[int]], chain: int | None, tail: int | None) -> tuple[int, Tails | None]:
    """Sequences in which the target rejected a token of a tree or chain, and the trees behind chains.

    Args:
        report: of each sequence: committed tokens, verified draft tokens, tokens that level 1 emitted.
        chain: most tokens of a chain; None for passes without chains.
        tail: depth of the trees behind chains; None where there are none.
    """
    proposed = [row[1] if chain is None else min(row[2], chain) for row in report]
    beyond = [row[0] - 1 - tokens for row, tokens in zip(report, proposed, strict=True)]
    rejected, behind = sum(tokens < 0 for tokens in beyond), [tokens for tokens in beyond if tokens >= 0]
    if chain is None or tail is None:
        return rejected, None
    return rejected, Tails(len(behind), sum(behind), sum(tokens < tail for tokens in behind))


@dataclass(frozen=True)
class Learnt:
    """Estimates that another request, or another trial, may begin from.

    Attributes:
        acceptance: of a chain's tokens by the target.
        tokens_per_round: that the retrieval level adds to the chain.
        tree_acceptance: of a tree's depths by the target; None: not known.
        by_rank: acceptance of trees by depth and sibling rank; empty: not known.

    Raises:
        ValueError: an acceptance is not within 0 and 1, or a round brings less than a token.
    """

    acceptance: float
    tokens_per_round: float
    tree_acceptance: float | None = None
    by_rank: ByRank = ()

    def __post_init__(self) -> None:
        for value in (self.acceptance, self.tree_acceptance, *(a for row in self.by_rank for a in row)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"acceptance={value!r} must be within 0 and 1")
        if not 1 <= self.tokens_per_round < math.inf:
            raise ValueError(f"tokens_per_round={self.tokens_per_round!r} must be at least 1")


@dataclass(frozen=True)
class LearntChoice:
    """What a request leaves to the next one.

    Attributes:
        estimates: as last made.
        budget: the loss budget, in plain passes.
        cost_factors: of its measured costs to those of the table of stage costs.
        missed: seconds that trees of shapes without stages would have saved, by shape (``preparation.py``).
        host: what its passes took beyond their stages; the next request goes on with it.
    """

    estimates: Learnt
    budget: float
    cost_factors: CostFactors
    missed: Mapping[int, float] = field(default_factory=dict)
    host: HostSeconds = field(default_factory=HostSeconds, compare=False)


class _Mean:
    """A mean of values with weights, which forgets."""

    def __init__(self, prior: float, weight: float) -> None:
        self.sum, self.weight, self._least = prior * weight, weight, weight / 2

    @property
    def value(self) -> float:
        return self.sum / self.weight

    def add(self, total: float, weight: float) -> None:
        self.sum, self.weight = self.sum + total, self.weight + weight

    def forget(self) -> None:
        # An estimate that gets no evidence keeps its value, and is worth less and less.
        if self.weight * _KEPT >= self._least:
            self.sum, self.weight = self.sum * _KEPT, self.weight * _KEPT


class Estimates:
    """Acceptance of chains and of trees by the target, and tokens of a round.

    Where passes of two and of three levels are both possible, each says something about the other: a tree's
    depths that the retrieval level accepts are mostly accepted by the target too. What is inferred so weighs
    as much as an expectation. Where there are several shapes of trees, acceptance by depth and rank says what
    is expected of each, whichever shapes it was observed with.

    Args:
        levels: most levels of a pass.
        depths: of the draft's trees, by shape.
        two_levels: with three levels: whether passes of two levels are possible too.
        shapes: of the trees; empty where there is one.
        tail: whether the target also verifies a tree of the first shape at the end of each chain.
    """

    def __init__(
        self,
        levels: int,
        depths: Sequence[int],
        two_levels: bool,
        shapes: Sequence[DeviceTreeShape] = (),
        tail: bool = False,
    ) -> None:
        self._depths, self._mixed, self._levels, self._tail = depths, two_levels or tail, levels, tail
        self._shapes = shapes if len(shapes) > 1 else ()
        self._expected = Learnt(_PRIOR_ACCEPTANCE, 1 + 0.5 * depths[0])
        # Estimates at the end of the last trial, or those of an earlier request.
        self._last: Learnt | None = None
        self._begin(1.0, self._expected)

    def expect(self, expected: Learnt) -> None:
        """Begin trials from these estimates; the first one only if none were resumed."""
        self._expected = expected
        if self._last is None:
            self._begin(1.0, expected)

    def resume(self, learnt: Learnt) -> None:
        """Begin the first trial from an earlier request's estimates."""
        self._last = learnt
        self._begin(1.0, learnt)

    def begin_again(self, weight: float) -> None:
        """Begin a new trial from the expected estimates, with this share of their first weight."""
        self._last = self._now
        self._begin(weight, self._expected)

    def learnt(self, drafted: bool) -> Learnt:
        """The estimates; those of the last trial where nothing was ``drafted`` in this one."""
        return self._now if drafted or self._last is None else self._last

    @property
    def chain(self) -> float:
        """Probability that the target accepts a chain's token whose predecessors it accepted."""
        return self._chain.value

    @property
    def tree(self) -> float:
        """:meth:`tree_of` the first shape."""
        return self.tree_of(0)

    @property
    def per_round(self) -> float:
        """:meth:`per_round_of` the first shape."""
        return self.per_round_of(0)

    def tree_of(self, shape: int) -> float:
        """Probability that the target accepts one of a node's children, in a tree of this shape."""
        depth = self._depths[shape]
        if self._by_rank is not None:
            return acceptance_of(self._by_rank.expected(2, shape), depth)
        total, weight = self._tree.sum, self._tree.weight
        if self._mixed:
            total += _PRIOR_TOKENS * self._chain.value * acceptance_of(self._round.value, depth)
            weight += _PRIOR_TOKENS
        return total / weight

    def per_round_of(self, shape: int) -> float:
        """Draft tokens that a round with trees of this shape adds; with two levels the tree's depth."""
        depth = self._depths[shape]
        if self._levels < 3:
            return float(depth)
        if self._by_rank is not None:
            return self._by_rank.expected(3, shape)
        total, weight = self._round.sum, self._round.weight
        if self._mixed and self._tree.weight:
            more = min(_PRIOR_ROUNDS, self._tree.weight / max(1, depth))
            total, weight = total + more * tokens_of(self._tree.value, depth), weight + more
        return total / weight

    def chain_tokens(self, acceptance: float, chain: float) -> float:
        """Expected tokens of the verification of a chain of so many tokens, and of the tree at its end."""
        found = tokens_of(acceptance, chain)
        if self._tail:
            depth = self._depths[0]
            found += min(1.0, acceptance) ** chain * (tokens_of(self.tree_of(0), depth) - 1)
        return found

    def doubt(self, levels: int, shape: int) -> float:
        """Factor by which trees of this shape may yield more than is expected, beside those of the others."""
        return 1.0 if self._by_rank is None else self._by_rank.doubt(levels, shape)

    def of(self, levels: int, shape: int = 0) -> tuple[float, float]:
        """The target's acceptance in passes of so many levels, and the half-width of its interval."""
        a, judged = self.chain, self._chain.weight
        if levels == 2:
            inferred = _PRIOR_TOKENS if self._mixed else 0.0
            a, judged = self.tree_of(shape), self._tree.weight + inferred
        return a, _STANDARD_ERRORS * math.sqrt(max(0.0, a * (1 - a)) / judged)

    def observe(
        self,
        kind: PassKind,
        gathered: float,
        accepted: int,
        rejected: int,
        ranks: Ranks | None = None,
        tails: Tails | None = None,
    ) -> None:
        """Take up a drafting pass; arguments as of ``PassController.observe``, ``gathered`` per sequence."""
        for mean in (self._chain, self._round, self._tree):
            mean.forget()
        if tails is not None:
            accepted -= tails.accepted
            self._tree.add(tails.accepted, tails.accepted + tails.rejected)
            if self._by_rank is not None:
                self._by_rank.count(2, 0, tails.reached, tails.accepted)
        (self._tree if kind.levels == 2 else self._chain).add(accepted, accepted + rejected)
        if kind.levels == 3:
            self._round.add(gathered, kind.rounds)
        if self._by_rank is not None and ranks is not None:
            self._by_rank.observe(*ranks, kind.levels, kind.shape)

    @property
    def _now(self) -> Learnt:
        known = self._levels == 2 or self._tree.weight > 0
        table = self._unused if self._by_rank is None else self._by_rank.table()
        return Learnt(self.chain, max(1.0, self._round.value), self.tree if known else None, table)

    def _begin(self, weight: float, learnt: Learnt) -> None:
        """Replace the evidence by these estimates, weighing ``weight`` times the usual prior."""
        self._chain = _Mean(learnt.acceptance, weight * _PRIOR_TOKENS)
        self._round = _Mean(learnt.tokens_per_round, weight * _PRIOR_ROUNDS)
        tree = learnt.tree_acceptance
        if tree is None and self._levels == 2:
            tree = learnt.acceptance
        self._tree = _Mean(tree or 0.0, 0.0 if tree is None else weight * _PRIOR_TOKENS)
        # A table that this request does not need is left to later ones as it is.
        self._unused, self._by_rank = learnt.by_rank, None
        if self._shapes:
            self._by_rank = TreeAcceptance(self._shapes, learnt.by_rank or (DEFAULT_ACCEPTANCE,))


def tokens_of(acceptance: float, chain: float) -> float:
    """Expected tokens of a verification of a chain of so many tokens, the bonus token included."""
    a = min(acceptance, 0.9999)
    return float((1 - a ** (chain + 1)) / (1 - a))


def acceptance_of(tokens: float, depth: int) -> float:
    """The acceptance at which a verification of ``depth`` tokens yields so many in the mean."""
    # Newton's method on the convex sum of a^n, from above: each step stays above the root.
    a, step = 1.0, 1.0
    while depth and a > 0 and step > 1e-7:
        total, slope = 1.0, 0.0
        for _ in range(depth):
            total, slope = 1 + a * total, total + a * slope
        step = (total - tokens) / slope
        a -= step
    return min(max(a, 0.0), 1.0)
