"""Passes chosen while decoding: from the table of costs, measured times, and what earlier requests learnt."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper

from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    draft_of,
    finished,
    model,
    program_of,
    reference,
    references,
    sequences_of,
)
from triforce_tree.decoding import program as programs
from triforce_tree.decoding import stage_progress
from triforce_tree.decoding.choice import chooser, stage_costs
from triforce_tree.decoding.choice.chooser import PassChooser, temperature_class
from triforce_tree.decoding.choice.cost_table import CostTable
from triforce_tree.decoding.choice.stage_costs import settings_of
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.policy import costs
from triforce_tree.policy.costs import PassCosts, StageCosts
from triforce_tree.policy.pass_policy import START_BUDGET
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.runtime import distributed
from triforce_tree.verify.sampling import ProbsFromLogits

plain_observe = PassChooser.observe
SECONDS = {"prepare": 0.0, "draft": 0.1, "retrieval": 0.1, "target": 1.2, "plain": 1.0}


def table_of(draft: float = 0.1, target: float = 1.2) -> StageCosts:
    """Returns stage costs that are the same at every context length."""
    return StageCosts((100,), (StageSeconds(1.0, draft, 0.1, chain=target, tree=target),))


TABLE = table_of()


def set_times(monkeypatch: pytest.MonkeyPatch, **changed: float) -> None:
    """Each stage takes ``SECONDS``, or those given; the host takes the seconds of ``host``."""
    seconds = {"host": 0.0, **SECONDS, **changed}

    def observe(self: PassChooser, kind: PassKind, report: list[list[int]], _: float, resumed: bool) -> None:
        rounds = kind.rounds * (seconds["draft"] + (seconds["retrieval"] if kind.levels == 3 else 0.0))
        taken = seconds["plain"] if kind == PLAIN else rounds + seconds["target"]
        plain_observe(self, kind, report, taken + seconds["host"], resumed)

    monkeypatch.setattr(PassChooser, "observe", observe)


def decoded(
    program: DecodingProgram, repeatable: bool, prompt: int = 0, new: int = 60
) -> tuple[list[PassKind], list[int], DecodingLoop]:
    """The kinds of the passes, the new tokens, and the loop."""
    loop = DecodingLoop.over(program, SAMPLED, 5, repeatable)
    choose, kinds = loop.policy.choose, []

    def recorded(*state: object) -> PassKind:
        kinds.append(choose(*state))
        return kinds[-1]

    loop.policy.choose = recorded
    [tokens] = finished(loop, PROMPTS[prompt : prompt + 1], [new])
    return kinds, tokens, loop


def adaptive(levels: int = 3, **options: object) -> DecodingProgram:
    return program_of(
        model("llama-gqa"), draft_of("llama-gqa"), levels, 1, **{"gamma": 8, "rounds": None, **options}
    )


def expected(program: DecodingProgram, levels: int, to_probs: ProbsFromLogits = SAMPLED) -> float:
    """Returns the tokens of the first kind of drafting pass that the next request expects."""
    options = DecodingLoop.over(program, to_probs, 0).policy.options()
    return next(option.tokens for option in options if option.kind.levels == levels)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known costs, which the clock confirms."""
    monkeypatch.setattr(stage_costs, "stage_costs", lambda *_: TABLE)
    set_times(monkeypatch)


@pytest.mark.parametrize("levels", [2, 3])
def test_a_seed_chooses_by_the_table_alone(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = adaptive(levels)
    # Costs at which the two levels draft at first and then pause.
    draft = 0.1 if levels == 3 else 0.7
    monkeypatch.setattr(stage_costs, "stage_costs", lambda *_: table_of(draft))
    seen = []
    for measured, repeatable in ((draft, True), (draft, False), (20.0, True), (20.0, False)):
        set_times(monkeypatch, draft=measured)
        seen.append(decoded(program, repeatable, new=120)[:2])
    assert len(set(seen[0][0])) > 1
    assert seen[0] == seen[2], "with a seed measured times do not count"
    drafted = [sum(kind.rounds for kind in kinds) for kinds, _ in seen]
    assert drafted[3] < drafted[2], "without one they do"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("levels", [2, 3])
def test_a_request_starts_from_what_the_last_one_learnt(levels: int) -> None:
    program = adaptive(levels)
    fresh = expected(program, levels)
    left = decoded(program, repeatable=False)[2].policy.learnt.budget
    second = DecodingLoop.over(program, SAMPLED, 0).policy
    assert second.learnt.budget == min(left, START_BUDGET)
    assert expected(program, levels) != fresh
    # Greedy decoding accepts other tokens, and each pass of another refresh costs something else.
    assert expected(program, levels, GREEDY) == fresh
    program.config = replace(program.config, retrieval=replace(program.config.retrieval, refresh=3))
    assert expected(program, levels) == fresh


@pytest.mark.usefixtures("table")
def test_a_seeded_request_is_independent_of_earlier_ones() -> None:
    program = adaptive()
    before = decoded(program, repeatable=True)[:2]
    assert not program.learnt, "nor does it leave anything to later ones"
    for prompt in (0, 1, 2):
        decoded(program, repeatable=False, prompt=prompt)
    fresh, learnt = (DecodingLoop.over(program, SAMPLED, 0, repeatable) for repeatable in (True, False))
    assert fresh.policy.options()[1].tokens != learnt.policy.options()[1].tokens
    assert decoded(program, repeatable=True)[:2] == before


@pytest.mark.usefixtures("table")
def test_the_controller_knows_what_remains() -> None:
    """The most that a running sequence may still get; nothing is drafted for the last token."""
    program = program_of(model("llama-gqa"), model("llama-gqa"), 2, 3, rounds=None)
    loop, seen = DecodingLoop.over(program, GREEDY, 0), []
    choose = loop.policy.choose

    def recorded(remaining: float, *state: object) -> PassKind:
        seen.append((remaining, choose(remaining, *state)))
        return seen[-1][1]

    loop.policy.choose = recorded
    sequences, left = sequences_of(PROMPTS, NEW), []
    loop.begin(sequences)
    while loop.running:
        left.append(max(count - len(own.new) for count, own in zip(NEW, sequences, strict=True)))
        loop.step()
    assert [remaining for remaining, _ in seen] == left
    assert left[0] == max(NEW)
    assert all(kind == PLAIN for remaining, kind in seen if remaining == 1)
    assert any(kind != PLAIN for _, kind in seen)


@pytest.mark.usefixtures("table")
def test_an_interrupted_request_leaves_what_it_learnt() -> None:
    program = adaptive()
    loop = DecodingLoop.over(program, SAMPLED, 0)
    loop.begin(sequences_of(PROMPTS[:1], [60]))
    for _ in range(3):
        loop.step()
    loop.close()
    assert loop.policy.learnt in program.learnt.values()


def test_measured_costs_follow_the_context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time measured at one length corrects the table's costs at all others, also in later requests."""
    costs = StageCosts((50, 150), (StageSeconds(0.8, 0.2, tree=1.0), StageSeconds(2.4, 0.2, tree=3.0)))
    monkeypatch.setattr(stage_costs, "stage_costs", lambda *_: costs)
    # A draft that is always accepted: after the first passes no pass is a plain one.
    program = program_of(model("llama-gqa"), model("llama-gqa"), 2, window=200, rounds=None)
    set_times(monkeypatch, draft=0.2, target=1.6 * costs.at(110).tree, plain=costs.at(110).plain)
    kinds, _, loop = decoded(program, repeatable=False, prompt=2, new=40)
    assert set(kinds[3:-3]) == {PassKind(2, 1)}, "the last tokens take no draft"
    assert loop.policy.costs.of(PassKind(2, 1)) > 1.3 * costs.at(110).of(PassKind(2, 1))
    later = DecodingLoop.over(program, SAMPLED, 0)
    later.begin(sequences_of([PROMPTS[0][:20]], [4]))
    later.step()
    assert later.policy.costs.of(PassKind(2, 1)) > 1.2 * costs.at(20).of(PassKind(2, 1))


class Message:
    """What rank 0 sends: twice the time of this rank, which is there only once it was waited for."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        self.tensor *= 2


def test_ranks_learn_the_times_of_rank_0_one_pass_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message for every pass would be wasted with fixed rounds, one level, or a seed."""
    monkeypatch.setattr(stage_costs, "stage_costs", lambda *_: TABLE)
    sent: list[Message] = []
    learnt: list[float] = []

    def begin(tensor: Tensor) -> Message:
        assert len(learnt) == len(sent), "the message before it has arrived"
        sent.append(Message(tensor))
        return sent[-1]

    program = adaptive()
    loops = {}
    for own, repeatable in ((adaptive(), True), (adaptive(rounds=2), False), (adaptive(1), False)):
        loops[own] = DecodingLoop.over(own, SAMPLED, 5, repeatable)
    loop = DecodingLoop.over(program, SAMPLED, 5)
    monkeypatch.setattr(
        PassCosts, "learn", lambda self, kind, filled, resumed, seconds: learnt.append(seconds)
    )
    monkeypatch.setattr(distributed, "begin_broadcast", begin)
    monkeypatch.setattr(distributed, "current", lambda: object())
    row = [2, 3, 2, 0, 1, 1]
    for other in loops.values():
        other.chooser.observe(PLAIN, [[1, 0, 0, 0, 1]], 1.0, False)
    assert not sent
    assert not learnt
    for seconds in (1.0, 2.0, 3.0):
        loop.chooser.observe(PassKind(3, 1), [row], seconds, False)
    assert learnt == [2.0, 4.0]
    loop.close()
    assert learnt == [2.0, 4.0, 6.0]
    loop.close()
    assert len(learnt) == 3


@pytest.mark.usefixtures("table")
def test_the_hosts_time_counts_without_a_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the time of a pass, and the next request goes on with it."""
    fast = decoded(adaptive(2), repeatable=True)[:2]
    program = adaptive(2)
    with monkeypatch.context() as patched:
        set_times(patched, host=50.0)
        slow = {repeatable: decoded(program, repeatable) for repeatable in (True, False)}
    assert slow[True][:2] == fast, "with a seed the choices do not depend on measured times"
    later = {repeatable: DecodingLoop.over(program, SAMPLED, 0, repeatable) for repeatable in (True, False)}
    for found in (slow, {repeatable: (own,) for repeatable, own in later.items()}):
        with_seed, without = (found[repeatable][-1].policy.costs for repeatable in (True, False))
        for kind in (PLAIN, PassKind(2, 1)):
            assert with_seed.of(kind) < 2 < 20 < without.of(kind)


def test_two_levels_fall_back_to_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random draft whose trees cost more than a pass."""
    monkeypatch.setattr(stage_costs, "stage_costs", lambda *_: table_of(0.3, 1.3))
    program = program_of(model("llama-gqa"), model("llama"), 2, 3, rounds=None)
    loop = DecodingLoop.over(program, GREEDY, 0, repeatable=True)
    assert finished(loop, PROMPTS, NEW) == references()
    draft, target = loop.levels
    assert 0 < draft.forwards / program.shapes[0].depth < 0.5 * target.forwards


def test_classes_of_temperatures() -> None:
    at = ProbsFromLogits.at
    found = [temperature_class(p) for p in (at(0), at(0.2), at(0.7), at(0.71), at(1.0), ProbsFromLogits())]
    assert found == ["greedy", "low", "low", "high", "high", "high"]
    assert temperature_class(ProbsFromLogits(LogitsProcessorList([TopKLogitsWarper(3)]))) == "high"


# By which plain decoding is the fastest, in seconds that no machine takes.
WRONG = StageCosts((100,), (StageSeconds(50.0, draft=500.0, tree=500.0),))


@pytest.mark.parametrize("repeatable", [True, False])
def test_the_table_is_corrected_by_the_times_of_passes(
    repeatable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a seed too, where nothing else corrects costs."""
    monkeypatch.setattr(costs, "EVIDENCE", 8)
    kept = CostTable(tmp_path / "stage_costs.json")
    for module in (chooser, stage_costs):
        monkeypatch.setattr(module, "user_table", lambda: kept)
    program = adaptive(2)
    program.prepare(GREEDY)
    settings = settings_of(program, GREEDY)
    kept.add(settings, WRONG)
    loop = DecodingLoop.over(program, GREEDY, 0, repeatable)
    finished(loop, PROMPTS[:1], [12])
    assert set(loop.passes) == {PLAIN}
    [seconds] = CostTable(kept.path).find(settings).seconds
    later = DecodingLoop.over(program, GREEDY, 0, repeatable=True).policy.costs
    assert later.of(PLAIN) == seconds.plain, "the next request of the same program uses it"
    assert seconds.plain < 1
    assert seconds.draft < 10, "stages that did not run were measured on the same machine"


def test_first_use_makes_the_stages_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that take seconds to make are made for one shape; those of others come between passes, if they
    pay.
    """
    slow, fast = StageSeconds(1.0, draft=0.2, tree=3.0), StageSeconds(1.0, draft=0.02, tree=1.01)
    table = [StageCosts((1,), (own,)) for own in (slow, fast, fast)]
    monkeypatch.setattr(stage_costs, "by_shape", lambda *_: table)
    monkeypatch.setattr(DecodingProgram, "held_back", lambda _: {1: 1e9, 2: 0.0})
    set_times(monkeypatch, draft=0.2, target=3.0)
    target = model("llama-gqa")
    program = program_of(target, draft_of("llama-gqa"), 2, other_trees=("chain:2", "chain:1"), rounds=None)
    loop = DecodingLoop.over(program, GREEDY, 0)
    assert not [name for name in program.stage_names if "/" in name]
    [new] = finished(loop, PROMPTS[:1], NEW[:1])
    assert new == reference(target, PROMPTS[0], NEW[0])
    made = {name for name in program.stage_names if "/" in name}
    assert made == {"draft/2", "target/2"}, "the other shape would have paid too, but not for its preparation"
    assert {kind.shape for kind in loop.passes} <= {0, 2}


def test_stages_of_matched_tokens_are_made_at_once() -> None:
    options = {"other_trees": ("chain:2", "lookup:4"), "rounds": None}
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, **options)
    program.prepare(GREEDY)
    assert program.held_back() == {}
    program.makes_slowly = True
    assert set(program.held_back()) == {1}


def test_a_shape_that_no_program_has_had_takes_as_long_as_the_first_one_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels are compiled even where those of the first shape come from caches by now."""
    options = {"other_trees": ("chain:2", "chain:1"), "rounds": None}
    monkeypatch.setattr(programs, "_longest", {})
    monkeypatch.setattr(programs, "_made", set())
    target, draft = model("llama-gqa"), draft_of("llama-gqa")

    def program(seconds: float) -> DecodingProgram:
        made = program_of(target, draft, 3, **options)
        made.prepare(GREEDY)
        made.makes_slowly = True
        made.selected.seconds = seconds
        return made

    cold = program(12.0)
    programs._longest[cold.device] = 12.0
    assert cold.held_back() == {1: 6.0, 2: 6.0}
    cold.prepare_shape(2)
    assert cold.held_back() == {1: 6.0}
    assert program(1.0).held_back() == {1: 6.0, 2: 0.5}


def test_long_preparations_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, other_trees=("chain:2",), rounds=None)
    program.prepare(GREEDY)
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(stage_progress.time, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.WARNING):
        program.prepare_shape(1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert lines[0].startswith("preparing stage 1 of 4 (draft/1), 2 s so far: kernels are compiled")
    assert lines[1] == "preparing stage 2 of 4 (retrieval_refresh/1), 4 s so far"
