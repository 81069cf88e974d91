"""Trees of several shapes in one program: exactness, stages made where they are needed, counts by rank."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from zlib import crc32

import pytest
import torch

from tests.support.distributions.enumeration import NOISE
from tests.support.distributions.generation_cases import Case
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
)
from triforce_tree.decoding import program as module
from triforce_tree.decoding.choice import stage_costs
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import DraftStage, Stage
from triforce_tree.policy.costs import StageCosts
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits

OTHERS = ("chain:4", "best-first:5,4,3,2")
KINDS = {
    2: [PassKind(2, 1, 1), PassKind(2, 1), PassKind(2, 1, 2), PLAIN, PassKind(2, 1, 1)],
    3: [PassKind(3, 2, 2), PassKind(2, 1, 1), PassKind(3, 1), PLAIN, PassKind(3, 2, 1), PassKind(2, 1, 2)],
}


def shaped(levels: int, batch: int = 3, family: str = "llama-gqa", **options: object) -> DecodingProgram:
    options = {"rounds": None, "other_trees": OTHERS, **options}
    return program_of(model(family), draft_of(family), levels, batch, **options)


def switched(
    program: DecodingProgram,
    to_probs: ProbsFromLogits = GREEDY,
    seed: int = 0,
    plan: object = None,
    after_stage: Callable[[str], None] | None = None,
) -> tuple[list[list[int]], DecodingLoop]:
    """The new tokens of ``PROMPTS`` where passes of all kinds and shapes take turns, and the loop."""
    prompts = PROMPTS[: program.batch]
    loop = DecodingLoop.over(program, to_probs, seed, repeatable=True)
    kinds = cycle(plan or KINDS[program.levels])
    loop.after_stage = after_stage
    loop.policy.choose = lambda *_: next(kinds)
    return finished(loop, prompts, NEW[: len(prompts)]), loop


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StageCosts((100,), (StageSeconds(1.0, 0.1, 0.1, chain=1.2, tree=1.2),))
    monkeypatch.setattr(stage_costs, "by_shape", lambda program, _: [costs] * len(program.shapes))


@pytest.mark.parametrize(
    ("batch", "slowly", "allowed"),
    [
        (1, False, [True, True, True, True]),
        (2, True, [True, False, False, True]),
        (4, True, [True, False, True, True]),
        (16, True, [True, True, True, True]),
        (17, True, [True, True, True, False]),
        (65, False, [True, True, False, False]),
    ],
)
def test_a_batch_has_the_shapes_that_may_pay(batch: int, slowly: bool, allowed: list[bool]) -> None:
    program = shaped(2, batch, tree="chain:2", other_trees=("lookup:3", "lookup:15", "lookup:31"))
    program.makes_slowly = slowly
    assert [program.allows(number) for number in range(4)] == allowed


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
@pytest.mark.parametrize("levels", [2, 3])
def test_trees_may_change_with_every_pass(levels: int, family: str) -> None:
    program = shaped(levels, family=family)
    new, loop = switched(program)
    assert new == references(family)
    assert {kind.shape for kind in loop.passes} == {0, 1, 2}
    for level in loop.levels:
        assert 0 <= level.accepted <= level.proposed or level.name == "draft"
    drawn = [switched(program, SAMPLED, 4)[0] for _ in range(2)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("levels", [2, 3])
def test_a_tree_beside_others_draws_as_it_does_alone(levels: int) -> None:
    """The deepest tree decides how many tokens the draft feeds again, and buffers; nothing else changes."""
    plan = [PassKind(levels, 1), PLAIN, PassKind(levels, 1)]
    alone, among = (
        switched(shaped(levels, tree="chain:4", other_trees=others), SAMPLED, 7, plan)[0]
        for others in ((), ("best-first:3,2,1",))
    )
    assert alone == among


def test_stages_are_made_where_a_pass_first_takes_them() -> None:
    program = shaped(3)
    program.prepare(GREEDY)
    assert not [name for name in program.stage_names if "/" in name]
    switched(program, plan=[PassKind(3, 1), PassKind(3, 1, 2)])
    own = {"draft/2", "retrieval_refresh/2", "retrieval/2", "target_tree/2"}
    assert {name for name in program.stage_names if "/" in name} == own
    program.prepare(SAMPLED)
    assert not [name for name in program.stage_names if "/" in name], "each kind of sampling has its own"


@pytest.mark.parametrize("levels", [2, 3])
def test_a_capture_between_passes_leaves_no_trace(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs each stage twice before it is captured; the tokens are the same."""
    expected = [switched(shaped(levels), to_probs, 2)[0] for to_probs in (GREEDY, SAMPLED)]
    plain = module.executed_parts

    def warmed(steps: object, device: torch.device, *rest: object) -> list[Callable[[], None]]:
        parts = plain(steps, device)
        for part in 2 * parts if capturing else ():
            part()
        return parts

    capturing: list[bool] = []
    monkeypatch.setattr(module, "executed_parts", warmed)
    program = shaped(levels)
    for to_probs, tokens in zip((GREEDY, SAMPLED), expected, strict=True):
        capturing.clear()
        program.prepare(to_probs)
        capturing.append(True)
        assert switched(program, to_probs, 2)[0] == tokens


def test_stages_made_between_passes_are_not_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages of two further shapes take an hour each."""
    clock, make, hours = time.perf_counter, DecodingProgram._tree_stages, [0]

    def slowly(program: DecodingProgram, to_probs: DeviceProbs, shape: int) -> dict[str, Stage]:
        hours[0] += bool(shape)
        return make(program, to_probs, shape)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * hours[0])
    monkeypatch.setattr(DecodingProgram, "_tree_stages", slowly)
    program = shaped(2)
    _, loop = switched(program)
    assert hours == [2]
    assert program.capture_seconds > 2 * 3600
    assert 0 < loop.decode_seconds < 3600


def test_short_memory_leaves_the_first_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: DecodingProgram, number: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DecodingProgram, "prepare_shape", short)
    new, loop = switched(shaped(2))
    assert new == references()
    assert {kind.shape for kind in loop.passes} == {0}
    assert loop.policy.costs.shapes == [0]


@pytest.mark.parametrize(("levels", "stages"), [(2, 2), (3, 4)])
def test_memory_that_runs_out_in_a_capture_leaves_no_trace(
    levels: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage of a shape, which commits, has run twice before there is no memory to capture it."""
    program, plain, made = shaped(levels), module.executed_parts, [0]
    program.prepare(GREEDY)

    def short(steps: object, device: torch.device, *rest: object) -> list[Callable[[], None]]:
        parts = plain(steps, device)
        for part in 2 * parts:
            part()
        made[0] += 1
        if made[0] % stages == 0:
            raise torch.OutOfMemoryError("no memory")
        return parts

    monkeypatch.setattr(module, "executed_parts", short)
    new, loop = switched(program)
    assert made[0] >= stages
    assert new == references()
    assert {kind.shape for kind in loop.passes} == {0}


LAW = Case(
    2, 2, 4, None,
    {"tree": "chain:1", "other_trees": ("static:0;1;0.0",), "runner_ups": False, "rounds": None},
)  # fmt: skip


@pytest.mark.slow
def test_a_shape_may_depend_on_what_earlier_passes_rejected() -> None:
    """Whichever tokens were proposed, accepted and rejected before: later draws are fresh."""

    def chooses(loop: DecodingLoop) -> Callable[[], PassKind]:
        history: list[object] = []
        observe = loop.policy.observe

        def observed(kind: PassKind, *counts: object) -> None:
            tree = loop.program.stage("draft" if not kind.shape else "draft/1").tree
            history.append((counts, tree.tokens.tolist()))
            observe(kind, *counts)

        loop.policy.observe = observed
        return lambda *_: PassKind(2, 1, crc32(str(history[-1:]).encode()) % 2 if history else 1)

    generations = LAW.generations(batch=1)
    generations.chooser = chooses
    assert LAW.distance(generations) < NOISE


def test_a_shape_that_depends_on_the_draws_of_its_pass_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a chain that is dropped for a tree of another shape where its token is not the first one."""
    case = replace(LAW, tokens=2)
    propose = DraftStage.steps

    def steps(self: DraftStage) -> object:
        [step] = propose(self)

        def redrawn() -> None:
            step.run()
            chosen = self.tree.tokens[:, 1] == 0
            self.tree.tokens[:, 1:] = torch.where(chosen[:, None], self.tree.tokens[:, 1:], -1)

        return [step._replace(run=redrawn)]

    assert case.distance(case.generations()) < NOISE
    monkeypatch.setattr(DraftStage, "steps", steps)
    assert case.distance(case.generations()) > 100 * NOISE


def test_a_drafter_of_one_shape_has_one() -> None:
    program = shaped(2, other_trees=())
    assert len(program.shapes) == 1
    assert len(shaped(2, rounds=1).shapes) == 1, "given rounds are kept"
