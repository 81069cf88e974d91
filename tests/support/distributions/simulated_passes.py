"""Simulated decoding: passes that a policy chooses, on given costs and acceptance."""

import random
from collections.abc import Callable

from triforce_tree.policy.costs import KnownCosts, PassCosts, StageCosts
from triforce_tree.policy.pass_policy import Learnt, PassLevels, PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.trees.device_shapes import DeviceTreeShape, device_tree_shape
from triforce_tree.trees.shapes import parse_shape

DEPTH, MOST = 3, 24
# Seconds of a round and of a verification, in units of a plain pass: a fast draft on a GPU, a slow one on a
# CPU, verification that costs as much as many plain passes, and one that costs nothing more.
COSTS = [(0.1, 1.05), (0.3, 1.2), (1.0, 1.5), (1.3, 2.5), (0.3, 3.0), (0.01, 1.0), (3.0, 6.0)]
Cost = tuple[float, float]
MIXED = 0
"""Number of levels of a policy that chooses between two and three."""


def costs_of(levels: int, cost: Cost) -> StageSeconds:
    """A round costs the first number, or a tenth of it without the retrieval level; a plain pass 1."""
    a_round, verification = cost
    if levels == 2:
        return StageSeconds(1.0, draft=a_round, tree=verification)
    parts = {"draft": 0.1 * a_round, "retrieval": 0.9 * a_round, "chain": verification}
    return StageSeconds(1.0, **parts, **({"tree": verification} if levels == MIXED else {}))


def shape_of(name: str) -> DeviceTreeShape:
    return device_tree_shape(parse_shape(name))


def fixed_costs(*by_shape: StageSeconds | None, follow: bool = False) -> PassCosts:
    """Returns costs that are the same at each length of the context."""
    return PassCosts(KnownCosts([own and StageCosts((1,), (own,)) for own in by_shape]), follow)


def policy_of(
    levels: int = 3,
    cost: Cost | StageSeconds = (0.25, 1.0),
    fixed: int | None = None,
    learnt: Learnt | None = None,
    follow: bool = False,
) -> PassPolicy:
    seconds = cost if isinstance(cost, StageSeconds) else costs_of(levels, cost)
    most = MOST if levels != 2 else DEPTH
    passes = PassLevels(levels or 3, [shape_of(f"chain:{DEPTH}")], most, levels == MIXED)
    return PassPolicy(passes, fixed_costs(seconds, follow=follow), fixed, learnt)


def first_failure(rng: random.Random, chance: float, most: int) -> int:
    return next((n for n in range(most) if rng.random() >= chance), most)


def simulated(
    policy: PassPolicy,
    acceptance: float | Callable[[int], float],
    tokens: int,
    seed: int = 0,
    per_token: float = 0.6,
    tree: float | None = None,
    host: tuple[float, float] = (0.0, 0.0),
    true: StageSeconds | None = None,
) -> tuple[float, list[PassKind]]:
    """Returns the tokens per plain pass's time, and the kinds of the passes.

    The target accepts every token of a chain with one probability, which may change with the tokens made; the
    retrieval level accepts those of a tree with probability ``per_token``, the target itself with ``tree``,
    which is that of a chain's tokens where it is not given.

    Args:
        host: the seconds that the host takes in a plain and in a drafting pass, beside those of the stages.
        true: the seconds of the stages; by default those that the policy was given.
    """
    rng, made, time, chosen = random.Random(seed), 0, 0.0, []
    assert policy.costs is not None
    cost, last = true or policy.costs.stages(0), None
    while made < tokens:
        kind = policy.choose(tokens - made)
        chosen.append(kind)
        now = acceptance(made) if callable(acceptance) else acceptance
        gathered, chain, accepted = 0, DEPTH, 0
        if kind.levels == 3:
            gathered = sum(1 + first_failure(rng, per_token, DEPTH) for _ in range(kind.rounds))
            chain = min(MOST, gathered)
        elif tree is not None:
            now = tree
        if kind != PLAIN:
            accepted = first_failure(rng, now, chain)
        resumed = last == PLAIN and kind != PLAIN
        filled = chain / MOST if kind.levels == 3 else 1.0
        taken = cost.of(kind, filled) + host[kind != PLAIN] + (cost.prepare if resumed else 0.0)
        policy.observe(kind, [(1 + accepted, chain, gathered)])
        policy.costs.learn(kind, filled, resumed, taken)
        time, made, last = time + taken, made + 1 + accepted, kind
    return min(made, tokens) * (cost.plain + host[0]) / time, chosen


def rounds_of(chosen: list[PassKind]) -> list[int]:
    return [kind.rounds for kind in chosen]
