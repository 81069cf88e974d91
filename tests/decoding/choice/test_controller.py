"""Which passes are chosen, on simulated acceptance and given costs."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest

from triforce_tree.decoding.choice.controller import REFILL, START_BUDGET, LearntChoice, PassController
from triforce_tree.decoding.choice.estimates import Learnt, acceptance_of, tokens_of
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
) -> tuple[float, list[PassKind]]:
    """Tokens per plain pass's time, and the kinds of the passes.

    The target accepts every token of a chain with one probability, which may change with the tokens made; the
    retrieval level accepts those of a tree with probability ``per_token``, the target itself with ``tree``,
    which is that of a chain's tokens where it is not given.
    """
    rng, made, time, chosen = random.Random(seed), 0, 0.0, []
    cost, last = control.costs, None
    assert cost is not None
    while made < tokens:
        kind = control.choose()
        chosen.append(kind)
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
    return made / time, chosen


def rounds_of(chosen: list[PassKind]) -> list[int]:
    return [kind.rounds for kind in chosen]


@pytest.mark.parametrize("fixed", [0, 1, 5])
def test_fixed_rounds_are_kept(fixed: int) -> None:
    assert set(rounds_of(simulated(controller(3, (50.0, 4.0), fixed), 0.1, 80)[1])) == {fixed}
    assert set(rounds_of(simulated(controller(2, (50.0, 4.0), fixed), 0.1, 80)[1])) == {min(fixed, 1)}


def test_one_level_never_drafts() -> None:
    alone = PassController(1, 0, 0)
    assert alone.choose() == PLAIN
    alone.observe(PLAIN)
    assert alone.choose() == PLAIN
    assert PassController(1, 0, 0, 5).choose() == PLAIN


def test_missing_costs_are_reported_where_they_are_needed() -> None:
    with pytest.raises(ValueError, match=r"costs=None.*set costs, or fix the rounds"):
        PassController(3, DEPTH, MOST).choose()
    with pytest.raises(ValueError, match=r"plain=0\.0 seconds must be above 0"):
        StageSeconds(0.0)
    with pytest.raises(ValueError, match=r"plain=inf seconds must be finite"):
        StageSeconds(float("inf"))


def test_the_choice_is_that_of_equation_1() -> None:
    control = controller()
    simulated(control, 0.85, 600)
    chosen = control.choose()
    a, rates = control.acceptance, {}
    for option in control.options()[1:]:
        chain = min(MOST, option.kind.rounds * control.tokens_per_round)
        rates[option.kind] = (1 - a ** (chain + 1)) / (1 - a) / (0.25 * option.kind.rounds + 1.0)
        assert option.rate == pytest.approx(rates[option.kind])
    assert chosen == max(rates, key=rates.__getitem__)
    assert chosen.rounds > 1


def test_tokens_of_a_chain_and_the_acceptance_that_yields_them() -> None:
    assert tokens_of(0.5, 2) == pytest.approx(1.75)
    assert tokens_of(1.0, 4) == pytest.approx(5, rel=1e-3)
    for acceptance in (0.1, 0.5, 0.9):
        assert acceptance_of(tokens_of(acceptance, 5), 5) == pytest.approx(acceptance, abs=1e-4)
    assert acceptance_of(0.5, 3) == pytest.approx(0, abs=1e-4)


def test_shorter_chains_cost_less_where_their_verification_does() -> None:
    """As on a CPU: each verified token has its price."""
    cost = StageSeconds(1.0, draft=0.1, retrieval=0.4, chain=5.0, root=1.0)
    assert cost.of(PassKind(3, 2), 0.25) == pytest.approx(1.0 + 2.0)
    assert cost.of(PassKind(3, 2), 2.0) == pytest.approx(1.0 + 5.0), "no chain is longer than the longest"
    assert replace(cost, root=7.0).of(PassKind(3, 1), 0.0) == pytest.approx(0.5 + 5.0)
    short = mean(rounds_of(simulated(controller(3, cost), 0.8, 800)[1])[-40:])
    long = mean(rounds_of(simulated(controller(3, replace(cost, chain=1.0)), 0.8, 800)[1])[-40:])
    assert short < long


def test_higher_acceptance_means_more_rounds() -> None:
    late = [mean(rounds_of(simulated(controller(), a, 1500)[1])[-60:]) for a in (0.6, 0.8, 0.9, 0.98)]
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
    assert few.choose().rounds < many.choose().rounds
    for wrong in ((1.1, 2.0), (0.5, 0.5), (0.5, float("inf"))):
        with pytest.raises(ValueError, match=r"must be within 0 and 1|must be at least 1"):
            few.expect(*wrong)


@pytest.mark.parametrize("levels", [2, 3, MIXED])
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_rejected_drafts_cost_less_than_2_percent(levels: int, cost: Cost) -> None:
    """Of 256 tokens as well, with what the drafter does when it resumes."""
    for prepare in (0.0, 0.5):
        for tokens in (256, 512, 4000):
            control = controller(levels, replace(costs_of(levels, cost), prepare=prepare))
            speed, chosen = simulated(control, 0.0, tokens, per_token=0.2)
            assert speed >= 0.98
            assert 1 / speed - 1 <= START_BUDGET / tokens + REFILL + 1e-9
        if sum(cost) > 1.3:
            assert chosen.count(PLAIN) / len(chosen) > 0.98
            assert sum(kind != PLAIN for kind in chosen[:64]) <= 10, "useless drafts end early"


@pytest.mark.parametrize("levels", [2, 3, MIXED])
def test_no_acceptance_costs_more_than_the_budget(levels: int) -> None:
    """Nor one that deceives: drafts are accepted at first and then rejected, or in turns."""
    turns: list[float | Callable[[int], float]] = [
        0.2, 0.5, 0.8, lambda made: float(made < 40), lambda made: float(made // 8 % 2),
        lambda made: made % 7 / 7,
    ]  # fmt: skip
    for acceptance in turns:
        for cost in COSTS:
            for seed in range(2):
                speed, _ = simulated(controller(levels, cost), acceptance, 256, seed)
                assert 1 / speed - 1 <= START_BUDGET / 256 + REFILL + 1e-9, (cost, seed)
                assert speed >= 0.98


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
    return sum(p * tokens_of(acceptance, n) for n, p in lengths.items())


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
def test_as_fast_as_the_best_fixed_choice(levels: int, cost: Cost, acceptance: float) -> None:
    """Over 2,000 tokens, in the mean of some sequences; passes count by the tokens that their rounds yield in
    the mean, so that only the choices are judged."""
    costs = costs_of(levels, cost)
    kinds = [PLAIN, *(PassKind(levels, rounds) for rounds in range(1, 2 if levels == 2 else MOST + 1))]
    yields = {kind: expected(levels, acceptance, kind.rounds) for kind in kinds}
    best = max(yields[kind] / costs.of(kind) for kind in kinds)
    speeds = []
    for seed in range(6):
        _, chosen = simulated(controller(levels, costs), acceptance, 2000, seed)
        speeds.append(sum(yields[kind] for kind in chosen) / sum(map(costs.of, chosen)))
    # Where a pass costs much, the budget admits few at first.
    share = 0.97 if sum(cost) < 2 else 0.92
    assert mean(speeds) >= share * best, (mean(speeds) / best, best)


@pytest.mark.parametrize(
    "parts, acceptance, per_token, tree, wanted",
    [
        # A long context on a GPU: the target's pass is dear, the other levels are cheap.
        ({"draft": 0.06, "retrieval": 0.17, "chain": 1.03, "tree": 1.03}, 0.95, 0.7, 0.68, 3),
        # A shorter one: the retrieval level costs nearly as much as the target.
        ({"draft": 0.06, "retrieval": 0.8, "chain": 1.05, "tree": 1.03}, 0.95, 0.7, 0.68, 2),
        # The retrieval level is often wrong.
        ({"draft": 0.05, "retrieval": 0.3, "chain": 1.05, "tree": 1.03}, 0.5, 0.7, 0.68, 2),
        # A CPU, where each verified token has its price, and a draft that is rarely right.
        ({"draft": 0.5, "retrieval": 1.5, "chain": 6.0, "root": 1.0, "tree": 3.0}, 0.8, 0.4, 0.4, 1),
        # The draft agrees with the retrieval level more than with the target.
        ({"draft": 0.05, "retrieval": 0.2, "chain": 1.05, "tree": 1.03}, 0.9, 0.8, 0.3, 3),
    ],
)
def test_the_number_of_levels_that_is_fastest(
    parts: dict[str, float], acceptance: float, per_token: float, tree: float, wanted: int
) -> None:
    costs, speeds, counts = StageSeconds(1.0, **parts), [], Counter()
    fixed = {PLAIN: 1.0, PassKind(2, 1): tokens_of(tree, DEPTH) / costs.of(PassKind(2, 1))}
    for rounds in range(1, 12):
        kind, filled = PassKind(3, rounds), rounds * tokens_of(per_token, DEPTH) / MOST
        fixed[kind] = expected(3, acceptance, rounds, per_token) / costs.of(kind, filled)
    best = max(fixed, key=fixed.__getitem__)
    assert best.levels == wanted, "the case is what it says"
    for seed in range(5):
        speed, chosen = simulated(
            controller(MIXED, costs), acceptance, 2500, seed, per_token=per_token, tree=tree
        )
        speeds.append(speed)
        counts.update(kind.levels for kind in chosen[len(chosen) // 4 :])
    assert mean(speeds) >= 0.95 * fixed[best], (mean(speeds), fixed[best], counts)
    assert counts[wanted] >= 0.8 * counts.total(), counts


def test_rounds_tell_about_passes_of_two_levels() -> None:
    """Neither kind has to be tried for what the other has shown."""
    costs = StageSeconds(1.0, draft=0.05, retrieval=0.2, chain=1.05, tree=1.03)
    good, bad = controller(MIXED, costs), controller(MIXED, costs)
    for control, gathered in ((good, 12), (bad, 4)):
        for _ in range(10):
            control.observe(PassKind(3, 3), 1, gathered, gathered, 0)
    assert good.estimates.tree > 0.8 > 0.4 > bad.estimates.tree
    fresh = controller(MIXED, costs).tokens_per_round
    tried = controller(MIXED, costs)
    for _ in range(10):
        tried.observe(PassKind(2, 1), 1, 0, 0, 1)
    assert tried.tokens_per_round < fresh - 0.3


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


def test_a_batch_counts_per_sequence() -> None:
    one, many = controller(), controller()
    for accepted in (5, 0, 3, 7, 2):
        one.observe(PassKind(3, 3), 1, 8, accepted, 1)
        many.observe(PassKind(3, 3), 4, 32, 4 * accepted, 4)
    assert many.tokens_per_round == pytest.approx(one.tokens_per_round)
    assert many.acceptance == pytest.approx(one.acceptance, abs=0.05)
    assert many._budget == pytest.approx(one._budget)


def test_costs_follow_measured_times_and_no_outlier() -> None:
    control = controller(MIXED, StageSeconds(1.0, 0.2, 0.8, chain=4.0, root=2.0, tree=2.0, prepare=1.0))
    for _ in range(40):
        control.refine(PassKind(3, 2), MOST, {"draft": 0.2, "retrieval": 0.8, "target": 3.0, "prepare": 9.0})
        control.refine(PassKind(2, 1), 0, {"draft": 0.1, "target": 4.0, "prepare": 0.5}, resumed=True)
        control.refine(PLAIN, 0, {"target": 0.5})
    cost = control.costs
    assert cost is not None
    assert vars(cost) == pytest.approx(
        {
            "plain": 0.5, "draft": 0.1, "retrieval": 0.4, "chain": 3.0, "root": 1.5, "tree": 4.0,
            "prepare": 0.5,
        },
        rel=0.01,
    )  # fmt: skip
    control.refine(PassKind(3, 2), MOST, {"draft": 1e3, "retrieval": 1e3, "target": 1e3})
    assert control.costs.chain < 1.2 * cost.chain
    bare = PassController(3, DEPTH, MOST, fixed=2)
    bare.refine(PassKind(3, 2), 4, {"target": 1.0})
    assert bare.costs is None


def test_factors_are_of_the_stages_that_there_are() -> None:
    base = StageSeconds(1.0, draft=0.5, tree=2.0)
    measured = StageSeconds(2.0, draft=0.25, tree=2.0)
    assert measured.relative_to(base) == {"plain": 2.0, "draft": 0.5, "tree": 1.0}
    assert StageSeconds(3.0, draft=0.5, tree=4.0).scaled(measured.relative_to(base)) == StageSeconds(
        6.0, draft=0.25, tree=4.0
    )


def test_passes_without_proposed_tokens_leave_the_acceptance() -> None:
    """No token proposed and none accepted: the acceptance stays."""
    control = controller()
    before = control.acceptance
    control.observe(PassKind(3, 1), 1, 1, 0, 0)
    assert control.acceptance == pytest.approx(before)
    control.observe(PassKind(3, 1), 1, 1, 3, 0)
    assert control.acceptance > before


def test_equal_observations_give_equal_choices() -> None:
    for levels in (3, MIXED):
        assert simulated(controller(levels), 0.7, 700, 5) == simulated(controller(levels), 0.7, 700, 5)


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
