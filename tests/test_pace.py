"""How much is drafted before level 2 is asked, on made-up times and acceptances."""

import random

import pytest

from triforce_tree.cycle.pace import Pace

DEPTH, REACH = 3, 24


def played(
    pace: Pace,
    acceptance: float,
    passes: int,
    round_seconds: float = 1.0,
    full_seconds: float = 4.0,
    plain_seconds: float = 4.0,
    gathered: float = 2.5,
    seed: int = 0,
) -> list[int]:
    """Rounds of each pass, where level 2 accepts every token of a chain with one probability."""
    rng, chosen = random.Random(seed), []
    for _ in range(passes):
        rounds = pace.rounds()
        chosen.append(rounds)
        if rounds == 0:
            pace.timed({"plain": plain_seconds}, 0)
            continue
        chain = min(REACH, round(rounds * gathered))
        accepted = 0
        while accepted < chain and rng.random() < acceptance:
            accepted += 1
        pace.drafted(rounds, rounds * gathered, accepted, int(accepted < chain))
        pace.timed(
            {"grow": rounds * round_seconds / 2, "middle": rounds * round_seconds / 2, "full": full_seconds},
            rounds,
        )
    return chosen


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("fixed", [0, 1, 5])
def test_fixed_rounds_are_kept(fixed: int) -> None:
    assert set(played(Pace(DEPTH, REACH, fixed), 0.1, 80, round_seconds=50.0)) == {fixed}


def test_the_first_pass_fills_the_chain() -> None:
    """Nothing is measured yet: 2.5 tokens a round until 24 are there."""
    assert Pace(DEPTH, REACH).rounds() == 10
    assert Pace(1, 1).rounds() == 1


def test_higher_acceptance_means_more_rounds() -> None:
    late = [mean(played(Pace(DEPTH, REACH), a, 300)[150:]) for a in (0.6, 0.8, 0.9, 0.98)]
    assert late == sorted(late)
    assert late[0] < 4 < 5 < late[-1]


def test_dearer_rounds_mean_fewer_of_them() -> None:
    late = [mean(played(Pace(DEPTH, REACH), 0.9, 300, round_seconds=s)[150:]) for s in (0.1, 0.5, 1.5)]
    assert late == sorted(late, reverse=True)
    assert late[0] > late[-1] + 1


def test_never_more_rounds_than_the_chain_can_hold() -> None:
    for acceptance in (0.5, 1.0):
        chosen = played(Pace(DEPTH, REACH), acceptance, 200, round_seconds=1e-6)
        assert min(chosen) >= 1
        assert max(chosen) <= 11, "2.5 tokens a round fill 24 places in 10 rounds"


def test_the_best_rate_is_chosen() -> None:
    """Against the rates themselves, after any past."""
    pace = Pace(DEPTH, REACH)
    played(pace, 0.85, 100)
    best = max(range(1, 12), key=pace.rate)
    assert pace.rounds() == best
    a, chain = pace.acceptance, min(REACH, best * pace.gathered)
    tokens = sum(a**n for n in range(int(chain) + 1))
    seconds = best * pace.round_seconds + pace.full_seconds
    assert pace.rate(best) == pytest.approx(tokens / seconds, rel=0.15)


def test_the_running_means_follow_what_happened() -> None:
    pace = Pace(DEPTH, REACH)
    played(pace, 0.7, 400, gathered=1.5)
    assert pace.acceptance == pytest.approx(0.7, abs=0.12)
    assert pace.gathered == pytest.approx(1.5)
    assert pace.round_seconds == pytest.approx(1.0)
    assert pace.full_seconds == pytest.approx(4.0)


def test_drafting_that_does_not_pay_pauses_and_is_tried_again() -> None:
    pace = Pace(DEPTH, REACH)
    chosen = played(pace, 0.2, 400, round_seconds=20.0, gathered=1.1)
    first = chosen.index(0)
    assert 5 < first < 40, "a verdict needs some passes, and not many"
    share = chosen[first:].count(0) / len(chosen[first:])
    assert share > 0.9
    tries = [rounds for rounds in chosen[first:] if rounds]
    assert tries, "it is tried again"
    assert max(tries) <= 2, "and only a little"


def test_drafting_comes_back_when_it_pays_again() -> None:
    pace = Pace(DEPTH, REACH)
    assert 0 in played(pace, 0.2, 200, round_seconds=20.0, gathered=1.1)
    later = played(pace, 0.97, 2000, round_seconds=0.2, gathered=3.5)
    assert 0 not in later[-300:]
    assert mean(later[-300:]) > 2


def test_plain_passes_are_compared_by_their_own_time() -> None:
    """A verification of a whole chain may cost far more than a single row does."""
    pace = Pace(DEPTH, REACH)
    pace.timed({"plain": 0.5}, 0)
    chosen = played(pace, 0.8, 400, full_seconds=40.0, plain_seconds=0.5)
    assert chosen[100:].count(0) > 0.8 * len(chosen[100:])


def test_texts_without_refusals_teach_nothing_wrong() -> None:
    """No token proposed and none accepted: the acceptance stays."""
    pace = Pace(DEPTH, REACH)
    before = pace.acceptance
    pace.drafted(1, 1.0, 0, 0)
    assert pace.acceptance == before
    pace.drafted(1, 1.0, 3, 0)
    assert pace.acceptance > before
