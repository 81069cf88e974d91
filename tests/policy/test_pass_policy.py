"""Which passes are chosen, on simulated acceptance and given costs."""

from collections import Counter
from dataclasses import replace
from statistics import mean

import pytest

from tests.support.distributions.simulated_passes import (
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
from tests.support.distributions.simulated_trees import SHAPES, ByRank, Simulation, path_lengths
from triforce_tree.policy.estimates import accepted_tokens, tokens_of
from triforce_tree.policy.pass_policy import TRIALS, PassLevels, PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds


@pytest.mark.parametrize("fixed", [0, 1, 5])
def test_fixed_rounds_are_kept(fixed: int) -> None:
    for levels, most in ((3, fixed), (2, min(fixed, 1))):
        policy = policy_of(levels, (50.0, 4.0), fixed)
        kinds = {policy.choose(9) for _ in range(3)}
        assert kinds == {PassKind(levels, most) if fixed else PLAIN}
        policy.observe(PLAIN, [(1, 0, 0)])


def test_one_level_never_drafts() -> None:
    for fixed in (None, 5):
        alone = PassPolicy(PassLevels(1, [], 0), None, fixed)
        assert alone.choose() == PLAIN
        alone.observe(PLAIN, [(1, 0, 0)])
        assert alone.choose() == PLAIN


def test_missing_costs_are_reported_where_they_are_needed() -> None:
    with pytest.raises(ValueError, match=r"costs=None.*give costs, or fix the rounds"):
        PassPolicy(PassLevels(3, [shape_of("chain:3")], MOST)).choose()


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


# The text changes


def test_an_unlucky_start_does_not_end_a_draft_that_pays() -> None:
    """Everything is rejected at first; then nearly everything is accepted."""
    for levels in (2, 3, MIXED):
        speed, chosen = simulated(policy_of(levels), lambda made: 0.95 if made > 40 else 0.0, 2000)
        assert PLAIN in chosen
        assert chosen[-150:-1].count(PLAIN) <= 2
        assert speed > 1.8


def test_drafting_pauses_when_it_no_longer_pays_and_resumes() -> None:
    turns = policy_of(cost=(0.5, 1.2))
    _, chosen = simulated(turns, lambda made: 0.0 if 1000 <= made < 3000 else 0.95, 6000)
    zeros = [i for i, kind in enumerate(chosen) if kind == PLAIN]
    assert len(zeros) > 1800
    assert chosen[-100:].count(PLAIN) <= 2
    assert len(chosen[: zeros[0]]) < 1000


def test_costly_verification_is_tried_once_enough_was_decoded() -> None:
    """One pass costs more than the budget at the start; plain decoding pays for it."""
    _, chosen = simulated(policy_of(cost=(0.5, 3.0)), 0.99, 3000)
    first = next(i for i, kind in enumerate(chosen) if kind != PLAIN)
    assert 0 < first < 800
    assert mean(rounds_of(chosen[-50:])) > 4


def test_higher_acceptance_means_more_rounds() -> None:
    late = [mean(rounds_of(simulated(policy_of(), a, 1500)[1])[-60:]) for a in (0.6, 0.8, 0.9, 0.98)]
    assert late == sorted(late)
    assert late[0] < 4 < 5 < late[-1]
    cost = StageSeconds(1.0, draft=0.1, retrieval=0.4, chain=5.0, root=1.0)
    short, long = (
        mean(rounds_of(simulated(policy_of(3, each), 0.8, 800)[1])[-40:])
        for each in (cost, replace(cost, chain=1.0))
    )
    assert short < long, "each verified token has its price"


def test_a_request_begins_with_what_the_last_one_learnt() -> None:
    first = {}
    for acceptance in (0.3, 0.97):
        source = policy_of()
        simulated(source, acceptance, 600)
        first[acceptance] = policy_of(learnt=source.learnt).choose().rounds
    assert first[0.3] < first[0.97]


def test_a_draft_that_becomes_useful_is_used_by_later_requests() -> None:
    policy = policy_of()
    simulated(policy, 0.0, 400)
    for request in range(12):
        policy = policy_of(learnt=policy.learnt)
        speed, _ = simulated(policy, 0.95, 100, request)
    assert speed > 1.8


def test_a_batch_counts_per_sequence() -> None:
    one, many = policy_of(), policy_of()
    for accepted in (5, 0, 3, 7, 2):
        one.observe(PassKind(3, 3), [(1 + accepted, 8, 8)])
        many.observe(PassKind(3, 3), [(1 + accepted, 8, 8), (0, 0, 0)] * 4)
    for alone, batch in zip(one.options(), many.options(), strict=False):
        assert batch.tokens == pytest.approx(alone.tokens, rel=0.06)
    assert many.learnt.budget == pytest.approx(one.learnt.budget)


def test_trees_behind_chains_are_expected_where_the_whole_chain_is_accepted() -> None:
    def options(tail: bool) -> list[float]:
        passes = PassLevels(3, [shape_of("chain:3")], MOST, tail=tail)
        policy = PassPolicy(passes, policy_of().costs)
        for _ in range(20):
            # A chain of two tokens, and three more of the tree at its end.
            policy.observe(PassKind(3, 1), [(6 if tail else 3, 5, 2)])
        return [option.tokens for option in policy.options()[1:]]

    alone, with_trees = options(False), options(True)
    assert with_trees[0] > alone[0] + 1.5


# Shapes of trees

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
def test_the_shape_is_nearly_the_best_one(levels: int, machine: str, text: str) -> None:
    """After a while; passes count by what they yield in the mean, so that the choices alone are judged."""
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
    assert mean(late) >= (1 - TRIALS - 0.02) * rates[best], (mean(late) / rates[best], best)


def test_levels_and_shapes_are_chosen_together() -> None:
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
        if kind != PLAIN and (2000 < made < 4000 or made > 9000):
            taken[made > 4000].append(kind.shape)
    for n, shapes in zip(best, taken, strict=True):
        assert Counter(shapes).most_common(1)[0][0] == n
    assert best[0] != best[1], "the case is what it says"


def test_a_shape_without_costs_is_not_taken() -> None:
    simulation = Simulation(FLAT, USUAL)
    for shape in (1, 2):
        _, passes = simulation.run(simulation.policy(without=[shape]), 1000)
        assert shape not in {kind.shape for kind, _ in passes}


@pytest.mark.parametrize("first_guess", [0.3, 0.5, 0.8])
def test_expected_tokens_are_those_of_the_distribution(first_guess: float) -> None:
    """At 0.5 the acceptance by rank is the default one."""
    others = [a * (1 - first_guess) / 0.5 for a in (0.13, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)]
    for shape in SHAPES:
        lengths = path_lengths(shape, ((first_guess, *others),))
        expected = sum(length * chance for length, chance in enumerate(lengths))
        assert accepted_tokens(shape, first_guess) == pytest.approx(expected)


# Stages that are not made yet


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
    # In plain passes: what was missed, and the preparation itself. What is missed is only estimated.
    assert 900 / speed + seconds - 900 / best < 3.5 * seconds + 15


def test_a_shape_that_does_not_pay_is_never_prepared() -> None:
    simulation = preparing(0.0)
    _, passes = simulation.run(simulation.policy(held_back={1: 3.0, 2: 3.0}), 2000)
    assert {kind.shape for kind, _ in passes} == {0}


def test_what_was_missed_is_left_to_the_next_request() -> None:
    simulation, learnt, requests = preparing(0.04), None, 0
    for requests in range(40):
        policy = simulation.policy(held_back={1: 12.0, 2: 12.0}, learnt=learnt)
        _, passes = simulation.run(policy, 40, requests)
        learnt = policy.learnt
        if any(kind.shape for kind, _ in passes):
            break
    assert 2 < requests < 39


def test_equal_observations_give_equal_choices() -> None:
    assert simulated(policy_of(MIXED), 0.7, 700, 5) == simulated(policy_of(MIXED), 0.7, 700, 5)
    simulation = Simulation(BETWEEN, USUAL, 0)
    runs = [simulation.run(simulation.policy(), 800, 3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({kind.shape for kind, _ in runs[0][1]}) > 1
