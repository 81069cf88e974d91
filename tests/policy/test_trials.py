"""Tests the cost of trials of other levels and shapes, and what trees behind chains teach of two levels."""

from typing import Any

import pytest

from tests.support.distributions.simulated_passes import shape_of
from tests.support.distributions.simulated_trees import Simulation
from triforce_tree.policy.budgets import TRIALS
from triforce_tree.policy.estimates import Estimates, Learnt, Tails, tokens_of
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind

COSTS: dict[str, Any] = {
    "gpu": (0.03, lambda nodes: 1.02 + 0.001 * nodes, lambda nodes: 0.25),
    "cpu": (0.1, lambda nodes: 1 + 0.06 * nodes, lambda nodes: 0.4 + 0.03 * nodes),
}
ACCEPTANCE: dict[str, Any] = {
    "likely": ((0.75, 0.12, 0.05),),
    "flat": ((0.3, 0.25, 0.2, 0.1),),
    "changing": lambda made: ((0.8, 0.1),) if made % 256 < 128 else ((0.2, 0.1),),
}


def spent(policy: PassPolicy) -> list[float]:
    """The cost of each trial that a policy makes, in tokens; filled while it chooses."""
    costs: list[float] = []
    observe = policy.observe

    def noted(kind: PassKind, *counts: Any) -> None:
        if (trial := policy._trials.chosen) is not None and trial[0] == kind:
            costs.append(trial[1])
        observe(kind, *counts)

    policy.observe = noted  # type: ignore[method-assign]
    return costs


@pytest.mark.parametrize("levels", [0, 2, 3])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_trials_cost_two_per_cent_at_most(levels: int, cost: str, acceptance: str) -> None:
    tried = 0
    for tokens in (64, 128, 256, 512, 1024):
        for seed in range(4):
            simulated = Simulation(COSTS[cost], ACCEPTANCE[acceptance], levels)
            policy = simulated.policy()
            costs = spent(policy)
            _, passes = simulated.run(policy, tokens, seed)
            made = sum(count for _, count in passes)
            # One token may be spent before any was made.
            assert sum(costs) <= 1 + TRIALS * made + 1e-9
            tried += len(costs)
            assert {kind for kind, _ in passes} != {PLAIN}
    if levels != 2 or cost == "cpu":
        assert tried, "there are trials"


def test_trees_behind_chains_are_expected_where_the_whole_chain_is_accepted() -> None:
    shapes = [shape_of("chain:3")]
    estimates = Estimates(3, shapes, False, tail=True, learnt=Learnt(0.5, 2.0, 0.25))
    behind = tokens_of(estimates.tree(), 3) - 1
    assert behind > 0
    assert estimates.chain_tokens(0.5, 2) == pytest.approx(tokens_of(0.5, 2) + 0.25 * behind)
    assert Estimates(3, shapes, False).chain_tokens(0.5, 2) == pytest.approx(tokens_of(0.5, 2))
    before = estimates.tree()
    for _ in range(20):
        estimates.observe(PassKind(3, 1), 2.0, 5, 0, tails=Tails(1, 3, 0))
    assert estimates.tree() > before
    assert estimates.chain > 0.8, "what is accepted of a chain is not what is accepted behind it"
