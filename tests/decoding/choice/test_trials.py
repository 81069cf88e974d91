"""When drafting pauses and is tried again, within a request and from one to the next."""

from itertools import pairwise
from statistics import mean

import pytest
from simulated_passes import COSTS, MIXED, Cost, controller, rounds_of, simulated

from triforce_tree.decoding.choice.controller import REFILL, START_BUDGET
from triforce_tree.decoding.choice.estimates import Learnt, LearntChoice
from triforce_tree.decoding.choice.passes import PLAIN, PassKind, StageSeconds


def test_an_unlucky_start_does_not_end_a_draft_that_pays() -> None:
    """Everything is rejected at first; then nearly everything is accepted."""
    for levels in (2, 3, MIXED):
        speed, chosen = simulated(controller(levels), lambda made: 0.95 if made > 40 else 0.0, 2000)
        assert PLAIN in chosen
        assert PLAIN not in chosen[-150:]
        assert speed > 1.8


def test_drafting_pauses_when_it_no_longer_pays_and_resumes() -> None:
    turns = controller(cost=(0.5, 1.2))
    _, chosen = simulated(turns, lambda made: 0.0 if 1000 <= made < 3000 else 0.95, 6000)
    zeros = [i for i, kind in enumerate(chosen) if kind == PLAIN]
    assert len(zeros) > 1800
    assert PLAIN not in chosen[-100:]
    before = chosen[: zeros[0]]
    assert len(before) < 1000


def test_pauses_grow_while_trials_do_not_pay() -> None:
    _, chosen = simulated(controller(cost=(1.0, 1.5)), 0.0, 8000)
    drafted = [i for i, kind in enumerate(chosen) if kind != PLAIN]
    pauses = [b - a - 1 for a, b in pairwise(drafted) if b - a > 32]
    assert len(pauses) > 3
    assert pauses[0] >= 64
    assert pauses[-1] > 4 * pauses[0]
    assert max(rounds_of(chosen)) <= 2, "trials are short"


def test_costly_verification_is_tried_once_enough_was_decoded() -> None:
    """One pass costs more than the budget at the start; plain decoding pays for it."""
    _, chosen = simulated(controller(cost=(0.5, 3.0)), 0.99, 3000)
    first = next(i for i, kind in enumerate(chosen) if kind != PLAIN)
    assert 32 < first < 800
    assert mean(rounds_of(chosen[-50:])) > 4


def loss_of_short_requests(cost: Cost, count: int, resumed: bool) -> float:
    """Plain passes that requests of 60 tokens with a useless draft lose, for each token."""
    control, seconds = controller(cost=cost), 0.0
    for request in range(count):
        seconds += 60 / simulated(control, 0.05, 60, request, per_token=0.2)[0]
        learnt, control = control.learnt({}), controller(cost=cost)
        if resumed:
            control.resume(learnt)
    return seconds / (60 * count) - 1


@pytest.mark.parametrize("cost", COSTS[:3], ids=str)
def test_short_requests_share_one_loss_budget(cost: Cost) -> None:
    resumed, fresh = (loss_of_short_requests(cost, 30, resumed) for resumed in (True, False))
    assert resumed <= START_BUDGET / (30 * 60) + REFILL + 1e-9
    assert fresh > 3 * resumed, "a budget for each request is lost each time"


def test_gains_of_earlier_requests_are_not_lost_by_the_next() -> None:
    control = controller()
    simulated(control, 0.95, 600)
    learnt = control.learnt({})
    assert learnt.budget > 20
    after = controller()
    after.resume(learnt)
    assert after._budget == START_BUDGET
    assert simulated(after, 0.0, 256)[0] >= 0.98


def test_a_draft_that_becomes_useful_is_used_by_later_requests() -> None:
    control = controller()
    simulated(control, 0.0, 400)
    assert control.acceptance > 0.5, "drafting pauses, and will be tried with new estimates"
    learnt = control.learnt({})
    assert learnt.estimates.acceptance < 0.5
    for request in range(12):
        control = controller()
        control.resume(learnt)
        speed, _ = simulated(control, 0.95, 100, request)
        learnt = control.learnt({})
    assert learnt.estimates.acceptance > 0.8
    assert speed > 1.8


def test_resumed_estimates_take_precedence_over_a_profiles() -> None:
    """A profile's are those of other requests; later trials begin from them."""
    source = controller()
    source.expect(0.6, 2.0)
    learnt = source.learnt({"plain": 2.0})
    assert learnt == LearntChoice(Learnt(0.6, 2.0, None), START_BUDGET, {"plain": 2.0})
    resumed = controller()
    resumed.resume(learnt)
    resumed.expect(0.9, 3.0)
    assert (resumed.acceptance, resumed.tokens_per_round) == pytest.approx((0.6, 2.0))
    simulated(resumed, 0.0, 1000)
    assert resumed.choose() == PLAIN
    assert resumed.acceptance == pytest.approx(0.9)


def test_learnt_acceptance_of_trees_is_resumed() -> None:
    costs = StageSeconds(1.0, draft=0.05, retrieval=0.2, chain=1.05, tree=1.03)
    source = controller(MIXED, costs)
    for _ in range(20):
        source.observe(PassKind(2, 1), 1, 0, 1, 1)
    resumed = controller(MIXED, costs)
    resumed.resume(source.learnt({}))
    assert resumed.estimates.tree == pytest.approx(source.estimates.tree, abs=0.12)
    assert abs(controller(MIXED, costs).estimates.tree - source.estimates.tree) > 0.1
