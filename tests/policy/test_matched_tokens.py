"""Tests when passes verify matched tokens: their acceptance by length of the match, beside other passes'
speed.
"""

import math

import pytest

from tests.support.distributions.simulated_passes import fixed_costs, shape_of
from triforce_tree.policy.estimates import Estimates
from triforce_tree.policy.pass_policy import START_BUDGET, PassLevels, PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds

MATCHED, LONGER = PassKind(2, 1, 1), PassKind(2, 1, 2)
LENGTH, LONG = 8, 31


def policy_of(
    cost: float = 1.2,
    tree: float = 1.5,
    long_cost: float | None = None,
    accepted: int | None = None,
    without: int | None = None,
    **more: object,
) -> PassPolicy:
    """A policy where a pass with matched tokens takes ``cost`` plain passes, one with a tree ``tree``.

    Args:
        long_cost: of a pass with up to ``LONG`` matched tokens; None for none.
        accepted: tokens of each of many trees that were accepted before.
        without: a shape whose costs are not known.
    """
    names = ["chain:3", f"lookup:{LENGTH}", f"lookup:{LONG}"][: 2 + (long_cost is not None)]
    seconds = [StageSeconds(1.0, draft=0.1, tree=tree - 0.1)]
    seconds += [StageSeconds(1.0, draft=0.01, tree=c - 0.01) for c in (cost, long_cost) if c is not None]
    costs = fixed_costs(*(None if n == without else own for n, own in enumerate(seconds)))
    policy = PassPolicy(PassLevels(2, list(map(shape_of, names)), 3), costs, **more)
    for _ in range(0 if accepted is None else 30):
        policy.observe(PassKind(2, 1), [(1 + accepted, 3, 0)])
    policy.learnt.budget = START_BUDGET
    return policy


def chosen(policy: PassPolicy, *common: int | None, remaining: float = math.inf) -> PassKind | None:
    """The pass with matched tokens that is chosen after matches of these lengths; None for another pass."""
    kind = policy.choose(remaining, common)
    return kind if policy.matched(kind) else None


def test_a_longer_match_is_expected_to_be_accepted_more_often() -> None:
    estimates = Estimates([])
    found = [estimates.matched(common, LENGTH) for common in (0, 6, 12, 24, 48, 64)]
    assert found == sorted(found)
    assert found[0] == (0, 1.0)
    assert found[1][0] < found[-1][0] == LENGTH


def test_acceptance_is_learnt_by_length_of_the_match() -> None:
    estimates = Estimates([])
    before = estimates.matched(30, LENGTH)
    for _ in range(5):
        estimates.add_matched(7, LENGTH, 0)
    assert estimates.matched(7, LENGTH)[1] < 1.5
    assert estimates.matched(30, LENGTH) == before
    for _ in range(20):
        estimates.add_matched(7, LENGTH, LENGTH)
    assert estimates.matched(7, LENGTH)[1] > 6


def test_a_long_match_is_verified_and_a_short_one_is_not() -> None:
    policy = policy_of()
    assert chosen(policy, 0) is None
    assert chosen(policy, 30) == MATCHED
    assert policy.proposed == [LENGTH]
    # A tree that is accepted often brings more than a short match.
    policy = policy_of(accepted=3)
    assert chosen(policy, 6) is None
    assert chosen(policy, 30) == MATCHED


def test_long_chains_are_verified_where_their_cost_allows() -> None:
    """A long chain must be expected to repay its cost, and the loss budget must cover its worst case."""
    policy = policy_of(long_cost=2.0)
    assert chosen(policy, 64) == LONGER
    assert policy.proposed == [LONG]
    assert chosen(policy, 12) == MATCHED, "they are expected to end early"
    assert chosen(policy_of(long_cost=3.5), 64) == MATCHED, "a token costs as much as it yields"
    assert chosen(policy, 64, remaining=6) == MATCHED, "both yield as much, and the short one is cheaper"
    policy.learnt.budget = 0.5
    assert chosen(policy, 64) == MATCHED, "the budget does not cover the long one's worst case"
    assert chosen(policy_of(long_cost=2.0, without=1), 64) == LONGER
    policy = policy_of(long_cost=2.0)
    policy.costs.drop_other_shapes()
    assert chosen(policy, 64) is None
    policy = policy_of(long_cost=2.0, held_back={2: 1e9})
    assert chosen(policy, 64) == MATCHED, "the long one's stages are not made"
    assert policy.learnt.missed[2] > 0
    assert not any(policy.matched(option.kind) for option in policy.options())


def test_short_chains_teach_what_long_ones_yield() -> None:
    policy = policy_of(long_cost=2.0)
    assert chosen(policy, 64) == LONGER
    for _ in range(8):
        kind = chosen(policy, 64)
        assert kind is not None
        policy.observe(kind, [(5, LONG, 0)])
    assert chosen(policy, 64) == MATCHED


def test_passes_that_cost_more_than_the_budget_are_not_made() -> None:
    policy = policy_of(cost=5.0)
    assert chosen(policy, 64) is None
    policy.learnt.budget += 2.0
    assert chosen(policy, 64) == MATCHED


def test_in_a_batch_sequences_without_a_match_get_one_token() -> None:
    policy = policy_of(cost=2.0)
    assert chosen(policy, 30) == MATCHED
    assert chosen(policy, 30, 30, None) == MATCHED
    assert policy.proposed == [LENGTH, LENGTH, 0]
    assert chosen(policy, 30, *[0] * 9) is None


def test_matches_are_verified_while_drafting_pauses() -> None:
    """Rejected trees end in a pause; neither their acceptance nor the pause concerns matched tokens."""
    policy = policy_of()
    while (kind := policy.choose()) != PLAIN:
        policy.observe(kind, [(1, 3, 0)])
    policy.learnt.budget = 0.4
    tree = policy.options()[1].tokens
    assert policy.choose() == PLAIN
    assert chosen(policy, 30) == MATCHED
    left = policy.learnt.budget
    policy.observe(MATCHED, [(1 + LENGTH, LENGTH, 0)])
    assert policy.learnt.budget == pytest.approx(left + 1 + LENGTH - 1.2)
    assert policy.options()[1].tokens == pytest.approx(tree, abs=0.1)
    assert policy.choose() == PLAIN


def test_given_passes_leave_no_choice() -> None:
    """They may be given after the choice was made, as for plain decoding beside it."""
    policy = policy_of()
    assert chosen(policy, 64) == MATCHED
    for fixed in (0, 1):
        policy.fixed = fixed
        assert chosen(policy, 64) is None


def test_a_request_that_lost_with_drafts_may_use_what_later_ones_have() -> None:
    policy = policy_of(cost=2.0)
    policy.choose(96)
    policy.observe(PassKind(2, 1), [(1, 3, 0)])
    policy.learnt.budget = START_BUDGET - 1.44  # the share of 96 tokens
    for _ in range(3):
        if chosen(policy, 30, remaining=96) is not None:
            policy.observe(MATCHED, [(1, LENGTH, 0)])
    assert -1e-9 <= policy.learnt.budget < 1
    assert chosen(policy, 64, remaining=96) is None
