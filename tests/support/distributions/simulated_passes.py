"""Simulated decoding: passes that a controller chooses, on given costs and acceptance."""

import random
from collections.abc import Callable

from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.passes import PLAIN, PassKind, StageSeconds

DEPTH, MOST = 3, 24
# Seconds of a round and of a verification, in units of a plain pass: a fast draft on a GPU, a slow one on a
# CPU, verification that costs as much as many plain passes, and one that costs nothing more.
COSTS = [(0.1, 1.05), (0.3, 1.2), (1.0, 1.5), (1.3, 2.5), (0.3, 3.0), (0.01, 1.0), (3.0, 6.0)]
Cost = tuple[float, float]
MIXED = 0
"""Number of levels of a controller that chooses between two and three."""


def costs_of(levels: int, cost: Cost) -> StageSeconds:
    """A round costs the first number, or a tenth of it without the retrieval level; a plain pass 1."""
    a_round, verification = cost
    if levels == 2:
        return StageSeconds(1.0, draft=a_round, tree=verification)
    parts = {"draft": 0.1 * a_round, "retrieval": 0.9 * a_round, "chain": verification}
    return StageSeconds(1.0, **parts, **({"tree": verification} if levels == MIXED else {}))


def controller(
    levels: int = 3, cost: Cost | StageSeconds = (0.25, 1.0), fixed: int | None = None, most: int = MOST
) -> PassController:
    made = PassController(levels or 3, DEPTH, most if levels != 2 else DEPTH, fixed, levels == MIXED)
    made.costs = cost if isinstance(cost, StageSeconds) else costs_of(levels, cost)
    return made


def first_failure(rng: random.Random, chance: float, most: int) -> int:
    return next((n for n in range(most) if rng.random() >= chance), most)


def simulated(
    control: PassController,
    acceptance: float | Callable[[int], float],
    tokens: int,
    seed: int = 0,
    per_token: float = 0.6,
    tree: float | None = None,
    host: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, list[PassKind]]:
    """Tokens per plain pass's time, and the kinds of the passes.

    The target accepts every token of a chain with one probability, which may change with the tokens made; the
    retrieval level accepts those of a tree with probability ``per_token``, the target itself with ``tree``,
    which is that of a chain's tokens where it is not given. The host takes the seconds of ``host`` in a plain
    and in a drafting pass.
    """
    rng, made, time, chosen = random.Random(seed), 0, 0.0, []
    cost, last = control.costs, None
    assert cost is not None
    while made < tokens:
        control.remaining = tokens - made
        kind = control.choose()
        chosen.append(kind)
        if any(host):
            control.host.add(kind, host[kind != PLAIN])
        time += host[kind != PLAIN]
        resumed, last = last == PLAIN, kind
        if kind == PLAIN:
            time, made = time + cost.plain, made + 1
            control.observe(PLAIN)
            continue
        now = acceptance(made) if callable(acceptance) else acceptance
        gathered, chain = 0, DEPTH
        if kind.levels == 3:
            gathered = sum(1 + first_failure(rng, per_token, DEPTH) for _ in range(kind.rounds))
            chain = min(control.max_draft_tokens, gathered)
        elif tree is not None:
            now = tree
        accepted = first_failure(rng, now, chain)
        control.observe(kind, 1, gathered, accepted, int(accepted < chain))
        time += cost.of(kind, chain / control.max_draft_tokens) + (cost.prepare if resumed else 0.0)
        made += 1 + accepted
    return min(made, tokens) * (cost.plain + host[0]) / time, chosen


def rounds_of(chosen: list[PassKind]) -> list[int]:
    return [kind.rounds for kind in chosen]
