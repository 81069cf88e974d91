"""Tests when drafting pauses and is tried again, within a request and from one to the next."""

from itertools import pairwise
from statistics import mean

import pytest

from tests.support.distributions.simulated_passes import COSTS, MIXED, Cost, policy_of, rounds_of, simulated
from tests.support.distributions.simulated_trees import Simulation
from triforce_tree.policy.budgets import REFILL, START_BUDGET, START_SHARE, LossBudget
from triforce_tree.policy.estimates import ByRank, Learnt
from triforce_tree.policy.pass_policy import LearntChoice
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape


def test_an_unlucky_start_does_not_end_a_draft_that_pays() -> None:
    """Everything is rejected at first; then nearly everything is accepted."""
    for levels in (2, 3, MIXED):
        speed, chosen = simulated(policy_of(levels), lambda made: 0.95 if made > 40 else 0.0, 2000)
        assert PLAIN in chosen
        assert PLAIN not in chosen[-150:-1]
        assert speed > 1.8


def test_drafting_pauses_when_it_no_longer_pays_and_resumes() -> None:
    turns = policy_of(cost=(0.5, 1.2))
    _, chosen = simulated(turns, lambda made: 0.0 if 1000 <= made < 3000 else 0.95, 6000)
    zeros = [i for i, kind in enumerate(chosen) if kind == PLAIN]
    assert len(zeros) > 1800
    assert PLAIN not in chosen[-100:]
    before = chosen[: zeros[0]]
    assert len(before) < 1000


def test_pauses_grow_while_trials_do_not_pay() -> None:
    _, chosen = simulated(policy_of(cost=(1.0, 1.5)), 0.0, 8000)
    drafted = [i for i, kind in enumerate(chosen) if kind != PLAIN]
    pauses = [b - a - 1 for a, b in pairwise(drafted) if b - a > 32]
    assert len(pauses) > 3
    assert pauses[0] >= 64
    assert pauses[-1] > 4 * pauses[0]
    assert max(rounds_of(chosen)) <= 2, "trials are short"


def test_costly_verification_is_tried_once_enough_was_decoded() -> None:
    """One pass costs more than the budget at the start; plain decoding pays for it."""
    _, chosen = simulated(policy_of(cost=(0.5, 3.0)), 0.99, 3000)
    first = next(i for i, kind in enumerate(chosen) if kind != PLAIN)
    assert 32 < first < 800
    assert mean(rounds_of(chosen[-50:])) > 4


def loss_of_short_requests(cost: Cost, count: int, resumed: bool) -> float:
    """Plain passes that requests of 60 tokens with a useless draft lose, for each token."""
    policy, seconds = policy_of(cost=cost), 0.0
    for request in range(count):
        seconds += 60 / simulated(policy, 0.05, 60, request, per_token=0.2)[0]
        policy = policy_of(cost=cost, learnt=policy.learnt() if resumed else None)
    return seconds / (60 * count) - 1


@pytest.mark.parametrize("cost", COSTS[:3], ids=str)
def test_short_requests_share_one_loss_budget(cost: Cost) -> None:
    resumed, fresh = (loss_of_short_requests(cost, 30, resumed) for resumed in (True, False))
    assert resumed <= START_BUDGET / (30 * 60) + REFILL + 1e-9
    assert fresh > 2 * resumed, "a budget for each request is lost each time"


def test_gains_of_earlier_requests_are_not_lost_by_the_next() -> None:
    policy = policy_of()
    simulated(policy, 0.95, 600)
    learnt = policy.learnt()
    assert learnt.budget > 20
    after = policy_of(learnt=learnt)
    assert after.budget.left == START_BUDGET
    assert simulated(after, 0.0, 256)[0] >= 0.98


def test_a_draft_that_becomes_useful_is_used_by_later_requests() -> None:
    policy = policy_of()
    simulated(policy, 0.0, 400)
    assert policy.estimates.chain > 0.5, "drafting pauses, and will be tried with new estimates"
    learnt = policy.learnt()
    assert learnt.estimates.acceptance < 0.5
    for request in range(12):
        policy = policy_of(learnt=learnt)
        speed, _ = simulated(policy, 0.95, 100, request)
        learnt = policy.learnt()
    assert learnt.estimates.acceptance > 0.8
    assert speed > 1.8


def test_learnt_acceptance_of_trees_is_resumed() -> None:
    costs = StageSeconds(1.0, draft=0.05, retrieval=0.2, chain=1.05, tree=1.03)
    source = policy_of(MIXED, costs)
    for _ in range(20):
        source.observe(PassKind(2, 1), 1, 0, 1, 1)
    resumed = policy_of(MIXED, costs, learnt=source.learnt())
    assert resumed.estimates.tree() == pytest.approx(source.estimates.tree(), abs=0.12)
    assert abs(policy_of(MIXED, costs).estimates.tree() - source.estimates.tree()) > 0.1


@pytest.mark.parametrize("levels", [2, 3, MIXED])
@pytest.mark.parametrize("tokens", [12, 40, 96, 160])
def test_short_requests_lose_2_percent_or_one_trial(levels: int, tokens: int) -> None:
    """The cheapest pass where 1.5 % are less than that; with a budget that no request has touched."""
    for acceptance in (0.0, 0.3, 0.6):
        for cost in COSTS:
            policy = policy_of(levels, cost)
            cheapest = policy._worst_loss(policy._cheapest()[1])
            for seed in range(3):
                speed, _ = simulated(policy_of(levels, cost), acceptance, tokens, seed, per_token=0.3)
                most = max(START_SHARE * tokens, cheapest) / tokens + REFILL
                assert 1 / speed - 1 <= most + 1e-9, (acceptance, cost, seed)


SHAPES = [
    device_tree_shape(parse_shape(name)) for name in ("best-first:6,5,4", "best-first:2,2,1", "chain:2")
]
# Two CPU cores: a draft step takes a third of a plain pass, and each verified token has its price.
CPU = (0.32, lambda nodes: 1 + 0.12 * (nodes - 1), lambda nodes: 0.6 + 0.06 * nodes)


@pytest.mark.parametrize(
    "acceptance, drafting, mean_speed",
    [
        (((0.0,),), (4, 20), 0.99),  # nothing is accepted
        (((0.5, 0.13, 0.06),), (4, 40), 0.99),  # a draft that does not pay
        (((0.75, 0.08, 0.02),), (28, 40), 1.08),  # one that does: 1.23 in the end
    ],
)
@pytest.mark.parametrize("tokens", [48, 96])
def test_short_requests_on_a_cpu(
    acceptance: ByRank, drafting: tuple[int, int], mean_speed: float, tokens: int
) -> None:
    """Each is within 2 % of plain decoding, all together nearer, and those that drafts pay for use them."""
    simulation, learnt = Simulation(CPU, acceptance, 2, shapes=SHAPES), None
    speeds, drafted = [], 0
    for seed in range(40):
        policy = simulation.policy(learnt=learnt)
        speed, passes = simulation.run(policy, tokens, seed)
        learnt = policy.learnt()
        speeds.append(speed)
        drafted += any(kind != PLAIN for kind, _ in passes)
    assert min(speeds) >= 0.98
    assert mean(speeds) >= mean_speed
    assert drafting[0] <= drafted <= drafting[1] * tokens / 48


def test_no_trial_that_the_remaining_tokens_cannot_repay() -> None:
    for tokens in (1, 2, 3):
        _, chosen = simulated(policy_of(2, (1.0, 1.5)), 0.95, tokens)
        assert set(chosen) == {PLAIN}
    assert set(simulated(policy_of(2, (0.1, 1.0)), 0.95, 3)[1]) != {PLAIN}
    policy = policy_of()
    simulated(policy, 0.95, 300)
    assert policy.choose(1) == PLAIN, "the last token takes no draft"
    policy.observe(PLAIN)
    assert policy.choose(50) != PLAIN, "where a sequence has joined, drafting goes on"


def test_a_budget_is_withheld_and_kept() -> None:
    budget = LossBudget()
    budget.bound(100)
    assert budget.left == pytest.approx(100 * START_SHARE)
    assert budget.kept == START_BUDGET
    budget.bound(80)
    assert budget.left == pytest.approx(100 * START_SHARE)
    budget.bound(120)
    assert budget.left == pytest.approx(120 * START_SHARE), "sequences have joined"
    assert budget.cover(2.0, least=3.0)
    assert (budget.left, budget.kept) == pytest.approx((2.0, START_BUDGET))
    budget.charge(-2.0)
    assert not budget.cover(0.5, least=0.0), "a request has one trial on credit"
    after = LossBudget(budget.kept)
    after.bound(10)
    assert after.kept == pytest.approx(START_BUDGET - 2)
    assert not after.cover(0.5, least=START_BUDGET)
    spent = LossBudget(-0.5)
    spent.bound(1000)
    assert (spent.left, spent.kept) == (-0.5, -0.5)


def test_what_will_not_pay_is_tried_once_the_budget_is_whole() -> None:
    """Requests of 20 tokens after one that has learnt that hardly anything is accepted."""
    learnt, drafted = LearntChoice(Learnt(0.1, 1.1, 0.1)), list[int]()
    for request in range(60):
        policy = policy_of(2, (1.0, 1.5), learnt=learnt)
        assert all(option.highest_rate < 1 for option in policy.options()[1:])
        whole = learnt.budget + 20 * REFILL >= START_BUDGET - 1e-9
        _, chosen = simulated(policy, 0.0, 20)
        learnt = policy.learnt()
        if any(kind != PLAIN for kind in chosen):
            assert whole
            drafted.append(request)
    assert 2 <= len(drafted) <= 10


def preparing(a_node: float) -> Simulation:
    """The first shape is a wide tree; what each of its nodes costs decides whether a chain is faster."""
    return Simulation((0.02, lambda nodes: 1 + a_node * nodes, lambda nodes: 0.2), ((0.8, 0.02),))


@pytest.mark.parametrize("seconds", [3.0, 40.0])
def test_a_shape_waits_until_it_would_have_saved_its_preparation(seconds: float) -> None:
    simulation = preparing(0.04)
    best, _ = simulation.run(simulation.policy(), 900)
    speed, passes = simulation.run(simulation.policy(held_back={1: seconds, 2: seconds}), 900)
    taken = [n for n, (kind, _) in enumerate(passes) if kind.shape]
    assert taken[0] > 2 * seconds, "passes without it come first"
    # In units of a plain pass: what was missed, and the preparation itself.
    assert 900 / speed + seconds - 900 / best < 2.2 * seconds + 10


def test_a_shape_that_does_not_pay_is_never_prepared() -> None:
    simulation = preparing(0.0)
    _, passes = simulation.run(simulation.policy(held_back={1: 3.0, 2: 3.0}), 2000)
    assert {kind.shape for kind, _ in passes} == {0}


def test_what_was_missed_is_left_to_the_next_request() -> None:
    simulation, learnt, requests = preparing(0.04), None, 0
    for requests in range(40):
        policy = simulation.policy(held_back={1: 12.0, 2: 12.0}, learnt=learnt)
        _, passes = simulation.run(policy, 40, requests)
        learnt = policy.learnt()
        if any(kind.shape for kind, _ in passes):
            break
    assert 2 < requests < 30
