"""The choice among shapes of trees, on simulated acceptance and given costs."""

from collections import Counter
from statistics import mean

import pytest

from tests.support.distributions.simulated_trees import SHAPES, Simulation, path_lengths
from triforce_tree.policy.budgets import REFILL, START_BUDGET, TRIALS
from triforce_tree.policy.estimates import ByRank, TreeAcceptance, accepted_tokens

SURE: ByRank = ((0.9, 0.03, 0.01),)
USUAL: ByRank = ((0.6, 0.12, 0.06, 0.04, 0.02),)
SPREAD: ByRank = ((0.3, 0.2, 0.15, 0.1, 0.08, 0.05),)
RARE: ByRank = ((0.2, 0.05, 0.02),)
# A GPU, where a tree costs what a token costs; a CPU, where each token has its price; and in between.
FLAT = (0.02, lambda n: 1.05, lambda n: 0.2)
PRICED = (0.06, lambda n: 1 + 0.08 * (n - 1), lambda n: 0.5 + 0.05 * n)
BETWEEN = (0.1, lambda n: 1 + 0.02 * (n - 1), lambda n: 0.3 + 0.01 * n)
MACHINES = {"flat": FLAT, "priced": PRICED, "between": BETWEEN}
TEXTS = {"sure": SURE, "usual": USUAL, "spread": SPREAD, "rare": RARE}


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", TEXTS)
def test_within_two_percent_of_the_best_shape(levels: int, machine: str, text: str) -> None:
    """This holds after some passes. Passes count by what they yield in the mean, so only choices are judged.

    Whether to draft at all is judged in ``test_controller.py``: here plain passes are left out.
    """
    simulation = Simulation(MACHINES[machine], TEXTS[text], levels)
    rates = simulation.rates(TEXTS[text])
    best = max(rates, key=rates.__getitem__)
    if rates[best] < 1.1:
        pytest.skip("nothing is faster than plain decoding")
    late = []
    for seed in range(2):
        _, passes = simulation.run(simulation.policy(), 4000, seed)
        seconds = tokens = 0.0
        for kind, _ in passes[len(passes) // 4 :]:
            if kind.levels > 1:
                took = simulation.costs[kind.shape].of(kind)
                seconds, tokens = seconds + took, tokens + took * rates[tuple(kind)]
        late.append(tokens / seconds)
    assert mean(late) >= (1 - TRIALS - 0.003) * rates[best], (mean(late) / rates[best], best)


def test_levels_and_shapes_are_chosen_together() -> None:
    """The bound is that of levels alone; passes of both kinds and all shapes differ little."""
    for machine, text in ((FLAT, USUAL), (PRICED, SURE), (BETWEEN, SPREAD)):
        simulation = Simulation(machine, text, 0)
        rates = simulation.rates(text)
        speeds = [simulation.run(simulation.policy(), 3000, seed)[0] for seed in range(2)]
        assert mean(speeds) >= 0.94 * max(rates.values())


def test_different_texts_and_machines_have_different_best_shapes() -> None:
    """Else the test above could not fail."""
    best = Counter()
    for machine in MACHINES.values():
        for text in TEXTS.values():
            rates = Simulation(machine, text).rates(text)
            best[max(rates, key=rates.__getitem__)[2:]] += 1
    assert len(best) == 3


@pytest.mark.parametrize("levels", [2, 3, 0])
@pytest.mark.parametrize("machine", MACHINES)
def test_no_text_costs_more_than_the_loss_budget(levels: int, machine: str) -> None:
    never: ByRank = ((0.0,),)
    for acceptance in (never, RARE, lambda made: SURE if made < 60 else never):
        for chain in (0.0, 0.5):
            for tokens in (256,):
                simulation = Simulation(MACHINES[machine], acceptance, levels, chain)
                speed, _ = simulation.run(simulation.policy(), tokens)
                assert 1 / speed - 1 <= START_BUDGET / tokens + REFILL + 1e-9


def test_the_shape_follows_the_text() -> None:
    """First one in which the first guess is right, then one with many candidates."""
    simulation = Simulation(PRICED, lambda made: SURE if made < 4000 else SPREAD)
    _, passes = simulation.run(simulation.policy(), 12_000)
    best = [
        max(range(3), key=lambda n, text=text: simulation.rates(text)[2, 1, n]) for text in (SURE, SPREAD)
    ]
    made, taken = 0, ([], [])
    for kind, tokens in passes:
        made += tokens
        if 2000 < made < 4000 or made > 9000:
            taken[made > 4000].append(kind.shape)
    for n, shapes in zip(best, taken, strict=True):
        assert Counter(shapes).most_common(1)[0][0] == n
    assert best[0] != best[1], "the case is what it says"


def test_a_shape_without_costs_is_not_taken() -> None:
    simulation = Simulation(FLAT, USUAL)
    best = simulation.rates(USUAL)
    assert best[2, 1, 0] > best[2, 1, 2]
    for shape in (1, 2):
        _, passes = simulation.run(simulation.policy(without=[shape]), 1000)
        assert shape not in {kind.shape for kind, _ in passes}


def test_acceptance_by_depth_and_rank_is_found() -> None:
    truth: ByRank = ((0.6, 0.1, 0.05), (0.8, 0.05, 0.02), (0.4, 0.3, 0.1))
    simulation = Simulation(FLAT, truth, shapes=SHAPES[:1])
    counted = Simulation(FLAT, truth)
    policy = counted.policy()
    counted.run(policy, 8000, 1)
    table = policy.estimates.learnt(True).by_rank
    for at_depth, own in zip(truth, table, strict=True):
        assert own[0] == pytest.approx(at_depth[0], abs=0.12)
    assert table[1][0] > table[0][0] > table[2][0]
    assert simulation.policy().estimates.learnt(True).by_rank == (), "one shape needs none"


def test_expected_tokens_are_those_of_the_distribution() -> None:
    for text in TEXTS.values():
        for shape in SHAPES:
            lengths = path_lengths(shape, text)
            assert sum(lengths) == pytest.approx(1)
            expected = sum(length * chance for length, chance in enumerate(lengths))
            assert accepted_tokens(shape, text) == pytest.approx(expected)


def test_shapes_that_yield_more_than_expected_raise_expectations_of_all() -> None:
    found = TreeAcceptance(SHAPES, USUAL)
    for _ in range(60):
        # Three accepted tokens of each tree, ten times as many as the ranks let expect.
        found.observe(([[10, *[0] * 7]] * 3, [[1, *[0] * 7]] * 3, 1), 2, 0)
    assert found.ratio(2, 0) > found.ratio(3, 1) > 1.2
    assert found.ratio(2, 1) > 1.2
    assert all(found.expected(2, n) <= 4 for n in range(3)), "no more than its depth and one"
    assert found.doubt(2, 0) < found.doubt(2, 1) == found.doubt(3, 0)


def test_equal_observations_give_equal_choices() -> None:
    simulation = Simulation(BETWEEN, USUAL, 0)
    runs = [simulation.run(simulation.policy(), 800, 3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({kind.shape for kind, _ in runs[0][1]}) > 1
