"""Keeps running estimates of how many draft tokens are accepted."""

import math
from collections.abc import Sequence
from functools import lru_cache

from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.trees.shapes import DEFAULT_ACCEPTANCE

# Shares of the evidence that are kept from one pass to the next: about the text; about what distinguishes the
# kinds of passes, which depends less on the text.
_KEPT, _KEPT_RATIO = 0.98, 0.998
# The expected acceptance of a chain's tokens and of first guesses; their weights in judged tokens and in
# trees, and that of an earlier text.
_CHAIN, _TREES, _CHAIN_WEIGHT, _TREES_WEIGHT, _EARLIER = 0.9, 0.6, 3.0, 2.0, 6.0
# Steps of the acceptance of first guesses for which expected tokens are computed.
_STEPS = 20
# The weight, in expected tokens, of the expectation that a kind of pass yields what its shape lets expect.
_USUAL = 12.0
# The share by which passes that were not tried may yield more, and the expected tokens that halve its square.
_DOUBT, _SETTLED = 0.25, 10.0


class Ratio:
    """A running ratio of two sums, with an expected value that counts as much as ``weight`` in the second."""

    def __init__(self, expected: float, weight: float) -> None:
        self._expected, self._weight = expected, weight
        self.found = self.tried = 0.0

    @property
    def value(self) -> float:
        return (self.found + self._expected * self._weight) / (self.tried + self._weight)

    def add(self, found: float, tried: float) -> None:
        self.found, self.tried = self.found + found, self.tried + tried

    def keep(self, share: float) -> None:
        self.found, self.tried = share * self.found, share * self.tried


class Estimates:
    """Estimates how many tokens of chains and trees are accepted.

    How many tokens of a tree are accepted depends on its shape, on the text and on the kind of pass. The text
    is described by one number, the probability that a first guess is accepted, which is estimated from the
    trees of all kinds of passes (``accepted_tokens``). The retrieval level and the target accept different
    tokens, and some texts have one likely continuation and others several, so each kind of pass also has a
    ratio of accepted to expected tokens, which changes slowly. Evidence about the text loses weight with each
    pass, so the estimates return to the expected ones while nothing is drafted, and drafting is tried again.

    Args:
        shapes: the shapes of trees.
    """

    def __init__(self, shapes: Sequence[DeviceTreeShape]) -> None:
        self._depths = [float(shape.depth) for shape in shapes]
        self._curves = [_curve(shape) for shape in shapes]
        self._chain = Ratio(_CHAIN, _CHAIN_WEIGHT)
        kinds = [(levels, shape) for levels in (2, 3) for shape in range(len(shapes))]
        # Accepted tokens by the trees that were verified, and by the tokens that were expected of them.
        self._trees = {kind: Ratio(0.0, 0.0) for kind in kinds}
        self._kinds = {kind: Ratio(1.0, _USUAL) for kind in kinds}
        self._text = _TREES

    def begin(self) -> None:
        """Begins another text: what is known of the earlier one counts as much as a few passes."""
        judged, trees = self._chain.tried, sum(each.tried for each in self._trees.values())
        self._chain.keep(_EARLIER / max(_EARLIER, judged))
        for each in self._trees.values():
            each.keep(_EARLIER / max(_EARLIER, trees))

    def passed(self) -> None:
        """Lets earlier evidence about the text lose weight, after each pass."""
        for each in (self._chain, *self._trees.values()):
            each.keep(_KEPT)

    # Chains of the retrieval level's tokens

    def chain(self) -> tuple[float, float]:
        """Returns the probability that the target accepts a chain's token after those before it, and its
        standard error.
        """
        a = self._chain.value
        return a, math.sqrt(max(0.0, a * (1 - a)) / (self._chain.tried + _CHAIN_WEIGHT))

    def add_chain(self, accepted: int, rejected: int) -> None:
        self._chain.add(accepted, accepted + rejected)

    # Trees

    def tree(self, levels: int, shape: int) -> tuple[float, float, float]:
        """Returns the expected accepted tokens of a tree of this shape, their standard error, and the factor
        by which they may be more, compared with trees of other kinds.

        Args:
            levels: 2 for the target's verification, 3 for the retrieval level's.
        """
        kind = self._kinds[levels, shape]
        tokens = min(kind.value * _at(self._curves[shape], self._text), self._depths[shape])
        trees = sum(each.tried for each in self._trees.values()) + _TREES_WEIGHT
        doubt = 1 + _DOUBT / math.sqrt(1 + kind.tried / _SETTLED)
        return tokens, math.sqrt(tokens * (1 + tokens) / trees), doubt

    def add_trees(self, levels: int, shape: int, trees: int, accepted: int) -> None:
        """Adds the accepted tokens of so many trees."""
        self._trees[levels, shape].add(accepted, trees)
        for each in self._kinds.values():
            each.keep(_KEPT_RATIO)
        self._kinds[levels, shape].add(accepted, trees * _at(self._curves[shape], self._text))

    def settle(self) -> None:
        """Finds the acceptance of first guesses at which as many tokens are expected as were accepted."""
        kinds = self._kinds
        tried = [
            (each.tried * kinds[kind].value, self._curves[kind[1]]) for kind, each in self._trees.items()
        ]
        tried.append((_TREES_WEIGHT, self._curves[0]))
        accepted = sum(each.found for each in self._trees.values()) + _TREES_WEIGHT * _at(
            self._curves[0], _TREES
        )
        low = 0.0
        for step in range(1, _STEPS + 1):
            high = sum(trees * curve[step] for trees, curve in tried)
            if high >= accepted:
                self._text = (step - 1 + (accepted - low) / max(high - low, 1e-9)) / _STEPS
                return
            low = high
        self._text = 1.0


@lru_cache(maxsize=64)
def _curve(shape: DeviceTreeShape) -> tuple[float, ...]:
    """Returns the expected accepted tokens where first guesses are accepted with 0, 1 / _STEPS, ..., 1."""
    return tuple(accepted_tokens(shape, step / _STEPS) for step in range(_STEPS + 1))


def _at(curve: Sequence[float], first_guess: float) -> float:
    step = min(_STEPS - 1, int(first_guess * _STEPS))
    return curve[step] + (first_guess * _STEPS - step) * (curve[step + 1] - curve[step])


def accepted_tokens(shape: DeviceTreeShape, first_guess: float) -> float:
    """Returns the expected accepted tokens of a tree.

    A best-first tree is taken to have the nodes of each depth that are accepted most often.

    Args:
        first_guess: the probability that a node's first child is accepted after the node. Later siblings
            share the rest as in ``DEFAULT_ACCEPTANCE``.
    """
    first, *others = DEFAULT_ACCEPTANCE
    acceptance = [first_guess, *(a * (1 - first_guess) / (1 - first) for a in others)]
    frontier, total = [1.0], 0.0
    for depth, width in enumerate(shape.widths):
        if shape.places is None:
            frontier = sorted((mass * a for mass in frontier for a in acceptance), reverse=True)[:width]
        else:
            ranks = [*acceptance, *[0.0] * width]
            frontier = [frontier[parent] * ranks[rank] for parent, rank in shape.places[depth]]
        total += sum(frontier)
    return total


def tokens_of(acceptance: float, chain: float) -> float:
    """Returns the expected tokens of a verification of a chain of this length, with the bonus token.

    With acceptance a per token, a chain of n tokens yields (1 - a^(n+1)) / (1 - a) tokens (Leviathan et al.,
    arXiv 2211.17192, equation 1).
    """
    a = min(acceptance, 0.9999)
    return float((1 - a ** (chain + 1)) / (1 - a))
