"""Simulated decoding is never much slower than plain decoding, whatever is accepted and what passes cost."""

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from tests.support.distributions.simulated_passes import COSTS, MIXED, Cost, costs_of, policy_of, simulated
from tests.support.distributions.simulated_trees import ByRank, Simulation
from triforce_tree.policy.pass_policy import CREDIT, REFILL, START_BUDGET, START_SHARE, TRIALS
from triforce_tree.policy.passes import PLAIN, StageSeconds
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

LEVELS = [2, 3, MIXED]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_rejected_drafts_cost_less_than_2_percent(levels: int, cost: Cost) -> None:
    """This holds for requests of 256 tokens too, and where a drafter that resumes has work to do first."""
    for prepare in (0.0, 0.5):
        for tokens in (256, 512, 4000):
            policy = policy_of(levels, replace(costs_of(levels, cost), prepare=prepare))
            speed, chosen = simulated(policy, 0.0, tokens, per_token=0.2)
            assert speed >= 0.98
            assert 1 / speed - 1 <= START_BUDGET / tokens + REFILL + 1e-9
        if sum(cost) > 1.3:
            assert chosen.count(PLAIN) / len(chosen) > 0.95
            assert sum(kind != PLAIN for kind in chosen[:64]) <= 10, "useless drafts end early"


@pytest.mark.parametrize("levels", LEVELS)
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


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("tokens", [12, 40, 96, 160])
def test_short_requests_lose_2_percent_or_one_plain_pass(levels: int, tokens: int) -> None:
    """Not both; with a budget that no request has touched."""
    for acceptance in (0.0, 0.3, 0.6):
        for cost in COSTS:
            for seed in range(3):
                speed, _ = simulated(policy_of(levels, cost), acceptance, tokens, seed, per_token=0.3)
                most = max(START_SHARE * tokens, CREDIT) / tokens + REFILL
                assert 1 / speed - 1 <= most + 1e-9, (acceptance, cost, seed)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
@pytest.mark.parametrize("stage", ["plain", "draft", "tree", "chain", "retrieval"])
def test_wrong_costs_are_noticed(stage: str, wrong: float) -> None:
    """The table is wrong by a factor of 2. Passes are measured, and the loss stays small."""
    parts = {"draft": 0.2, "retrieval": 0.5, "chain": 1.6, "tree": 1.4}
    true = StageSeconds(1.0, **parts)
    table = replace(true, **{stage: wrong * getattr(true, stage)})
    for acceptance in (0.0, 0.3, 0.9):
        policy = policy_of(MIXED, table, follow=True)
        speed, _ = simulated(policy, acceptance, 2000, per_token=acceptance, true=true)
        assert speed >= 0.98, acceptance
        if acceptance > 0.8:
            best, _ = simulated(policy_of(MIXED, true), acceptance, 2000, per_token=acceptance)
            assert speed >= 0.85 * best


@pytest.mark.parametrize("acceptance", [0.8, 0.95])
def test_plain_passes_are_not_measured_where_drafting_is_clearly_faster(acceptance: float) -> None:
    """Each would cost as much as a pass with many tokens, as with a cache in host memory."""
    offloaded = StageSeconds(1.0, draft=0.0006, retrieval=0.008, chain=1.02, tree=1.02)
    speed, chosen = simulated(policy_of(3, offloaded, follow=True), acceptance, 256, per_token=0.8)
    alone, _ = simulated(policy_of(3, offloaded), acceptance, 256, per_token=0.8)
    assert PLAIN not in chosen[:-1], "nothing is drafted for the last token"
    assert speed >= 0.98 * alone > 3


@pytest.mark.parametrize("tree", [0.2, 0.4])
@pytest.mark.parametrize("per_token", [0.5, 0.7])
def test_trials_of_other_levels_cost_their_share_at_most(per_token: float, tree: float) -> None:
    """Passes of two levels look promising as long as none was tried, and yield little."""
    costs = StageSeconds(1.0, draft=0.02, retrieval=0.2, chain=1.3, tree=1.1)

    def speed(levels: int) -> float:
        runs = [simulated(policy_of(levels, costs), 0.9, 4000, seed, per_token, tree) for seed in range(6)]
        return mean(speed for speed, _ in runs)

    _, chosen = simulated(policy_of(MIXED, costs), 0.9, 4000, 0, per_token, tree)
    assert any(kind.levels == 2 for kind in chosen), "else this could not fail"
    assert speed(MIXED) >= (1 - TRIALS) * speed(3)


def loss_of_short_requests(cost: Cost, count: int, resumed: bool) -> float:
    """Returns the plain passes that requests of 60 tokens with a useless draft lose, for each token."""
    policy, seconds = policy_of(cost=cost), 0.0
    for request in range(count):
        seconds += 60 / simulated(policy, 0.05, 60, request, per_token=0.2)[0]
        policy = policy_of(cost=cost, learnt=policy.learnt if resumed else None)
    return seconds / (60 * count) - 1


@pytest.mark.parametrize("cost", COSTS[:3], ids=str)
def test_short_requests_share_one_loss_budget(cost: Cost) -> None:
    resumed, fresh = (loss_of_short_requests(cost, 30, resumed) for resumed in (True, False))
    assert resumed <= START_BUDGET / (30 * 60) + REFILL + 1e-9
    assert fresh >= 1.5 * resumed, "a budget for each request is lost each time"


def test_gains_of_earlier_requests_are_not_lost_by_the_next() -> None:
    policy = policy_of()
    simulated(policy, 0.95, 600)
    assert policy.learnt.budget > 20
    assert simulated(policy_of(learnt=policy.learnt), 0.0, 256)[0] >= 0.98


def test_no_trial_that_the_remaining_tokens_cannot_repay() -> None:
    for tokens in (1, 2, 3):
        _, chosen = simulated(policy_of(2, (1.0, 1.5)), 0.95, tokens)
        assert set(chosen) == {PLAIN}
    assert set(simulated(policy_of(2, (0.1, 1.0)), 0.95, 3)[1]) != {PLAIN}
    policy = policy_of()
    simulated(policy, 0.95, 300)
    assert policy.choose(1) == PLAIN, "the last token takes no draft"


MS = StageSeconds(0.3e-3, draft=0.05e-3, retrieval=0.05e-3, chain=0.31e-3, tree=0.31e-3, prepare=0.05e-3)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("acceptance", [0.35, 0.95])
def test_the_hosts_time_decides_whether_small_models_draft(levels: int, acceptance: float) -> None:
    """Stages of 0.3 ms, and 0.3 ms more on the host in a drafting pass: 0.1 and 0.4 ms."""
    drafted = {}
    for host in ((0.0, 0.0), (0.1e-3, 0.4e-3)):
        drafted[host] = 0
        for seed in range(4):
            policy = policy_of(levels, MS, follow=True)
            speed, chosen = simulated(policy, acceptance, 1500, seed, 0.35, host=host)
            drafted[host] += sum(kind != PLAIN for kind in chosen[len(chosen) // 4 :])
            assert speed >= (1.4 if acceptance > 0.9 else 0.98)
    if acceptance < 0.9:
        assert drafted[0.0, 0.0] > 2 * max(1, drafted[0.1e-3, 0.4e-3]), "by its stages alone it would pay"


SHAPES = [
    device_tree_shape(parse_shape(name)) for name in ("best-first:6,5,4", "best-first:2,2,1", "chain:2")
]
# Two CPU cores: a draft step takes a third of a plain pass, and each verified token has its price.
CPU = (0.32, lambda nodes: 1 + 0.12 * (nodes - 1), lambda nodes: 0.6 + 0.06 * nodes)


@pytest.mark.parametrize(
    "acceptance, mean_speed",
    [
        (((0.0,),), 0.99),  # nothing is accepted
        (((0.5, 0.13, 0.06),), 0.99),  # a draft that does not pay
        (((0.75, 0.08, 0.02),), 1.06),  # one that does: 1.23 in the end
    ],
)
@pytest.mark.parametrize("tokens", [48, 96])
def test_short_requests_on_a_cpu(acceptance: ByRank, mean_speed: float, tokens: int) -> None:
    """Each is within 2 % of plain decoding, all together nearer, and those that drafts pay for use them."""
    simulation, learnt, speeds = Simulation(CPU, acceptance, 2, shapes=SHAPES), None, []
    for seed in range(40):
        policy = simulation.policy(learnt=learnt)
        speeds.append(simulation.run(policy, tokens, seed)[0])
        learnt = policy.learnt
    assert min(speeds) >= 0.98
    assert mean(speeds) >= mean_speed


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("machine", [(0.02, 0.0), (0.06, 0.08), (0.1, 0.02)])
def test_no_text_with_several_trees_costs_more(levels: int, machine: tuple[float, float]) -> None:
    step, node = machine
    never: ByRank = ((0.0,),)
    sure: ByRank = ((0.9, 0.03, 0.01),)
    seconds = (step, lambda n: 1.05 + node * (n - 1), lambda n: 0.3 + node * n)
    for acceptance in (never, ((0.2, 0.05, 0.02),), lambda made: sure if made < 60 else never):
        for chain in (0.0, 0.5):
            simulation = Simulation(seconds, acceptance, levels, chain)
            speed, _ = simulation.run(simulation.policy(), 256)
            assert 1 / speed - 1 <= START_BUDGET / 256 + REFILL + 1e-9
