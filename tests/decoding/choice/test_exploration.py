"""What trials of other levels and shapes of trees cost; what trees behind chains teach of two levels."""

from typing import Any

import pytest

from tests.support.distributions.simulated_trees import Simulation
from triforce_tree.decoding.choice.budgets.trials import TRIALS
from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.estimates import Estimates, Learnt, Tails, judged, tokens_of
from triforce_tree.decoding.choice.passes import PLAIN, PassKind

COSTS: dict[str, Any] = {
    "gpu": (0.03, lambda nodes: 1.02 + 0.001 * nodes, lambda nodes: 0.25),
    "cpu": (0.1, lambda nodes: 1 + 0.06 * nodes, lambda nodes: 0.4 + 0.03 * nodes),
}
ACCEPTANCE: dict[str, Any] = {
    "likely": ((0.75, 0.12, 0.05),),
    "flat": ((0.3, 0.25, 0.2, 0.1),),
    "changing": lambda made: ((0.8, 0.1),) if made % 256 < 128 else ((0.2, 0.1),),
}


def spent(control: PassController) -> list[float]:
    """The cost of each trial that a controller makes, in tokens; filled while it chooses."""
    costs: list[float] = []
    observe = control.observe

    def noted(kind: PassKind, *counts: Any) -> None:
        if (trial := control._trials.chosen) is not None and trial[0] == kind:
            costs.append(trial[1])
        observe(kind, *counts)

    control.observe = noted  # type: ignore[method-assign]
    return costs


@pytest.mark.parametrize("levels", [0, 2, 3])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
def test_trials_cost_two_per_cent_at_most(levels: int, cost: str, acceptance: str) -> None:
    tried = 0
    for tokens in (64, 128, 256, 512, 1024):
        for seed in range(4):
            simulated = Simulation(COSTS[cost], ACCEPTANCE[acceptance], levels)
            control = simulated.controller()
            costs = spent(control)
            _, passes = simulated.run(control, tokens, seed)
            made = sum(count for _, count in passes)
            # One token may be spent before any was made.
            assert sum(costs) <= 1 + TRIALS * made + 1e-9
            tried += len(costs)
            assert {kind for kind, _ in passes} != {PLAIN}
    if levels != 2 or cost == "cpu":
        assert tried, "there are trials"


def test_trees_behind_chains_are_expected_where_the_whole_chain_is_accepted() -> None:
    estimates = Estimates(3, [3], False, tail=True)
    estimates.expect(Learnt(0.5, 2.0, 0.25))
    behind = tokens_of(estimates.tree_of(0), 3) - 1
    assert behind > 0
    assert estimates.chain_tokens(0.5, 2) == pytest.approx(tokens_of(0.5, 2) + 0.25 * behind)
    assert Estimates(3, [3], False).chain_tokens(0.5, 2) == pytest.approx(tokens_of(0.5, 2))
    # Committed, verified and level 1's tokens: a chain of 4 and a tree of 3; a chain of at most 6 in part.
    report = [(8, 7, 4), (6, 7, 4), (5, 7, 4), (4, 7, 4), (1, 9, 8), (7, 9, 8)]
    assert judged(report, 6, 3) == (2, Tails(reached=4, accepted=4, rejected=3))
    assert judged(report, 6, None) == (2, None)
    assert judged([(8, 7, 0), (7, 7, 0)], None, 3) == (1, None)
    before = estimates.tree_of(0)
    for _ in range(20):
        estimates.observe(PassKind(3, 1), 2.0, 5, 0, tails=Tails(1, 3, 0))
    assert estimates.tree_of(0) > before
    assert estimates.chain > 0.8, "what is accepted of a chain is not what is accepted behind it"
