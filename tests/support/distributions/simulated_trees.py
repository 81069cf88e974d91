"""Simulated decoding with trees of several shapes, on given costs and acceptance by depth and rank."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from tests.support.distributions.simulated_passes import fixed_costs
from triforce_tree.policy.estimates import tokens_of
from triforce_tree.policy.pass_policy import Learnt, PassLevels, PassPolicy
from triforce_tree.policy.passes import PassKind, StageSeconds
from triforce_tree.trees.device_shapes import DeviceTreeShape, device_tree_shape
from triforce_tree.trees.shapes import parse_shape

SHAPES = [
    device_tree_shape(parse_shape(name)) for name in ("best-first:6,5,4", "static:0.0;0.1;1.0", "chain:3")
]
GAMMA = 24
ByRank = tuple[tuple[float, ...], ...]
"""By depth, then rank: the probability that this child is accepted, given that its parent was."""


class Simulation:
    """Passes of one sequence.

    Args:
        seconds: of a draft step, and of the verification of a tree of so many nodes by the target and by the
            retrieval level, in units of a plain pass.
        acceptance: by depth and rank, of trees by whoever verifies them; may change with the tokens made.
        levels: 2, 3, or 0 for a choice between them.
        chain: acceptance of a chain's tokens by the target, with three levels.
    """

    def __init__(
        self,
        seconds: tuple[float, Callable[[int], float], Callable[[int], float]],
        acceptance: ByRank | Callable[[int], ByRank],
        levels: int = 2,
        chain: float = 0.95,
        shapes: Sequence[DeviceTreeShape] = SHAPES,
    ) -> None:
        step, target, retrieval = seconds
        self.acceptance, self.levels, self.chain, self.shapes = acceptance, levels, chain, shapes
        self.costs = []
        for shape in shapes:
            parts = {"draft": step * len(shape.widths)}
            if levels != 3:
                parts["tree"] = target(shape.nodes)
            if levels != 2:
                parts |= {"retrieval": retrieval(shape.nodes), "chain": target(GAMMA + 1)}
            self.costs.append(StageSeconds(1.0, **parts))

    def policy(
        self,
        without: Sequence[int] = (),
        learnt: Learnt | None = None,
        held_back: Mapping[int, float] | None = None,
    ) -> PassPolicy:
        """A policy that may choose all shapes but those of ``without``."""
        most = self.shapes[0].depth if self.levels == 2 else GAMMA
        passes = PassLevels(self.levels or 3, self.shapes, most, self.levels == 0)
        costs = fixed_costs(*(None if n in without else own for n, own in enumerate(self.costs)))
        return PassPolicy(passes, costs, None, learnt, held_back)

    def accepted(self, shape: DeviceTreeShape, made: int, rng: random.Random) -> int:
        """Returns the accepted tokens of a tree; best-first trees are the best ones on average."""
        by_rank = self.acceptance(made) if callable(self.acceptance) else self.acceptance
        return rng.choices(range(len(shape.widths) + 1), path_lengths(shape, by_rank))[0]

    def run(self, policy: PassPolicy, tokens: int, seed: int = 0) -> tuple[float, list[tuple[PassKind, int]]]:
        """Returns the tokens in the time of a plain pass, and each pass with the tokens that it yielded."""
        rng, made, time, passes = random.Random(seed), 0, 0.0, []
        while made < tokens:
            kind = policy.choose(tokens - made)
            shape, count, gathered = self.shapes[kind.shape], 0, 0
            if kind.levels == 2:
                count = self.accepted(shape, made, rng)
            elif kind.levels == 3:
                gathered = sum(1 + self.accepted(shape, made, rng) for _ in range(kind.rounds))
                length = min(GAMMA, gathered)
                count = next((n for n in range(length) if rng.random() >= self.chain), length)
            policy.observe(kind, [(1 + count, shape.depth, gathered)])
            time += self.costs[kind.shape].of(kind, gathered / GAMMA)
            made += 1 + count
            passes.append((kind, 1 + count))
        return min(made, tokens) / time, passes

    def rates(self, acceptance: ByRank) -> dict[tuple[int, int, int], float]:
        """Expected tokens in the time of a plain pass, by levels, rounds and shape, if always chosen."""
        found = {(1, 0, 0): 1.0}
        for n, (shape, costs) in enumerate(zip(self.shapes, self.costs, strict=True)):
            chances = path_lengths(shape, acceptance)
            mean = 1 + sum(length * chance for length, chance in enumerate(chances))
            if self.levels != 3:
                found[2, 1, n] = mean / costs.of(PassKind(2, 1))
            for rounds in range(1, GAMMA + 1) if self.levels != 2 else ():
                lengths = {0: 1.0}
                for _ in range(rounds):
                    longer: dict[int, float] = {}
                    for length, mass in lengths.items():
                        for more, chance in enumerate(chances):
                            total = min(GAMMA, length + 1 + more)
                            longer[total] = longer.get(total, 0.0) + mass * chance
                    lengths = longer
                tokens = sum(mass * tokens_of(self.chain, length) for length, mass in lengths.items())
                filled = sum(mass * length for length, mass in lengths.items()) / GAMMA
                found[3, rounds, n] = tokens / costs.of(PassKind(3, rounds), filled)
        return found


def topology(shape: DeviceTreeShape, acceptance: ByRank) -> list[dict[int, list[int]]]:
    """The children of each node, by depth of their parents; nodes are numbered within their depth."""
    frontier, found = [1.0], []
    for depth, width in enumerate(shape.widths):
        by_rank = acceptance[min(depth, len(acceptance) - 1)]
        if shape.places is None:
            pairs = [(mass * a, p, r) for p, mass in enumerate(frontier) for r, a in enumerate(by_rank)]
            kept = sorted(pairs, key=lambda pair: -pair[0])[:width]
            places = sorted((parent, rank) for _, parent, rank in kept)
        else:
            places = list(shape.places[depth])
        children: dict[int, list[int]] = {}
        for node, (parent, _) in enumerate(places):
            children.setdefault(parent, []).append(node)
        found.append(children)
        frontier = [frontier[p] * (by_rank[r] if r < len(by_rank) else 0.0) for p, r in places]
    return found


@cache
def path_lengths(shape: DeviceTreeShape, acceptance: ByRank) -> list[float]:
    """The probability of each number of accepted tokens."""
    reached, frontier = [1.0], {0: 1.0}
    for depth, children in enumerate(topology(shape, acceptance)):
        by_rank = acceptance[min(depth, len(acceptance) - 1)]
        frontier = {
            child: mass * by_rank[rank]
            for node, mass in frontier.items()
            for rank, child in enumerate(children.get(node, []))
            if rank < len(by_rank)
        }
        reached.append(sum(frontier.values()))
    return [a - b for a, b in zip(reached, [*reached[1:], 0.0], strict=True)]
