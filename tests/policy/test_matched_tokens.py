"""Tests when passes verify matched tokens: their acceptance by length of the match, beside other passes'
speed.
"""

import math
import random
from itertools import pairwise

import pytest

from tests.support.distributions.simulated_passes import first_failure, fixed_costs, shape_of
from triforce_tree.policy.matched_tokens import FORCED, LONGEST, Match, MatchedTokens, TextMatches
from triforce_tree.policy.pass_policy import START_BUDGET, START_SHARE, PassLevels, PassPolicy
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


def match(common: int, text: TextMatches | None = None, forced: int = 0) -> Match:
    return Match(0, common, text or TextMatches(), [7] * forced)


def chosen(
    policy: PassPolicy, *common: int | None, remaining: float = math.inf, text: TextMatches | None = None
) -> PassKind | None:
    """The pass with matched tokens that is chosen after matches of these lengths; None for another pass."""
    kind = policy.choose(remaining, [None if n is None else match(n, text) for n in common])
    return kind if policy.matched(kind) else None


def test_a_longer_match_is_expected_to_be_accepted_more_often() -> None:
    estimates = MatchedTokens()
    found = [estimates.after(match(common), LENGTH) for common in (2, 6, 12, 24, 48, 64)]
    assert [len(each) for each in found] == sorted(len(each) for each in found)
    assert [each[-1] for each in found] == sorted(each[-1] for each in found)
    assert len(found[0]) < len(found[-1]) == LENGTH + 1
    assert estimates.after(match(0), LENGTH) == estimates.after(None, LENGTH) == [1.0]
    assert len(estimates.after(match(FORCED, forced=4), LENGTH)) == 5, "no more than the forced tokens"
    # Each accepted token makes the match longer by one, and so the next one likelier.
    tokens = estimates.after(match(8), LONG)
    more = [b - a for a, b in pairwise(tokens)]
    assert more[-1] / more[-2] > more[1] / more[0]


def test_acceptance_is_learnt_by_length_of_the_match() -> None:
    """Ten plain passes show that matches of 7 tokens were wrong, then twenty proposals are right."""
    estimates, text = MatchedTokens(), TextMatches()
    before = estimates.after(match(30, text), LENGTH)
    for _ in range(10):
        text.fresh.append((7, 0, True))
        estimates.learn(text)
    assert estimates.after(match(7, text), LENGTH)[-1] < 1.5
    assert estimates.after(match(30, text), LENGTH) == before
    for _ in range(20):
        text.fresh.append((7, LENGTH, False))
        estimates.learn(text)
    assert estimates.after(match(7, text), LENGTH)[-1] > 6
    assert not text.fresh


def test_each_text_of_a_batch_has_its_own_estimates() -> None:
    """A further text begins with what the others have shown."""
    estimates, right, wrong, fresh = MatchedTokens(), TextMatches(), TextMatches(), TextMatches()
    for _ in range(12):
        right.fresh.append((10, 5, False))
        wrong.fresh.append((10, 0, True))
        estimates.learn(right)
        estimates.learn(wrong)
    good, bad, other = (estimates.after(match(10, text), LENGTH)[-1] for text in (right, wrong, fresh))
    assert good > other > bad
    assert good > 3 * bad


def test_what_a_match_shows_counts_for_the_lengths_that_it_had() -> None:
    """After a match of 6 tokens ten followed: two matches of 6 and 7 tokens were right, and longer ones."""
    estimates, text = MatchedTokens(), TextMatches()
    before = {common: estimates.after(match(common, text), 1)[-1] for common in (3, 6, 8, 16)}
    text.fresh.append((6, 10, True))
    estimates.learn(text)
    after = {common: estimates.after(match(common, text), 1)[-1] for common in before}
    assert after[3] == before[3]
    assert after[6] > before[6]
    assert after[8] > before[8]
    assert after[16] < before[16], "the next token followed a match of 16"


def test_a_long_match_is_verified_and_a_short_one_is_not() -> None:
    policy = policy_of()
    assert chosen(policy, 0) is None
    assert chosen(policy, 30) == MATCHED
    assert policy.proposed == [LENGTH]
    # A tree that is accepted often brings more than a short match.
    policy = policy_of(accepted=3)
    assert chosen(policy, 3) is None
    assert chosen(policy, 30) == MATCHED


def test_long_chains_are_verified_where_their_cost_allows() -> None:
    """A long chain must be expected to repay its cost, and the loss budget must cover its worst case."""
    policy = policy_of(long_cost=2.0)
    assert chosen(policy, 64) == LONGER
    assert policy.proposed == [LONG]
    assert chosen(policy, 8) == MATCHED, "they are expected to end early"
    assert chosen(policy_of(long_cost=4.0), 64) == MATCHED, "a token costs as much as it yields"
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
    policy, text = policy_of(long_cost=2.0), TextMatches()
    assert chosen(policy, 64, text=text) == LONGER
    for _ in range(8):
        kind = chosen(policy, 64, text=text)
        assert kind is not None
        text.fresh.append((64, 4, True))
        policy.observe(kind, [(5, LONG, 0)])
    assert chosen(policy, 64, text=text) == MATCHED


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
    """After long matches."""
    policy = policy_of(cost=2.0)
    policy.choose(96)
    policy.observe(PassKind(2, 1), [(1, 3, 0)])
    policy.learnt.budget = START_BUDGET - START_SHARE * 96
    for _ in range(3):
        if chosen(policy, 30, remaining=96) is not None:
            policy.observe(MATCHED, [(1, LENGTH, 0)])
    assert -1e-9 <= policy.learnt.budget < 1
    assert chosen(policy, 64, remaining=96) is None


def cutting(row: float, levels: int = 2) -> PassPolicy:
    """Suffix matching alone on a CPU, where each verified token costs ``row`` plain passes."""
    shapes = [shape_of(f"lookup:{LENGTH}"), shape_of(f"lookup:{LONG}")]
    seconds = [StageSeconds(1.0, draft=0.01, tree=1 + row * shape.depth) for shape in shapes]
    return PassPolicy(PassLevels(levels, shapes, LONG, cuts=True), fixed_costs(*seconds))


def test_where_each_token_has_its_price_as_many_are_proposed_as_should_pay() -> None:
    counts = []
    for common in (2, 8, 20, LONGEST):
        policy = cutting(0.08)
        counts.append(policy.proposed[0] if chosen(policy, common) == MATCHED else 0)
    assert counts == sorted(counts)
    assert 0 < counts[1] < counts[-1] == LONG
    assert chosen(cutting(0.08), 0) is None
    assert chosen(cutting(0.08), None) is None
    dear = cutting(0.2)
    assert chosen(dear, 20) == MATCHED
    assert dear.proposed[0] < LONG, "of a dearer token fewer pay"
    assert chosen(cutting(0.5), 3) is None
    # The costs are those of the tokens that are verified.
    policy = cutting(0.08)
    chosen(policy, 10)
    before, count = policy.learnt.budget, policy.proposed[0]
    policy.observe(MATCHED, [(1 + count, count, 0)])
    assert policy.learnt.budget == pytest.approx(before + count - 0.01 - 0.08 * count)


def copying(policy: PassPolicy, common: int, accepted: float, tokens: int, row: float) -> tuple[float, int]:
    """Decodes a text of which each token has a match of so many tokens, whose next one is accepted with this
    probability.

    Returns:
        the tokens in the time of a plain pass, and the number of passes.
    """
    rng, text, made, time, passes = random.Random(0), TextMatches(), 0, 0.0, 0
    while made < tokens:
        kind = policy.choose(tokens - made, [match(common, text)])
        proposed = policy.proposed[0] if policy.matched(kind) else 0
        right = first_failure(rng, accepted, proposed + 1)
        text.fresh.append((common, right, right <= proposed))
        count = 1 + min(right, proposed)
        policy.observe(kind, [(count, proposed, 0)])
        time += 1 + row * proposed + 0.01 * (proposed > 0)
        made, passes = made + count, passes + 1
    return min(made, tokens) / time, passes


def test_copies_are_drafted_from_the_first_pass_on() -> None:
    """Within 64 tokens, of which plain decoding makes one a pass."""
    speed, passes = copying(cutting(0.2), LONGEST, 1.0, 64, 0.2)
    assert passes <= 4
    assert speed > 3


@pytest.mark.parametrize("common", [2, 3, 5, 10, LONGEST])
@pytest.mark.parametrize("row", [0.05, 0.2, 0.4])
def test_matches_that_deceive_cost_no_more_than_the_budget(common: int, row: float) -> None:
    policy = cutting(row)
    speed, _ = copying(policy, common, 0.0, 256, row)
    assert 1 / speed - 1 <= START_BUDGET / 256 + 0.01
    if common < 6:
        short, _ = copying(cutting(row), common, 0.0, 64, row)
        assert 1 / short - 1 <= START_SHARE + 0.005, "short matches do not use what later requests have"


def test_plain_passes_show_that_short_matches_are_right() -> None:
    """Where a token is too dear for a match of 3 tokens, until the text has shown that it repeats itself."""
    policy = cutting(0.3)
    assert chosen(policy, 3) is None
    speed, passes = copying(policy, 3, 0.9, 256, 0.3)
    assert passes < 150
    assert speed > 1.3


def test_rounds_of_matched_tokens_are_expected_to_yield_what_the_match_says() -> None:
    """With three levels the tokens of the first round follow the match."""
    shapes, seconds = [shape_of(f"lookup:{LENGTH}")], StageSeconds(1.0, draft=0.01, retrieval=0.2, chain=1.2)

    def expected(common: int) -> float:
        policy = PassPolicy(PassLevels(3, shapes, LENGTH), fixed_costs(seconds))
        policy.choose(matches=[match(common)])
        return next(option for option in policy.options() if option.kind.levels == 3).tokens

    assert expected(0) < expected(8) < expected(64)
