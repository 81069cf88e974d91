"""How many rounds of drafting precede a verification, on simulated acceptance and given costs."""

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

import pytest

from triforce_tree.decoding.draft_length import REFILL, START_BUDGET, DraftLengthController, StageSeconds

DEPTH, MOST = 3, 24
# Seconds of a round and of a verification, in units of a plain pass: a fast draft on a GPU, a slow one on a
# CPU, verification that costs as much as many plain passes, and one that costs nothing more.
COSTS = [(0.1, 1.05), (0.3, 1.2), (1.0, 1.5), (1.3, 2.5), (0.3, 3.0), (0.01, 1.0), (3.0, 6.0)]


def controller(
    levels: int = 3, cost: tuple[float, float] = (0.25, 1.0), fixed: int | None = None, most: int = MOST
) -> DraftLengthController:
    made = DraftLengthController(levels, DEPTH, most if levels == 3 else DEPTH, fixed)
    made.costs = StageSeconds(*cost, 1.0)
    return made


def simulated(
    control: DraftLengthController,
    acceptance: float | Callable[[int], float],
    tokens: int,
    seed: int = 0,
    per_token: float = 0.6,
) -> tuple[float, list[int]]:
    """Tokens per plain pass's time, and the rounds of each pass.

    The target accepts every token of a chain with one probability, which may change with the tokens made; the
    retrieval level accepts those of a tree with probability ``per_token``.
    """
    rng, made, time, chosen = random.Random(seed), 0, 0.0, []
    cost = control.costs
    assert cost is not None
    while made < tokens:
        rounds = control.rounds()
        chosen.append(rounds)
        if rounds == 0:
            time, made = time + cost.plain, made + 1
            control.observe(0)
            continue
        gathered = 0
        for _ in range(rounds if control.levels == 3 else 0):
            gathered += 1 + next((n for n in range(DEPTH) if rng.random() >= per_token), DEPTH)
        chain = min(MOST, gathered) if control.levels == 3 else DEPTH
        now = acceptance(made) if callable(acceptance) else acceptance
        accepted = next((n for n in range(chain) if rng.random() >= now), chain)
        control.observe(rounds, 1, gathered, accepted, int(accepted < chain))
        time, made = time + rounds * cost.draft_round + cost.verification, made + 1 + accepted
    return made / time, chosen


@pytest.mark.parametrize("fixed", [0, 1, 5])
def test_fixed_rounds_are_kept(fixed: int) -> None:
    assert set(simulated(controller(3, (50.0, 4.0), fixed), 0.1, 80)[1]) == {fixed}
    assert set(simulated(controller(2, (50.0, 4.0), fixed), 0.1, 80)[1]) == {min(fixed, 1)}


def test_one_level_never_drafts() -> None:
    alone = DraftLengthController(1, 0, 0)
    assert alone.rounds() == 0
    alone.observe(0)
    assert alone.rounds() == 0
    assert DraftLengthController(1, 0, 0, 5).rounds() == 0


def test_missing_costs_are_reported_where_they_are_needed() -> None:
    with pytest.raises(ValueError, match=r"costs=None.*set costs, or fix the rounds"):
        DraftLengthController(3, DEPTH, MOST).rounds()
    with pytest.raises(ValueError, match=r"plain=0\.0 seconds must be above 0"):
        StageSeconds(1.0, 1.0, 0.0)


def test_the_choice_is_that_of_equation_1() -> None:
    control = controller()
    simulated(control, 0.85, 600)
    chosen = control.rounds()
    a, rates = control.acceptance, {}
    for rounds in range(1, 14):
        chain = min(MOST, rounds * control.tokens_per_round)
        rates[rounds] = (1 - a ** (chain + 1)) / (1 - a) / (0.25 * rounds + 1.0)
        assert control.rate(rounds) == pytest.approx(rates[rounds])
    assert chosen == max(rates, key=rates.__getitem__) > 1


def test_higher_acceptance_means_more_rounds() -> None:
    late = [mean(simulated(controller(), a, 1500)[1][-60:]) for a in (0.6, 0.8, 0.9, 0.98)]
    assert late == sorted(late)
    assert late[0] < 4 < 5 < late[-1]


def test_estimates_follow_what_happened() -> None:
    control = controller()
    simulated(control, 0.7, 2000, per_token=0.5)
    assert control.acceptance == pytest.approx(0.7, abs=0.1)
    assert control.tokens_per_round == pytest.approx(1 + 0.5 + 0.25 + 0.125, abs=0.2)


def test_expected_estimates_decide_about_the_first_pass() -> None:
    few, many = controller(), controller()
    few.expect(0.6, 3.0)
    many.expect(0.99, 3.0)
    assert few.rounds() < many.rounds()
    for wrong in ((1.1, 2.0), (0.5, 0.5), (0.5, float("inf"))):
        with pytest.raises(ValueError, match=r"acceptance=.* must be within 0 and 1"):
            few.expect(*wrong)


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_rejected_drafts_cost_less_than_2_percent(levels: int, cost: tuple[float, float]) -> None:
    for tokens in (512, 4000):
        speed, chosen = simulated(controller(levels, cost), 0.0, tokens, per_token=0.2)
        assert speed >= 0.98
        assert 1 / speed - 1 <= START_BUDGET / tokens + REFILL + 1e-9
    if sum(cost) > 1.3:
        assert chosen.count(0) / len(chosen) > 0.99
        assert sum(map(bool, chosen[:64])) <= 10, "useless drafts end early"


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("levels", [2, 3])
def test_no_acceptance_costs_more_than_the_budget(levels: int, acceptance: float) -> None:
    for cost in COSTS:
        for seed in range(3):
            speed, _ = simulated(controller(levels, cost), acceptance, 512, seed)
            assert 1 / speed - 1 <= START_BUDGET / 512 + REFILL + 1e-9, (cost, seed)


def expected(levels: int, acceptance: float, rounds: int, per_token: float = 0.6) -> float:
    """Tokens of a pass in the mean, by the distribution of the chain's length."""
    if rounds == 0:
        return 1.0
    a_round = [(1 - per_token) * per_token**n for n in range(DEPTH)] + [per_token**DEPTH]
    lengths = {0: 1.0} if levels == 3 else {DEPTH: 1.0}
    for _ in range(rounds if levels == 3 else 0):
        longer: dict[int, float] = {}
        for length, chance in lengths.items():
            for n, share in enumerate(a_round):
                now = min(MOST, length + 1 + n)
                longer[now] = longer.get(now, 0.0) + chance * share
        lengths = longer
    return sum(p * (1 - acceptance ** (n + 1)) / (1 - acceptance) for n, p in lengths.items())


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize(
    "cost, acceptance",
    [
        *(((0.1, 1.05), a) for a in (0.3, 0.5, 0.7, 0.8, 0.9, 0.97)),
        *(((0.3, 1.2), a) for a in (0.3, 0.5, 0.7, 0.9)),
        *(((1.0, 1.5), a) for a in (0.3, 0.6, 0.9)),
        *(((1.3, 2.5), a) for a in (0.3, 0.8)),
        ((0.3, 3.0), 0.5),
    ],
    ids=str,
)
def test_as_fast_as_the_best_fixed_choice(levels: int, cost: tuple[float, float], acceptance: float) -> None:
    """Over 2,000 tokens, in the mean of some sequences; passes count by the tokens that their rounds yield in
    the mean, so that only the choices are judged."""

    def seconds(rounds: int) -> float:
        return rounds * cost[0] + cost[1] if rounds else 1.0

    most = 1 if levels == 2 else MOST
    yields = [expected(levels, acceptance, rounds) for rounds in range(most + 1)]
    best = max(tokens / seconds(rounds) for rounds, tokens in enumerate(yields))
    speeds = []
    for seed in range(6):
        _, chosen = simulated(controller(levels, cost), acceptance, 2000, seed)
        speeds.append(sum(yields[r] for r in chosen) / sum(map(seconds, chosen)))
    assert mean(speeds) >= 0.98 * best, (mean(speeds) / best, best)


def test_an_unlucky_start_does_not_end_a_draft_that_pays() -> None:
    """Everything is rejected at first; then nearly everything is accepted."""
    for levels in (2, 3):
        speed, chosen = simulated(controller(levels), lambda made: 0.95 if made > 40 else 0.0, 2000)
        assert 0 in chosen
        assert 0 not in chosen[-150:]
        assert speed > 1.8


def test_drafting_pauses_when_it_no_longer_pays_and_resumes() -> None:
    turns = controller(cost=(0.5, 1.2))
    _, chosen = simulated(turns, lambda made: 0.0 if 1000 <= made < 3000 else 0.95, 6000)
    zeros = [i for i, rounds in enumerate(chosen) if rounds == 0]
    assert len(zeros) > 1800
    assert 0 not in chosen[-100:]
    before = chosen[: zeros[0]]
    assert len(before) < 1000


def test_pauses_grow_while_trials_do_not_pay() -> None:
    _, chosen = simulated(controller(cost=(1.0, 1.5)), 0.0, 6000)
    drafted = [i for i, rounds in enumerate(chosen) if rounds]
    pauses = [b - a - 1 for a, b in pairwise(drafted) if b - a > 32]
    assert len(pauses) > 3
    assert pauses == sorted(pauses)
    assert pauses[0] >= 64
    assert pauses[-1] > 8 * pauses[0]
    assert max(chosen) <= 2, "trials are short"


def test_costly_verification_is_tried_once_enough_was_decoded() -> None:
    """One pass costs more than the budget at the start; plain decoding pays for it."""
    _, chosen = simulated(controller(cost=(0.5, 4.5)), 0.99, 3000)
    first = next(i for i, rounds in enumerate(chosen) if rounds)
    assert 32 < first < 400
    assert mean(chosen[-50:]) > 4


def test_a_batch_counts_per_sequence() -> None:
    one, many = controller(), controller()
    for accepted in (5, 0, 3, 7, 2):
        one.observe(3, 1, 8, accepted, 1)
        many.observe(3, 4, 32, 4 * accepted, 4)
    assert many.tokens_per_round == pytest.approx(one.tokens_per_round)
    assert many.acceptance == pytest.approx(one.acceptance, abs=0.05)
    assert many._budget == pytest.approx(one._budget)


def test_costs_follow_measured_times_and_no_outlier() -> None:
    control = controller(cost=(1.0, 4.0))
    for _ in range(40):
        control.refine(2, 1.0, 3.0)
        control.refine(0, 0.0, 0.5)
    assert control.costs is not None
    assert control.costs.draft_round == pytest.approx(0.5, rel=0.01)
    assert control.costs.verification == pytest.approx(3.0, rel=0.01)
    assert control.costs.plain == pytest.approx(0.5, rel=0.01)
    before = control.costs
    control.refine(2, 1000.0, 1000.0)
    assert control.costs.verification < 1.2 * before.verification
    bare = DraftLengthController(3, DEPTH, MOST, fixed=2)
    bare.refine(2, 1.0, 1.0)
    assert bare.costs is None


def test_passes_without_proposed_tokens_leave_the_acceptance() -> None:
    """No token proposed and none accepted: the acceptance stays."""
    control = controller()
    before = control.acceptance
    control.observe(1, 1, 1, 0, 0)
    assert control.acceptance == pytest.approx(before)
    control.observe(1, 1, 1, 3, 0)
    assert control.acceptance > before


def test_equal_observations_give_equal_choices() -> None:
    assert simulated(controller(), 0.7, 700, 5) == simulated(controller(), 0.7, 700, 5)


def loss_of_short_requests(cost: tuple[float, float], count: int, resumed: bool) -> float:
    """Plain passes that requests of 60 tokens with a useless draft lose, for each token."""
    control, seconds = controller(cost=cost), 0.0
    for request in range(count):
        seconds += 60 / simulated(control, 0.05, 60, request, per_token=0.2)[0]
        learnt, control = control.learnt((1.0, 1.0, 1.0)), controller(cost=cost)
        if resumed:
            control.resume(learnt)
    return seconds / (60 * count) - 1


@pytest.mark.parametrize("cost", COSTS[:5], ids=str)
def test_short_requests_share_one_loss_budget(cost: tuple[float, float]) -> None:
    resumed, fresh = (loss_of_short_requests(cost, 30, resumed) for resumed in (True, False))
    assert resumed <= START_BUDGET / (30 * 60) + REFILL + 1e-9
    assert fresh > 4 * resumed, "a budget for each request is lost each time"


def test_a_draft_that_becomes_useful_is_used_by_later_requests() -> None:
    control = controller()
    simulated(control, 0.0, 400)
    assert control.acceptance > 0.5, "drafting pauses, and will be tried with new estimates"
    learnt = control.learnt((1.0, 1.0, 1.0))
    assert learnt.acceptance < 0.5
    for request in range(10):
        control = controller()
        control.resume(learnt)
        speed, _ = simulated(control, 0.95, 100, request)
        learnt = control.learnt((1.0, 1.0, 1.0))
    assert learnt.acceptance > 0.85
    assert speed > 1.8


def test_resumed_estimates_take_precedence_over_a_profiles() -> None:
    """A profile's are those of other requests; later trials begin from them."""
    source = controller()
    source.expect(0.6, 2.0)
    learnt = source.learnt((1.0, 2.0, 3.0))
    assert learnt.cost_factors == (1.0, 2.0, 3.0)
    resumed = controller()
    resumed.resume(learnt)
    resumed.expect(0.9, 3.0)
    assert (resumed.acceptance, resumed.tokens_per_round) == pytest.approx((0.6, 2.0))
    simulated(resumed, 0.0, 200)
    assert resumed.rounds() == 0
    assert resumed.acceptance == pytest.approx(0.9)
