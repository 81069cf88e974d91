"""Keeps running estimates of acceptance for chains, trees, matched tokens and rounds of drafting."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triforce_tree.policy.passes import PassKind
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.trees.shapes import DEFAULT_ACCEPTANCE

MOST_RANKS = 8
"""Sibling ranks that are counted; the few tokens of later ones that are accepted are left out."""

ByRank = tuple[tuple[float, ...], ...]
"""By depth, then rank: the probability that this child is the accepted one, given that its parent was."""
Ranks = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]], int]
"""Tried and accepted children by depth and rank, and the number of trees."""

# Share of the evidence that is kept from one drafting pass to the next: of acceptance, of what a shape yields
# beside what is expected of it, which depends less on the text, and of matched tokens.
_KEPT, _KEPT_RATIO, _KEPT_MATCHED = 0.98, 0.998, 0.9
# Before anything was observed: the acceptance, and its weight in judged tokens and in rounds.
_PRIOR_ACCEPTANCE, _PRIOR_TOKENS, _PRIOR_ROUNDS = 0.9, 3.0, 2.0
# The upper end of a confidence interval is this many standard errors above the estimate.
_STANDARD_ERRORS = 1.0
# What the prior weighs, in judged nodes of each rank; what all depths together weigh in the estimate of one.
_PRIOR_NODES, _POOLED = 8.0, 12.0
# What the common ratio weighs in that of one kind of pass and shape, in expected tokens; the first ratio in
# the common one.
_COMMON, _FIRST = 60.0, 8.0
# How much more a shape may yield that was not tried, and after how many expected tokens half of it is left.
_DOUBT, _SETTLED = 0.15, 10.0
# Expected tokens of shapes are computed after each of so many passes, and then after every so many.
_OFTEN = 8
# Acceptance that is expected of a match with at least so many tokens, and its weight in judged tokens.
_MATCHED = {6: 0.65, 12: 0.8, 24: 0.93, 48: 0.97}
_PRIOR_MATCHED = 4.0
# A matched token is proposed where all up to it are accepted with this probability at least.
_LEAST = 0.1


class Tails(NamedTuple):
    """Trees at the ends of chains that a pass has judged, summed over sequences.

    Attributes:
        reached: how many trees follow chains of which all tokens were accepted.
        accepted: tokens of them that the target accepted.
        rejected: how many of them ended in a rejection.
    """

    reached: int
    accepted: int
    rejected: int


@dataclass(frozen=True)
class Learnt:
    """Estimates that a request leaves to the next one.

    Attributes:
        acceptance: of a chain's tokens by the target.
        tokens_per_round: that the retrieval level adds to the chain.
        tree_acceptance: of a tree's depths by the target; None: not known.
        by_rank: acceptance of trees by depth and sibling rank; empty: not known.
    """

    acceptance: float
    tokens_per_round: float
    tree_acceptance: float | None = None
    by_rank: ByRank = ()


class _Mean:
    """Is a weighted mean in which older values lose weight."""

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
    """Estimates how many chain and tree tokens the target accepts, and how many tokens a round adds.

    Where passes of two and of three levels are both possible, each says something about the other: a tree's
    depths that the retrieval level accepts are mostly accepted by the target too. What is inferred so weighs
    as much as an expectation. Where there are several shapes of trees, acceptance by depth and rank says what
    is expected of each, whichever shapes it was observed with.

    Args:
        levels: the most levels of a pass.
        shapes: the shapes of the draft's trees, without those of matched tokens.
        two_levels: with three levels: whether passes of two levels are possible too.
        tail: whether the target also verifies a tree of the first shape at the end of each chain.
        learnt: what an earlier request left.
    """

    def __init__(
        self,
        levels: int,
        shapes: Sequence[DeviceTreeShape],
        two_levels: bool,
        tail: bool = False,
        learnt: Learnt | None = None,
    ) -> None:
        self._shapes, self._levels, self._tail = shapes, levels, tail
        self._mixed = two_levels or tail
        # Estimates at the end of the last trial, or those of an earlier request.
        self._last = learnt
        self._begin(1.0, learnt or self._expected)

    def begin_again(self, weight: float) -> None:
        """Begins a new trial from the expected estimates, with this share of their first weight."""
        self._last = self._now
        self._begin(weight, self._expected)

    def learnt(self, drafted: bool) -> Learnt:
        """The estimates; those of the last trial where nothing was ``drafted`` in this one."""
        return self._now if drafted or self._last is None else self._last

    @property
    def chain(self) -> float:
        """Returns the probability that the target accepts a chain's token after accepting all before it."""
        return self._chain.value

    def tree(self, shape: int = 0) -> float:
        """Returns the probability that the target accepts one of a node's children in such a tree."""
        depth = self._shapes[shape].depth
        if self._by_rank is not None:
            return acceptance_of(self._by_rank.expected(2, shape), depth)
        total, weight = self._tree.sum, self._tree.weight
        if self._mixed:
            total += _PRIOR_TOKENS * self._chain.value * acceptance_of(self._round.value, depth)
            weight += _PRIOR_TOKENS
        return total / weight

    def per_round(self, shape: int = 0) -> float:
        """Returns the draft tokens that a round with trees of this shape adds; with two levels the tree's
        depth.
        """
        depth = self._shapes[shape].depth
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
        """Returns the expected tokens of verifying a chain of this length and the tree at its end."""
        found = tokens_of(acceptance, chain)
        if self._tail:
            found += min(1.0, acceptance) ** chain * (tokens_of(self.tree(), self._shapes[0].depth) - 1)
        return found

    def doubt(self, levels: int, shape: int) -> float:
        """Factor by which trees of this shape may yield more than is expected, beside those of the others."""
        return 1.0 if self._by_rank is None else self._by_rank.doubt(levels, shape)

    def of(self, levels: int, shape: int = 0) -> tuple[float, float]:
        """Returns the target's acceptance in passes of so many levels, and the half-width of its interval."""
        a, judged = self.chain, self._chain.weight
        if levels == 2:
            a, judged = self.tree(shape), self._tree.weight + (_PRIOR_TOKENS if self._mixed else 0.0)
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
        """Updates the estimates from a drafting pass; arguments as in ``PassPolicy.observe``."""
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
            self._by_rank.observe(ranks, kind.levels, kind.shape)

    @property
    def _expected(self) -> Learnt:
        depth = self._shapes[0].depth if self._shapes else 0
        tree = _PRIOR_ACCEPTANCE if self._levels == 2 else None
        return Learnt(_PRIOR_ACCEPTANCE, 1 + 0.5 * depth, tree)

    @property
    def _now(self) -> Learnt:
        tree = self._tree.value if self._tree.weight else None
        table = () if self._by_rank is None else self._by_rank.table()
        return Learnt(self.chain, max(1.0, self._round.value), tree, table)

    def _begin(self, weight: float, learnt: Learnt) -> None:
        """Replaces the evidence by these estimates, weighing ``weight`` times the usual prior."""
        self._chain = _Mean(learnt.acceptance, weight * _PRIOR_TOKENS)
        self._round = _Mean(learnt.tokens_per_round, weight * _PRIOR_ROUNDS)
        tree = learnt.tree_acceptance
        self._tree = _Mean(tree or 0.0, 0.0 if tree is None else weight * _PRIOR_TOKENS)
        self._by_rank = None
        if len(self._shapes) > 1:
            self._by_rank = TreeAcceptance(self._shapes, learnt.by_rank or (DEFAULT_ACCEPTANCE,))


class _Ratio:
    """Is the ratio of observed to expected tokens for one kind of pass."""

    def __init__(self) -> None:
        self.observed = self.expected = 0.0

    def forget(self) -> None:
        self.observed, self.expected = _KEPT_RATIO * self.observed, _KEPT_RATIO * self.expected


class TreeAcceptance:
    """Estimates acceptance by depth and sibling rank, and the expected tokens of each tree shape.

    A depth's estimate starts from that of its rank at all depths, and this one from the prior. All shapes are
    compared by the same estimates: what is chance in them favours none. Trees that choose their topology by
    the draft's probabilities yield more than a fixed one with the same acceptance, verification from the
    leaves on adds to all, and the target accepts other tokens than the retrieval level. Hence a ratio of
    observed to expected tokens for each shape and number of levels, which starts from that of all of them.

    Args:
        shapes: what is expected of each is kept, and computed again every few passes.
        prior: by rank, or an earlier request's table.
    """

    def __init__(self, shapes: Sequence[DeviceTreeShape], prior: ByRank = (DEFAULT_ACCEPTANCE,)) -> None:
        self._shapes, depths = shapes, max(len(shape.widths) for shape in shapes)
        self._prior = [_padded(prior[min(d, len(prior) - 1)]) for d in range(depths)]
        self._tried = [[0.0] * MOST_RANKS for _ in range(depths)]
        self._accepted = [[0.0] * MOST_RANKS for _ in range(depths)]
        self._ratios = {(levels, n): _Ratio() for levels in (2, 3) for n in range(len(shapes))}
        self._passes = 0
        self._compute()

    def observe(self, ranks: Ranks, levels: int, shape: int) -> None:
        """Updates the estimates from the verifications of a pass with trees of this shape."""
        tried, accepted, trees = ranks
        rows = (*self._tried, *self._accepted)
        for row, new in zip(rows, (*tried, *accepted), strict=True):
            row[:] = [_KEPT * count + more for count, more in zip(row, new, strict=True)]
        self._passes += 1
        if self._passes <= _OFTEN or self._passes % _OFTEN == 0:
            self._compute()
        for ratio in self._ratios.values():
            ratio.forget()
        # After the table has taken up the same verifications: their chance is in both.
        self.count(levels, shape, trees, sum(map(sum, accepted)))

    def count(self, levels: int, shape: int, trees: int, accepted: int) -> None:
        """Take up how many tokens of so many trees were accepted, in passes of so many levels."""
        self._ratios[levels, shape].observed += accepted
        self._ratios[levels, shape].expected += trees * self._tokens[shape]

    def table(self) -> ByRank:
        found = []
        pooled = [
            (sum(row[r] for row in self._accepted), sum(row[r] for row in self._tried))
            for r in range(MOST_RANKS)
        ]
        for prior, tried, accepted in zip(self._prior, self._tried, self._accepted, strict=True):
            at_depth = []
            for r, (of_rank, all_tried) in enumerate(pooled):
                start = (of_rank + _PRIOR_NODES * prior[r]) / (all_tried + _PRIOR_NODES)
                at_depth.append((accepted[r] + _POOLED * start) / (tried[r] + _POOLED))
            # Siblings exclude each other.
            scale = max(1.0, sum(at_depth))
            found.append(tuple(a / scale for a in at_depth))
        return tuple(found)

    def ratio(self, levels: int, shape: int) -> float:
        """Returns observed tokens per expected token, in passes of so many levels with trees of one shape."""
        of_levels = (ratio for (own, _), ratio in self._ratios.items() if own == levels)
        common = _pooled(of_levels, _pooled(self._ratios.values(), 1.0))
        own = self._ratios[levels, shape]
        return (own.observed + _COMMON * common) / (own.expected + _COMMON)

    def doubt(self, levels: int, shape: int) -> float:
        """Factor by which it may turn out to yield more."""
        return 1 + _DOUBT / math.sqrt(1 + self._ratios[levels, shape].expected / _SETTLED)

    def expected(self, levels: int, shape: int) -> float:
        """Returns the expected tokens of one verification of such a tree, with the bonus token."""
        most = float(len(self._shapes[shape].widths))
        return 1 + min(most, self.ratio(levels, shape) * self._tokens[shape])

    def _compute(self) -> None:
        table = self.table()
        self._tokens = [accepted_tokens(shape, table) for shape in self._shapes]


def _pooled(ratios: Iterable[_Ratio], first: float) -> float:
    pairs = [(ratio.observed, ratio.expected) for ratio in ratios]
    return (sum(o for o, _ in pairs) + _FIRST * first) / (sum(e for _, e in pairs) + _FIRST)


def accepted_tokens(shape: DeviceTreeShape, acceptance: ByRank) -> float:
    """Expected accepted tokens of a tree, without a chain beside it.

    Of a best-first tree the nodes of each depth that are reached most often under ``acceptance``.

    Args:
        acceptance: its last row serves all deeper depths.
    """
    frontier, total = [1.0], 0.0
    for depth, width in enumerate(shape.widths):
        by_rank = acceptance[min(depth, len(acceptance) - 1)]
        if shape.places is None:
            reached = sorted((mass * a for mass in frontier for a in by_rank), reverse=True)[:width]
            reached += [0.0] * (width - len(reached))
        else:
            reached = [
                frontier[parent] * by_rank[rank] if rank < len(by_rank) else 0.0
                for parent, rank in shape.places[depth]
            ]
        total += sum(reached)
        frontier = reached
    return total


def _padded(row: Sequence[float]) -> list[float]:
    return [*row[:MOST_RANKS], *[0.0] * (MOST_RANKS - len(row))]


class MatchAcceptance:
    """Running acceptance of matched tokens, by how many tokens the match has in common with the text's end.

    Where a text repeats itself, the target accepts most of what followed before, and a chain of matched
    tokens yields more than any tree: a draft model with a window cannot foresee a copy of what lies far back.
    How likely a token is to be accepted depends on how long the match is.
    """

    def __init__(self) -> None:
        self._tokens = {least: (a * _PRIOR_MATCHED, _PRIOR_MATCHED) for least, a in _MATCHED.items()}

    def of(self, common: int) -> float:
        """Returns the estimated acceptance of tokens after a match with so many tokens in common."""
        accepted, judged = self._tokens[_class_of(common)]
        return accepted / judged

    def count(self, common: int, most: int) -> int:
        """Returns how many tokens to propose after a match with so many tokens in common."""
        if not common:
            return 0
        return min(most, max(1, int(math.log(_LEAST) / math.log(min(self.of(common), 0.9999)))))

    def observe(self, common: int, accepted: int, rejected: int) -> None:
        """Take up a verification: so many tokens were accepted, and then one was rejected, or none."""
        held = self._tokens[_class_of(common)]
        self._tokens[_class_of(common)] = (
            _KEPT_MATCHED * held[0] + accepted,
            _KEPT_MATCHED * held[1] + accepted + rejected,
        )


def _class_of(common: int) -> int:
    """Returns the class of a match's length: the fewest tokens in common."""
    return max(least for least in _MATCHED if least <= max(common, min(_MATCHED)))


def tokens_of(acceptance: float, chain: float) -> float:
    """Returns the expected tokens of a verification of a chain of this length, with the bonus token.

    With acceptance a per token, a chain of n tokens yields (1 - a^(n+1)) / (1 - a) tokens (Leviathan et al.,
    arXiv 2211.17192, equation 1).
    """
    a = min(acceptance, 0.9999)
    return float((1 - a ** (chain + 1)) / (1 - a))


def acceptance_of(tokens: float, depth: int) -> float:
    """Returns the acceptance at which a verification of ``depth`` tokens yields so many on average."""
    # Newton's method on the convex sum of a^n, from above: each step stays above the root.
    a, step = 1.0, 1.0
    while depth and a > 0 and step > 1e-7:
        total, slope = 1.0, 0.0
        for _ in range(depth):
            total, slope = 1 + a * total, total + a * slope
        step = (total - tokens) / slope
        a -= step
    return min(max(a, 0.0), 1.0)
