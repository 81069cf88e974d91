"""Tests which passes are chosen, on simulated acceptance and given costs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from tests.support.distributions.simulated_passes import (
    COSTS,
    DEPTH,
    MIXED,
    MOST,
    Cost,
    costs_of,
    policy_of,
    rounds_of,
    shape_of,
    simulated,
)
from triforce_tree.policy.budgets import REFILL, START_BUDGET
from triforce_tree.policy.estimates import Learnt, acceptance_of, tokens_of
from triforce_tree.policy.pass_policy import LearntChoice, PassLevels, PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds


@pytest.mark.parametrize("fixed", [0, 1, 5])
def test_fixed_rounds_are_kept(fixed: int) -> None:
    assert set(rounds_of(simulated(policy_of(3, (50.0, 4.0), fixed), 0.1, 80)[1])) == {fixed}
    assert set(rounds_of(simulated(policy_of(2, (50.0, 4.0), fixed), 0.1, 80)[1])) == {min(fixed, 1)}


def test_one_level_never_drafts() -> None:
    for fixed in (None, 5):
        alone = PassPolicy(PassLevels(1, [], 0), None, fixed)
        assert alone.choose() == PLAIN
        alone.observe(PLAIN)
        assert alone.choose() == PLAIN


def test_missing_costs_are_reported_where_they_are_needed() -> None:
    with pytest.raises(ValueError, match=r"costs=None.*give costs, or fix the rounds"):
        PassPolicy(PassLevels(3, [shape_of("chain:3")], MOST)).choose()


def test_the_choice_is_that_of_equation_1() -> None:
    policy = policy_of()
    simulated(policy, 0.85, 600)
    chosen = policy.choose()
    a, rates = policy.estimates.chain, {}
    for option in policy.options()[1:]:
        chain = min(MOST, option.kind.rounds * policy.estimates.per_round())
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
    """Each verified token has its price, as on a CPU."""
    cost = StageSeconds(1.0, draft=0.1, retrieval=0.4, chain=5.0, root=1.0)
    assert cost.of(PassKind(3, 2), 0.25) == pytest.approx(1.0 + 2.0)
    assert cost.of(PassKind(3, 2), 2.0) == pytest.approx(1.0 + 5.0), "no chain is longer than the longest"
    assert replace(cost, root=7.0).of(PassKind(3, 1), 0.0) == pytest.approx(0.5 + 5.0)
    short = mean(rounds_of(simulated(policy_of(3, cost), 0.8, 800)[1])[-40:])
    long = mean(rounds_of(simulated(policy_of(3, replace(cost, chain=1.0)), 0.8, 800)[1])[-40:])
    assert short < long


def test_higher_acceptance_means_more_rounds() -> None:
    late = [mean(rounds_of(simulated(policy_of(), a, 1500)[1])[-60:]) for a in (0.6, 0.8, 0.9, 0.98)]
    assert late == sorted(late)
    assert late[0] < 4 < 5 < late[-1]


def test_estimates_follow_what_happened() -> None:
    policy = policy_of()
    simulated(policy, 0.7, 2000, per_token=0.5)
    assert policy.estimates.chain == pytest.approx(0.7, abs=0.1)
    assert policy.estimates.per_round() == pytest.approx(1 + 0.5 + 0.25 + 0.125, abs=0.2)


def test_learnt_estimates_decide_about_the_first_pass() -> None:
    few, many = (policy_of(learnt=LearntChoice(Learnt(a, 3.0))) for a in (0.6, 0.99))
    assert few.choose().rounds < many.choose().rounds


@pytest.mark.parametrize("levels", [2, 3, MIXED])
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_rejected_drafts_cost_less_than_2_percent(levels: int, cost: Cost) -> None:
    """The bound holds for 256 tokens as well, and includes what the drafter does when it resumes."""
    for prepare in (0.0, 0.5):
        for tokens in (256, 512, 4000):
            policy = policy_of(levels, replace(costs_of(levels, cost), prepare=prepare))
            speed, chosen = simulated(policy, 0.0, tokens, per_token=0.2)
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
                speed, _ = simulated(policy_of(levels, cost), acceptance, 256, seed)
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
        _, chosen = simulated(policy_of(levels, costs), acceptance, 2000, seed)
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
            policy_of(MIXED, costs), acceptance, 2500, seed, per_token=per_token, tree=tree
        )
        speeds.append(speed)
        counts.update(kind.levels for kind in chosen[len(chosen) // 4 :])
    assert mean(speeds) >= 0.95 * fixed[best], (mean(speeds), fixed[best], counts)
    assert counts[wanted] >= 0.8 * counts.total(), counts


def test_rounds_tell_about_passes_of_two_levels() -> None:
    """Neither kind has to be tried for what the other has shown."""
    costs = StageSeconds(1.0, draft=0.05, retrieval=0.2, chain=1.05, tree=1.03)
    good, bad = policy_of(MIXED, costs), policy_of(MIXED, costs)
    for policy, gathered in ((good, 12), (bad, 4)):
        for _ in range(10):
            policy.observe(PassKind(3, 3), 1, gathered, gathered, 0)
    assert good.estimates.tree() > 0.8 > 0.4 > bad.estimates.tree()
    fresh = policy_of(MIXED, costs).estimates.per_round()
    tried = policy_of(MIXED, costs)
    for _ in range(10):
        tried.observe(PassKind(2, 1), 1, 0, 0, 1)
    assert tried.estimates.per_round() < fresh - 0.3


def test_a_batch_counts_per_sequence() -> None:
    one, many = policy_of(), policy_of()
    for accepted in (5, 0, 3, 7, 2):
        one.observe(PassKind(3, 3), 1, 8, accepted, 1)
        many.observe(PassKind(3, 3), 4, 32, 4 * accepted, 4)
    assert many.estimates.per_round() == pytest.approx(one.estimates.per_round())
    assert many.estimates.chain == pytest.approx(one.estimates.chain, abs=0.05)
    assert many.budget.left == pytest.approx(one.budget.left)


MS = StageSeconds(0.3e-3, draft=0.05e-3, retrieval=0.05e-3, chain=0.31e-3, tree=0.31e-3, prepare=0.05e-3)


@pytest.mark.parametrize("levels", [2, 3, MIXED])
def test_the_hosts_time_decides_whether_small_models_draft(levels: int) -> None:
    """Stages of 0.3 ms, and 0.3 ms more on the host in a drafting pass: 0.1 and 0.4 ms."""
    host, late = (0.1e-3, 0.4e-3), {}
    for acceptance in (0.35, 0.95):
        for known in ((0.0, 0.0), host):
            speeds, drafted = [], 0
            for seed in range(4):
                policy = policy_of(levels, MS)
                speed, chosen = simulated(policy, acceptance, 1500, seed, 0.35, host=known)
                speeds.append(speed)
                drafted += sum(kind != PLAIN for kind in chosen[len(chosen) // 4 :])
            late[acceptance, known] = drafted
            if acceptance > 0.9:
                assert min(speeds) > 1.4, "it wins with the host's time too"
            elif known == host:
                assert min(speeds) >= 0.98, "what is lost is charged"
    assert late[0.35, (0.0, 0.0)] > 10 * max(1, late[0.35, host]), "by its stages alone drafting would pay"


def test_the_hosts_time_hardly_matters_to_passes_of_10_ms() -> None:
    policy = policy_of(MIXED, StageSeconds(10e-3, draft=1e-3, retrieval=2e-3, chain=10.5e-3, tree=10.3e-3))
    plain, *before = policy.options()
    for _ in range(4):
        policy.costs.learn_host(PLAIN, 0.1e-3)
        policy.costs.learn_host(PassKind(2, 1), 0.4e-3)
    slower, *after = policy.options()
    assert slower.seconds > plain.seconds
    for one, other in zip(before, after, strict=True):
        assert 0.97 < (other.rate / slower.rate) / (one.rate / plain.rate) < 1.03


def test_passes_without_proposed_tokens_leave_the_acceptance() -> None:
    """No token proposed and none accepted: the acceptance stays."""
    policy = policy_of()
    before = policy.estimates.chain
    policy.observe(PassKind(3, 1), 1, 1, 0, 0)
    assert policy.estimates.chain == pytest.approx(before)
    policy.observe(PassKind(3, 1), 1, 1, 3, 0)
    assert policy.estimates.chain > before


def test_equal_observations_give_equal_choices() -> None:
    for levels in (3, MIXED):
        assert simulated(policy_of(levels), 0.7, 700, 5) == simulated(policy_of(levels), 0.7, 700, 5)
