"""Drafters of a user's own through ``load``: the target's text, what they are told, and what is refused."""

import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from api_cases import TARGET, characters, text_of
from families import greedy, perturbed, prompt_of, tiny
from own_drafters import FixedSiblings, FixedThenDrawn, OwnDrafter, TableDraws
from torch import Tensor

import triforce_tree
from triforce_tree import Engine
from triforce_tree.drafters.base import TokenTree
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

NEW = 24
PROMPTS = [prompt_of(length) for length in (41, 60, 52)]
SMALL = {"gamma": 3, "budget": 24, "chunk": 4, "recent": 8}
EXPECTED = [greedy(TARGET, prompt, NEW) for prompt in PROMPTS]
WHOLE = {"budget": 256, "chunk": 32, "recent": 64}
levels_2_and_3 = pytest.mark.parametrize("levels", [2, 3])


class Oracle(OwnDrafter):
    """Knows the texts, and notes what it is told."""

    name, deterministic = "oracle", True

    def __init__(self) -> None:
        super().__init__("chain:4", 64)
        self.calls: list[str] = []
        self.prepared: list[tuple[list[list[int] | None], bool]] = []

    def bind(self, state: SequenceState) -> None:
        self.calls.append("bind")

    def start(self, texts: Sequence[Sequence[int]]) -> None:
        self.calls.append("start")
        self.started = [list(text) for text in texts]

    def prepare(self, texts: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.calls.append("prepare")
        self.prepared.append(([None if text is None else list(text) for text in texts], resumed))

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.calls.append("propose")
        tree.tokens.fill_(-1)
        tree.tokens[:, 0] = state.newest
        for b in range(state.batch):
            text, whole = state.text(b), [*PROMPTS[b], *EXPECTED[b]]
            coming = whole[len(text) : len(text) + 4]
            tree.tokens[b, 1 : 1 + len(coming)] = torch.tensor(coming, dtype=torch.int64)


def texts_of(engine: Engine, **options) -> list[list[int]]:
    out = engine.generate(PROMPTS, max_new_tokens=NEW, **options)
    return [row[-NEW:] for row in out.sequences.tolist()]


@levels_2_and_3
@pytest.mark.parametrize("kind", [FixedSiblings, TableDraws, FixedThenDrawn])
@pytest.mark.parametrize("rounds", [1, None])
def test_greedy_batches_are_the_targets(levels: int, kind: type[OwnDrafter], rounds: int | None) -> None:
    engine = triforce_tree.load(
        TARGET, drafter=kind("static:0;1;2;0.0;0.1;1.0", 64), levels=levels, rounds=rounds, **SMALL
    )
    assert texts_of(engine, do_sample=False) == EXPECTED


@levels_2_and_3
@pytest.mark.parametrize("kind", [FixedSiblings, TableDraws])
def test_a_seed_repeats_a_sampled_text(levels: int, kind: type[OwnDrafter]) -> None:
    engine = triforce_tree.load(TARGET, drafter=kind("static:0;1;0.0", 64), levels=levels, **SMALL)
    again, same, other = (texts_of(engine, do_sample=True, top_k=20, seed=seed) for seed in (1, 1, 2))
    assert again == same != other


@levels_2_and_3
def test_right_proposals_are_accepted(levels: int) -> None:
    """And the drafter is told of every committed token, and of texts that have ended."""
    drafter = Oracle()
    engine = triforce_tree.load(
        TARGET, drafter=drafter, levels=levels, rounds=1, **{**SMALL, **WHOLE, "gamma": 5}
    )
    assert texts_of(engine, do_sample=False) == EXPECTED
    assert drafter.calls[:4] == ["bind", "start", "prepare", "propose"]
    assert drafter.started == PROMPTS
    for texts, resumed in drafter.prepared:
        assert not resumed
        for text, prompt, expected in zip(texts, PROMPTS, EXPECTED, strict=True):
            assert text == [*prompt, *expected][: len(text)]
    # Behind each text four tokens and the target's own, or in three levels these five and one more.
    step = 5 if levels == 2 else 6
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.levels[0].name == "oracle"
    assert out.levels[-1].forwards == -(-NEW // step)


def test_texts_that_have_ended_are_none() -> None:
    drafter = Oracle()
    engine = triforce_tree.load(TARGET, drafter=drafter, levels=2, rounds=1)
    stop = EXPECTED[1][0]
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False, eos_token_id=stop)
    assert out.finish_reason[1] == "eos"
    assert drafter.prepared[0][0] == PROMPTS
    assert all(texts[1] is None for texts, _ in drafter.prepared[1:])
    assert len(drafter.prepared) > 1


def test_a_drafter_is_told_when_tokens_came_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the target alone between its own."""
    from triforce_tree.decoding.draft_length import DraftLengthController

    plan = iter([1, 0, 0, 1, 1, 0] * 20)
    monkeypatch.setattr(DraftLengthController, "rounds", lambda self: next(plan))
    drafter = Oracle()
    assert texts_of(triforce_tree.load(TARGET, drafter=drafter, levels=2), do_sample=False) == EXPECTED
    assert [resumed for _, resumed in drafter.prepared[:4]] == [False, True, False, True]


class Features(FixedSiblings):
    """Keeps what it is given before the first proposal of each pass."""

    features = (0, 1)

    def __init__(self) -> None:
        super().__init__("static:0;1;0.0", 64)
        self.seen: list[dict[int, tuple[int, int, dict[int, Tensor]]]] = []

    def start(self, texts: Sequence[Sequence[int]]) -> None:
        self.seen = []
        self.going: list[int] = []

    def prepare(self, texts: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.going = [b for b, text in enumerate(texts) if text is not None]

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        if self.going:
            self.seen.append(
                {
                    b: (
                        int(state.length[b]),
                        int(state.feature_count[b]),
                        {layer: states[b].clone() for layer, states in state.features.items()},
                    )
                    for b in self.going
                }
            )
        self.going = []
        super().propose(state, tree, sampler)


@levels_2_and_3
def test_features_are_the_models_hidden_states(levels: int) -> None:
    """Of the tokens that the last verification accepted, the first of them its root."""
    target = perturbed(tiny("llama-gqa", num_hidden_layers=3), 0.0)
    drafter = Features()
    engine = triforce_tree.load(target, drafter=drafter, levels=levels, rounds=1, **SMALL)
    for _ in range(2):
        # The second text begins without those of the first.
        out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
        width = out.sequences.shape[1] - NEW
        counts = set()
        for b, prompt in enumerate(PROMPTS):
            text = [*prompt, *out.sequences[b, width:].tolist()]
            with torch.no_grad():
                hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
            assert drafter.seen[0][b][1] == 0, "nothing was verified yet"
            for row in drafter.seen[1:]:
                if b not in row:
                    continue
                end, count, states = row[b]
                counts.add(count)
                for layer in drafter.features:
                    expected = hidden[layer + 1][0, end - count : end]
                    torch.testing.assert_close(states[layer][:count], expected, rtol=1e-3, atol=1e-4)
        assert len(counts) > 1, "something was accepted"


def without(name: str) -> object:
    names = ("name", "tree", "deterministic", "capturable", "features", "bind", "start", "prepare", "propose")
    return type("Half", (), {other: None for other in names if other != name})()


DRAFT = perturbed(TARGET, 0.1)


def unchecked(tree: str) -> Oracle:
    drafter = Oracle()
    drafter.tree = tree
    return drafter


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "unknown": ({"drafter": "medusa"}, "drafter='medusa' is not known; use model, lookup or an object"),
    "missing": ({"drafter": without("propose")}, "Half is no drafter: it has no propose"),
    "a number": ({"drafter": 5}, "int is no drafter: it has no name, tree"),
    "two drafters": ({"drafter": Oracle(), "draft": DRAFT}, "one was given; leave one out"),
    "lookup and a draft": ({"drafter": "lookup", "draft": DRAFT}, "drafter='lookup' uses no draft model"),
    "tree": ({"drafter": Oracle(), "tree": "chain:3"}, "has a tree of its own; change drafter.tree"),
    "no draft": ({"drafter": "model"}, "drafter='model' needs a draft; give one, or drafter='lookup'"),
    "large tree": (
        {"drafter": unchecked("chain:129")},
        "tree='chain:129' cannot be read: a tree has at most 1024 proposed tokens and 128 levels",
    ),
    "long lookup": ({"drafter": "lookup", "lookup": 129}, r"lookup=129 must be .*128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_at_load(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        triforce_tree.load(TARGET, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layer", [-1, 2])
def test_features_of_layers_that_are_not_there_are_refused(layer: int) -> None:
    drafter = Features()
    drafter.features = (0, layer)
    with pytest.raises(
        ValueError, match=f"reads features of layer {layer}, but the target's layers are 0 to 1"
    ):
        triforce_tree.load(TARGET, drafter=drafter)


@levels_2_and_3
@pytest.mark.parametrize("size", [40, 63, 64, 100])
def test_trees_as_large_as_they_may_be(levels: int, size: int) -> None:
    """Every node has a bit of its own: all proposals are right ones."""

    class Long(Oracle):
        def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
            text = state.text(0)
            coming = whole[len(text) : len(text) + size]
            tree.tokens.fill_(-1)
            tree.tokens[0, : 1 + len(coming)] = torch.tensor([text[-1], *coming])

    prompt, new = PROMPTS[0], 104
    whole = [*prompt, *greedy(TARGET, prompt, new)]
    drafter = Long()
    drafter.tree = f"chain:{size}"
    options = {**WHOLE, "gamma": size, "levels": levels, "rounds": 1}
    out = triforce_tree.load(TARGET, drafter=drafter, **options).generate(
        prompt, max_new_tokens=new, do_sample=False
    )
    assert out.sequences[0].tolist() == whole
    assert out.levels[-1].forwards == -(-new // (size + 1))


def test_through_transformers_own_generate() -> None:
    run = triforce_tree.custom_generate(drafter=FixedSiblings("static:0;1", 64), levels=2)
    ids = torch.tensor(PROMPTS[:1])
    made = TARGET.generate(ids, custom_generate=run, do_sample=False, max_new_tokens=NEW)
    assert made[0, ids.shape[1] :].tolist() == EXPECTED[0]


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, but with a tiny target and a short text."""
    load, prompt = triforce_tree.load, PROMPTS[0]
    monkeypatch.setattr(
        triforce_tree, "load", lambda **options: load(TARGET, tokenizer=characters(), **options)
    )
    monkeypatch.setattr("pydoc_data.topics.topics", {"only": text_of(prompt)})
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "custom_drafter.py"))
    out = capsys.readouterr().out.splitlines()
    assert out[0] == text_of(greedy(TARGET, prompt, 128))
    assert [line.split()[0] for line in out[1:]] == ["bigrams", "target"]
