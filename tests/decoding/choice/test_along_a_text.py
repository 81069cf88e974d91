"""Passes follow a text that grows: three levels come on in its middle, and captures wait until they pay."""

from dataclasses import replace
from typing import NamedTuple

import pytest

import triforce_tree
from triforce_tree import Engine
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.decoding.choice import stage_costs
from triforce_tree.decoding.choice.chooser import PassChooser
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.policy.costs import StageCosts
from triforce_tree.policy.passes import PassKind, StageSeconds

PROMPT, NEW = 400, 320
# At the end of the prompt level 1 costs as much as the target; the target's cost grows with the text.
_FEW = StageSeconds(1.0, draft=0.1, retrieval=1.5, chain=1.2, root=1.2, tree=1.1)
_MANY = StageSeconds(9.0, draft=0.1, retrieval=1.5, chain=9.2, root=9.2, tree=9.1)
COSTS = StageCosts((PROMPT, PROMPT + NEW), (_FEW, _MANY))
# With trees of another shape level 1 costs less, which pays where passes have three levels.
CHEAP = StageCosts(COSTS.lengths, tuple(replace(seconds, retrieval=0.5) for seconds in COSTS.seconds))
HELD = 30.0


class Pass(NamedTuple):
    """A pass, with the length of the text before it, and the shapes whose stages were made for it."""

    length: int
    kind: PassKind
    made: list[int]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """Passes of the next requests, whose stages cost what ``COSTS`` and ``CHEAP`` say."""
    found: list[Pass] = []
    choose, observe, prepare = PassChooser.choose, PassChooser.observe, DecodingProgram.prepare_shape

    def chosen(self: PassChooser, texts: object, longest: int, remaining: int) -> PassKind:
        kind = choose(self, texts, longest, remaining)
        found.append(Pass(longest, kind, []))
        return kind

    def observed(self: PassChooser, kind: PassKind, report: list[list[int]], _: float, resumed: bool) -> None:
        filled = report[0][2] / self._program.max_draft_tokens
        observe(self, kind, report, self._costs.stages(kind.shape).of(kind, filled), resumed)

    def prepared(self: DecodingProgram, number: int) -> None:
        if number not in self.selected.shapes:
            found[-1].made.append(number)
        prepare(self, number)

    monkeypatch.setattr(PassChooser, "choose", chosen)
    monkeypatch.setattr(PassChooser, "observe", observed)
    monkeypatch.setattr(DecodingProgram, "prepare_shape", prepared)
    monkeypatch.setattr(stage_costs, "stage_costs", lambda *_: COSTS)
    monkeypatch.setattr(stage_costs, "by_shape", lambda program, _: [COSTS, CHEAP][: len(program.shapes)])
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    advanced = {"recent": 64, "chunk": 8, "gamma": 12}
    return triforce_tree.load(budget=192, tree="best-first:3,2,1", advanced=advanced)


def decoded(engine: Engine, seed: int | None = None) -> list[int]:
    """Returns the new tokens of a greedy request."""
    prompt = token_ids(engine.tokenizer, pydoc_text()[:4000])[:PROMPT]
    out = engine.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=[], seed=seed)
    return out.sequences[0, PROMPT:].tolist()


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    return decoded(engine.with_options(levels=1))


@pytest.mark.parametrize("seed", [None, 1])
def test_three_levels_come_on_once_they_pay(
    seed: int | None, engine: Engine, plain: list[int], passes: list[Pass]
) -> None:
    assert decoded(engine, seed) == plain
    early, late = ([p.kind.levels for p in passes if a <= p.length < b] for a, b in ((0, 440), (520, 710)))
    assert early.count(3) <= 2, "trials"
    assert late.count(3) >= 0.9 * len(late)
    assert not any(each.made for each in passes), "their stages were made before the prompt was read"


def test_a_pass_waits_for_stages_once_they_would_have_paid(
    engine: Engine, plain: list[int], passes: list[Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of another tree, which take long on a GPU; three levels come on before, and wait for nothing."""
    monkeypatch.setattr(
        DecodingProgram, "held_back", lambda self: {1: HELD} if 1 not in self.selected.shapes else {}
    )
    engine = engine.with_options(advanced={"other_trees": ("best-first:3,2,2",)})
    assert decoded(engine) == plain
    [paid] = [number for number, each in enumerate(passes) if each.made]
    before = [each.kind for each in passes[:paid]]
    assert {kind.shape for kind in before} == {0}
    assert [kind.levels for kind in before].count(3) > 3
    assert passes[paid].kind.shape == 1, "what is announced is made for a pass that takes it, and once"
    [learnt] = engine.last_program.learnt.values()
    most = max(kind.rounds for kind in before)
    assert HELD <= learnt.missed[1] < HELD + most * (COSTS.seconds[0].retrieval - CHEAP.seconds[0].retrieval)
