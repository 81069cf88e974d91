"""Simulated decoding: passes that a policy chooses, on given costs and acceptance."""

import random
from collections.abc import Callable

from triforce_tree.policy.costs import MeasuredTimes, PassCosts, StageCosts
from triforce_tree.policy.pass_policy import LearntChoice, PassLevels, PassPolicy
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


def fixed_costs(*by_shape: StageSeconds | None, measured: MeasuredTimes | None = None) -> PassCosts:
    """Costs that are the same at each length of the context."""
    return PassCosts([own and StageCosts((1,), (own,)) for own in by_shape], measured)


def policy_of(
    levels: int = 3,
    cost: Cost | StageSeconds = (0.25, 1.0),
    fixed: int | None = None,
    learnt: LearntChoice | None = None,
) -> PassPolicy:
    seconds = cost if isinstance(cost, StageSeconds) else costs_of(levels, cost)
    most = MOST if levels != 2 else DEPTH
    passes = PassLevels(levels or 3, [shape_of(f"chain:{DEPTH}")], most, levels == MIXED)
    return PassPolicy(passes, fixed_costs(seconds), fixed, learnt)


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
) -> tuple[float, list[PassKind]]:
    """Returns tokens per plain pass's time, and the kinds of the passes.

    The target accepts every token of a chain with one probability, which may change with the tokens made; the
    retrieval level accepts those of a tree with probability ``per_token``, the target itself with ``tree``,
    which is that of a chain's tokens where it is not given. The host takes the seconds of ``host`` in a plain
    and in a drafting pass.
    """
    rng, made, time, chosen = random.Random(seed), 0, 0.0, []
    assert policy.costs is not None
    # What passes take does not change when the policy learns otherwise.
    cost, last = policy.costs.table[0].seconds[0], None
    while made < tokens:
        kind = policy.choose(tokens - made)
        chosen.append(kind)
        if any(host):
            policy.costs.learn_host(kind, host[kind != PLAIN])
        time += host[kind != PLAIN]
        resumed, last = last == PLAIN, kind
        if kind == PLAIN:
            time, made = time + cost.plain, made + 1
            policy.observe(PLAIN)
            continue
        now = acceptance(made) if callable(acceptance) else acceptance
        gathered, chain = 0, DEPTH
        if kind.levels == 3:
            gathered = sum(1 + first_failure(rng, per_token, DEPTH) for _ in range(kind.rounds))
            chain = min(policy.max_draft_tokens, gathered)
        elif tree is not None:
            now = tree
        accepted = first_failure(rng, now, chain)
        policy.observe(kind, 1, gathered, accepted, int(accepted < chain))
        time += cost.of(kind, chain / policy.max_draft_tokens) + (cost.prepare if resumed else 0.0)
        made += 1 + accepted
    return min(made, tokens) * (cost.plain + host[0]) / time, chosen


def rounds_of(chosen: list[PassKind]) -> list[int]:
    return [kind.rounds for kind in chosen]
