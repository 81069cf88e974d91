"""Passes chosen while decoding: from the table of costs, measured times, and what earlier requests learnt."""

import time
from dataclasses import replace

import pytest

from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    draft_of,
    finished,
    model,
    program_of,
    references,
    sequences_of,
)
from triforce_tree.decoding.choice import chooser
from triforce_tree.decoding.choice.budgets.loss_budget import START_BUDGET
from triforce_tree.decoding.choice.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts
from triforce_tree.decoding.choice.times.shared_times import SharedTimes
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.runtime.stage_clock import StageClock

SECONDS = {"prepare": 0.0, "draft": 0.1, "retrieval": 0.1, "target": 1.2, "plain": 1.0}


def table_of(draft: float = 0.1, target: float = 1.2) -> StageCosts:
    """The same at any length."""
    return StageCosts((100,), (StageSeconds(1.0, draft, 0.1, chain=target, tree=target),))


TABLE = table_of()


def set_clock(monkeypatch: pytest.MonkeyPatch, **changed: float) -> None:
    """Each stage takes ``SECONDS``, or those given."""
    taken = SECONDS | changed

    def seconds(self: StageClock) -> dict[str, float]:
        names = [name for name, _ in self._times[1:]]
        found = {name: taken[name] * names.count(name) for name in names}
        return found if "draft" in names else {"target": taken["plain"]}

    monkeypatch.setattr(StageClock, "seconds", seconds)


def decoded(
    program: DecodingProgram, repeatable: bool, prompt: int = 0, new: int = 60
) -> tuple[list[PassKind], list[int], DecodingLoop]:
    """The kinds of the passes, the new tokens, and the loop."""
    loop = DecodingLoop.over(program, SAMPLED, 5, repeatable)
    choose, kinds = loop.controller.choose, []

    def recorded() -> PassKind:
        kinds.append(choose())
        return kinds[-1]

    loop.controller.choose = recorded
    [tokens] = finished(loop, PROMPTS[prompt : prompt + 1], [new])
    return kinds, tokens, loop


def adaptive(levels: int = 3, **options: object) -> DecodingProgram:
    return program_of(
        model("llama-gqa"), draft_of("llama-gqa"), levels, 1, **{"gamma": 8, "rounds": None, **options}
    )


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known costs, which the clock confirms."""
    monkeypatch.setattr(chooser, "stage_costs", lambda *_: TABLE)
    set_clock(monkeypatch)


@pytest.mark.parametrize("levels", [2, 3])
def test_a_seed_chooses_by_the_table_alone(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = adaptive(levels)
    # Costs at which the two levels draft at first and then pause.
    draft = 0.1 if levels == 3 else 0.6
    monkeypatch.setattr(chooser, "stage_costs", lambda *_: table_of(draft))
    seen = []
    for measured, repeatable in ((draft, True), (draft, False), (20.0, True), (20.0, False)):
        set_clock(monkeypatch, draft=measured)
        seen.append(decoded(program, repeatable, new=120)[:2])
    assert len(set(seen[0][0])) > 1
    assert seen[0] == seen[1], "with and without a seed, from equal costs and observations"
    assert seen[0] == seen[2], "with a seed measured times do not count"
    drafted = [sum(kind.rounds for kind in kinds) for kinds, _ in seen]
    assert drafted[3] < drafted[2], "without one they do"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("levels", [2, 3])
def test_a_request_starts_from_what_the_last_one_learnt(levels: int) -> None:
    program = adaptive(levels)
    fresh = DecodingLoop.over(program, SAMPLED, 0).controller
    first = decoded(program, repeatable=False)[2].controller
    assert first.acceptance != fresh.acceptance
    second = DecodingLoop.over(program, SAMPLED, 0).controller
    assert second.acceptance == pytest.approx(first.acceptance)
    # What is inferred from passes of the other number of levels weighs otherwise in the new request.
    left = first.learnt({}).estimates.tokens_per_round
    assert second.estimates._now.tokens_per_round == pytest.approx(left)
    assert second.budget.left == min(first.budget.kept, START_BUDGET)
    # Greedy decoding accepts other tokens, and each pass of another refresh costs something else.
    assert DecodingLoop.over(program, GREEDY, 0).controller.acceptance == fresh.acceptance
    program.config = replace(program.config, retrieval=replace(program.config.retrieval, refresh=3))
    assert DecodingLoop.over(program, SAMPLED, 0).controller.acceptance == fresh.acceptance


@pytest.mark.usefixtures("table")
def test_a_seeded_request_is_independent_of_earlier_ones() -> None:
    program = adaptive()
    before = decoded(program, repeatable=True)[:2]
    assert not program.learnt, "nor does it leave anything to later ones"
    for prompt in (0, 1, 2):
        decoded(program, repeatable=False, prompt=prompt)
    fresh, learnt = (DecodingLoop.over(program, SAMPLED, 0, repeatable) for repeatable in (True, False))
    assert fresh.controller.acceptance != learnt.controller.acceptance
    assert decoded(program, repeatable=True)[:2] == before


@pytest.mark.usefixtures("table")
def test_the_controller_knows_what_remains() -> None:
    """The most that a running sequence may still get; nothing is drafted for the last token."""
    program = program_of(model("llama-gqa"), model("llama-gqa"), 2, 3, rounds=None)
    loop, seen = DecodingLoop.over(program, GREEDY, 0), []
    choose = loop.controller.choose

    def recorded() -> PassKind:
        kind = choose()
        seen.append((loop.controller.remaining, kind))
        return kind

    loop.controller.choose = recorded
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
    with loop:
        for _ in range(3):
            loop.step()
    assert DecodingLoop.over(program, SAMPLED, 0).controller.acceptance == pytest.approx(
        loop.controller.acceptance
    )


def test_measured_costs_follow_the_context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time measured at one length corrects the table's costs at all others, also in later requests."""
    costs = StageCosts((50, 150), (StageSeconds(0.8, 0.2, tree=1.0), StageSeconds(2.4, 0.2, tree=3.0)))
    monkeypatch.setattr(chooser, "stage_costs", lambda *_: costs)
    # A draft that is always accepted: no pass is a plain one.
    program = program_of(model("llama-gqa"), model("llama-gqa"), 2, window=200, rounds=None)
    set_clock(monkeypatch, draft=0.2, target=2 * costs.at(110).tree)
    kinds, _, loop = decoded(program, repeatable=False, prompt=2, new=40)
    assert set(kinds) == {PassKind(2, 1)}
    first = loop.controller.costs
    assert first is not None
    assert first.tree > 1.5 * costs.at(110).tree
    assert costs.at(120).plain <= first.plain < costs.at(130).plain, "the table's, at the length reached"
    later = DecodingLoop.over(program, SAMPLED, 0)
    later.begin(sequences_of([PROMPTS[0][:20]], [4]))
    later.step()
    assert later.controller.costs is not None
    assert later.controller.costs.tree > 1.4 * costs.at(20).tree


def test_ranks_share_times_only_where_draft_lengths_follow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message between ranks for every pass would be wasted with fixed rounds, one level, or a seed."""
    monkeypatch.setattr(chooser, "stage_costs", lambda *_: TABLE)
    sent: list[object] = []
    monkeypatch.setattr(SharedTimes, "share", lambda _, times: sent.append(times) or times)
    for own, repeatable in ((adaptive(), True), (adaptive(rounds=2), False), (adaptive(1), False)):
        assert decoded(own, repeatable)[0]
        assert not sent
    kinds = decoded(adaptive(), repeatable=False)[0]
    assert len(sent) == len(kinds) > 0


@pytest.mark.usefixtures("table")
def test_the_hosts_time_counts_without_a_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the time of a pass beyond its stages', and the next request goes on with it."""
    program, now = adaptive(2), 0.0

    def slow_host() -> float:
        # A pass asks twice.
        nonlocal now
        now += 50.0
        return now

    fast = [decoded(program, repeatable)[:2] for repeatable in (True, False)]
    assert fast[0] == fast[1]
    program = adaptive(2)
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", slow_host)
        slow = {repeatable: decoded(program, repeatable) for repeatable in (True, False)}
    assert slow[True][:2] == fast[0], "with a seed the choices do not depend on wall times"
    host = slow[False][2].controller.host
    assert 0 < host.of(PLAIN) <= host.of(PassKind(2, 1))
    assert slow[True][2].controller.host.of(PassKind(2, 1)) == 0
    later = {repeatable: DecodingLoop.over(program, SAMPLED, 0, repeatable) for repeatable in (True, False)}
    assert later[False].controller.host.of(PassKind(2, 1)) == host.of(PassKind(2, 1))
    assert later[True].controller.host.of(PassKind(2, 1)) == 0


def test_two_levels_fall_back_to_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random draft whose trees cost more than a pass."""
    monkeypatch.setattr(chooser, "stage_costs", lambda *_: table_of(1.0, 1.4))
    program = program_of(model("llama-gqa"), model("llama"), 2, 3, rounds=None)
    loop = DecodingLoop.over(program, GREEDY, 0, repeatable=True)
    assert finished(loop, PROMPTS, NEW) == references()
    draft, target = loop.levels
    assert 0 < draft.forwards / program.drafter.depth < 0.5 * target.forwards
