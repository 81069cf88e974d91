"""When passes verify matched tokens: their acceptance by length of the match, beside other passes' speed."""

import pytest

from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.estimates import Learnt
from triforce_tree.decoding.choice.lookup_choice import LookupAcceptance, LookupChoice
from triforce_tree.decoding.choice.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.drafters.with_lookup import Match, WithLookup
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

MATCHED = PassKind(2, 1, 1)
LENGTH = 8


class Matches:
    """A drafter whose matches are given."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.found: list[Match | None] = []
        self.taken: list[int] = []

    def match(self, sequences: object) -> list[Match | None]:
        return self.found

    def take(self, matches: object, counts: list[int]) -> None:
        self.taken = counts


LONG = 31


def choice(cost: float = 1.2, tree: float = 1.5, long_cost: float | None = None) -> LookupChoice:
    """A choice where a pass with matched tokens takes ``cost`` plain passes, one with a tree ``tree``.

    Args:
        long_cost: of one with up to ``LONG`` matched tokens; None for none.
    """
    lengths = (LENGTH,) if long_cost is None else (LENGTH, LONG)
    names = ("chain:3", *(f"lookup:{length}" for length in lengths))
    control = PassController(2, 3, 3, None, False, [device_tree_shape(parse_shape(n)) for n in names])
    control.costs = StageSeconds(1.0, draft=0.1, tree=tree - 0.1)
    every = (cost, *(() if long_cost is None else (long_cost,)))
    control.other_costs = [StageSeconds(1.0, draft=0.01, tree=each - 0.01) for each in every]
    control.expect(0.5, 2.0)
    return LookupChoice(control, Matches(*lengths))


def chosen(made: LookupChoice, *matches: Match | None) -> PassKind | None:
    made._drafter.found = list(matches)
    return made.choose([[]] * len(matches))


def test_a_longer_match_is_expected_to_be_accepted_more_often() -> None:
    acceptance = LookupAcceptance()
    rates = [acceptance.of(Match(9, common)) for common in (6, 12, 24, 48, 64)]
    assert rates == sorted(rates)
    assert acceptance.count(Match(0, 0), LENGTH) == 0
    assert acceptance.count(Match(9, 6), LENGTH) < acceptance.count(Match(9, 64), LENGTH) == LENGTH


def test_acceptance_is_learnt_by_length_of_the_match() -> None:
    acceptance, short, long = LookupAcceptance(), Match(9, 7), Match(9, 30)
    before = acceptance.of(long)
    for _ in range(5):
        acceptance.observe(short, 0, 1)
    assert acceptance.of(short) < 0.3
    assert acceptance.of(long) == before
    for _ in range(20):
        acceptance.observe(short, LENGTH, 0)
    assert acceptance.of(short) > 0.9


def test_a_long_match_is_verified_and_a_short_one_is_not() -> None:
    made = choice()
    assert chosen(made, Match(0, 0)) is None
    assert chosen(made, Match(9, 30)) == MATCHED
    assert made._drafter.taken == [LENGTH]
    # A tree that is accepted often brings more than a short match.
    made._controller.resume(_learnt(0.9))
    assert chosen(made, Match(9, 6)) is None
    assert chosen(made, Match(9, 30)) == MATCHED


def test_long_chains_are_verified_where_their_cost_allows() -> None:
    """As many more tokens as they are expected to yield, and as the budget may lose."""
    made, longer = choice(long_cost=2.0), MATCHED._replace(shape=2)
    assert chosen(made, Match(9, 64)) == longer
    assert made._drafter.taken == [LONG]
    assert made.taken == [(Match(9, 64), LONG)]
    assert chosen(made, Match(9, 12)) == MATCHED, "they are expected to end early"
    assert chosen(choice(long_cost=3.5), Match(9, 64)) == MATCHED, "a token costs as much as it yields"
    # A budget that does not cover the long one's worst case.
    made._controller.budget.left = 0.5
    assert chosen(made, Match(9, 64)) == MATCHED
    made._controller.budget.left = 3.0
    # Near the end both yield as much, and the short one is cheaper.
    made._controller.remaining = 6
    assert chosen(made, Match(9, 64)) == MATCHED
    made._controller.remaining = 60
    made._controller.other_costs = [None, made._controller.other_costs[1]]
    assert chosen(made, Match(9, 64)) == longer
    made._controller.other_costs = [None, None]
    assert chosen(made, Match(9, 64)) is None
    made = choice(long_cost=2.0)
    made._controller.preparation.begin({2: 1e9})
    assert chosen(made, Match(9, 64)) == MATCHED, "the long one's stages are not made"
    assert made._controller.preparation.missed[2] > 0
    assert not any(made._controller.matched(o.kind) for o in made._controller.options())


def test_short_chains_teach_what_long_ones_yield() -> None:
    made = choice(long_cost=2.0)
    assert chosen(made, Match(9, 64)) == MATCHED._replace(shape=2)
    for _ in range(8):
        chosen(made, Match(9, 64))
        made.observe([4])
    assert chosen(made, Match(9, 64)) == MATCHED


def test_passes_that_cost_more_than_the_budget_are_not_made() -> None:
    made = choice(cost=5.0)
    assert chosen(made, Match(9, 64)) is None
    made._controller.budget.left = 5.0
    assert chosen(made, Match(9, 64)) == MATCHED


def test_in_a_batch_sequences_without_a_match_get_one_token() -> None:
    made = choice(cost=2.0)
    assert chosen(made, Match(9, 30)) == MATCHED
    assert chosen(made, *[Match(9, 30)] * 2, None) == MATCHED
    assert made._drafter.taken == [LENGTH, LENGTH, 0]
    assert chosen(made, Match(9, 30), *[Match(0, 0)] * 9) is None


def test_matches_are_verified_while_drafting_pauses() -> None:
    """Rejected trees end in a pause; neither their acceptance nor the pause concerns matched tokens."""
    made = choice()
    control = made._controller
    while (kind := control.choose()) != PLAIN:
        control.observe(kind, 1, 0, 0, 1)
    for _ in range(40):
        control.observe(control.choose())
    tree = control.estimates.tree
    assert control.choose() == PLAIN
    assert chosen(made, Match(9, 30)) == MATCHED
    left = control.budget.left
    control.observe(MATCHED, 1, 0, LENGTH, 0)
    assert control.budget.left == pytest.approx(left + 1 + LENGTH - 1.2)
    assert control.estimates.tree == tree
    made.observe([LENGTH])
    assert control.choose() == PLAIN


def test_given_passes_leave_no_choice() -> None:
    """Also where they are given after the choice was made, as for plain decoding beside it."""
    made = choice()
    assert chosen(made, Match(9, 64)) == MATCHED
    for fixed in (0, 1):
        made._controller.fixed = fixed
        assert chosen(made, Match(9, 64)) is None
    assert LookupChoice.of(made._controller, SuffixMatching(3)) is None
    assert LookupChoice.of(made._controller, WithLookup(SuffixMatching(3), LENGTH)) is not None


def test_a_request_that_lost_with_drafts_may_use_what_later_ones_have() -> None:
    made = choice(cost=2.0)
    control, budget = made._controller, made._controller.budget
    budget.bound(96)
    withheld = budget.kept - budget.left
    budget.charge(-budget.left)
    assert withheld > 1
    assert budget.left == 0
    assert chosen(made, Match(9, 30)) == MATCHED
    for _ in range(3):
        if chosen(made, Match(9, 30)) is not None:
            control.observe(MATCHED, 1, 0, 0, 1)
    assert -1e-9 <= budget.kept < 1
    assert chosen(made, Match(9, 64)) is None


def test_costs_that_are_not_known_leave_no_choice() -> None:
    made = choice()
    made._controller.other_costs = [None]
    assert chosen(made, Match(9, 64)) is None


def _learnt(acceptance: float) -> object:
    control = choice()._controller
    control.estimates.expect(Learnt(acceptance, 3.0, acceptance))
    return control.learnt({})
