"""User-defined drafters passed to ``load``: generated tokens, the drafter's inputs, and errors."""

import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.api_cases import TARGET, characters, text_of
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.own_drafters import FixedSiblings, FixedThenDrawn, OwnDrafter, TableDraws
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import TokenTree
from triforce_tree.models.hf_model import HFModel
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler
from triforce_tree.verify.sampling import ProbsFromLogits

NEW = 24
PROMPTS = [prompt_of(length) for length in (41, 60, 52)]
SMALL = {"gamma": 3, "budget": 24, "chunk": 4, "recent": 8}
EXPECTED = [greedy(TARGET, prompt, NEW) for prompt in PROMPTS]
WHOLE = {"budget": 256, "chunk": 32, "recent": 64}
levels_2_and_3 = pytest.mark.parametrize("levels", [2, 3])


class Oracle(OwnDrafter):
    """Proposes the expected tokens, and records its calls."""

    name, deterministic = "oracle", True

    def __init__(self) -> None:
        super().__init__("chain:4", 64)
        self.calls: list[str] = []
        self.prepared: list[tuple[list[list[int] | None], bool]] = []

    def bind(self, state: SequenceState) -> None:
        self.calls.append("bind")

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.calls.append("start")
        self.started = [list(tokens) for tokens in sequences]

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.calls.append("prepare")
        copies = [None if tokens is None else list(tokens) for tokens in sequences]
        self.prepared.append((copies, resumed))

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.calls.append("propose")
        tree.tokens.fill_(-1)
        tree.tokens[:, 0] = state.newest
        for b in range(state.batch):
            length, whole = len(state.sequence(b)), [*PROMPTS[b], *EXPECTED[b]]
            proposed = whole[length : length + 4]
            tree.tokens[b, 1 : 1 + len(proposed)] = torch.tensor(proposed, dtype=torch.int64)


def new_tokens(engine: Engine, **options) -> list[list[int]]:
    out = engine.generate(PROMPTS, max_new_tokens=NEW, **options)
    return [sequence[-NEW:] for sequence in out.sequences.tolist()]


@levels_2_and_3
@pytest.mark.parametrize("kind", [FixedSiblings, TableDraws, FixedThenDrawn])
@pytest.mark.parametrize("rounds", [1, None])
def test_greedy_tokens_equal_the_targets(levels: int, kind: type[OwnDrafter], rounds: int | None) -> None:
    engine = triforce_tree.load(
        TARGET,
        drafter=kind("static:0;1;2;0.0;0.1;1.0", 64),
        levels=levels,
        **load_arguments({**SMALL, "rounds": rounds}),
    )
    assert new_tokens(engine, do_sample=False) == EXPECTED


@levels_2_and_3
@pytest.mark.parametrize("kind", [FixedSiblings, TableDraws])
def test_equal_seeds_sample_equal_tokens(levels: int, kind: type[OwnDrafter]) -> None:
    engine = triforce_tree.load(
        TARGET, drafter=kind("static:0;1;0.0", 64), levels=levels, **load_arguments(SMALL)
    )
    first, same, other = (new_tokens(engine, do_sample=True, top_k=20, seed=seed) for seed in (1, 1, 2))
    assert first == same != other


@levels_2_and_3
def test_correct_proposals_are_accepted(levels: int) -> None:
    """The drafter also receives every committed token, in the documented order of calls."""
    drafter = Oracle()
    engine = triforce_tree.load(
        TARGET, drafter=drafter, levels=levels, **load_arguments({**SMALL, **WHOLE, "gamma": 5, "rounds": 1})
    )
    assert new_tokens(engine, do_sample=False) == EXPECTED
    assert drafter.calls[:4] == ["bind", "start", "prepare", "propose"]
    assert drafter.started == PROMPTS
    for sequences, resumed in drafter.prepared:
        assert not resumed
        for tokens, prompt, expected in zip(sequences, PROMPTS, EXPECTED, strict=True):
            assert tokens == [*prompt, *expected][: len(tokens)]
    # Each pass commits four draft tokens and a bonus token; with three levels a second bonus token.
    step = 5 if levels == 2 else 6
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.levels[0].name == "oracle"
    assert out.levels[-1].forwards == -(-NEW // step)


def test_sequences_that_have_ended_are_none() -> None:
    drafter = Oracle()
    engine = triforce_tree.load(TARGET, drafter=drafter, levels=2, advanced={"rounds": 1})
    stop = EXPECTED[1][0]
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False, eos_token_id=stop)
    assert out.finish_reason[1] == "eos"
    assert drafter.prepared[0][0] == PROMPTS
    assert all(sequences[1] is None for sequences, _ in drafter.prepared[1:])
    assert len(drafter.prepared) > 1


def test_resumed_is_set_after_autoregressive_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = PassKind(2, 1)
    plan = iter([draft, PLAIN, PLAIN, draft, draft, PLAIN] * 20)
    monkeypatch.setattr(PassPolicy, "choose", lambda *_: next(plan))
    drafter = Oracle()
    engine = triforce_tree.load(TARGET, drafter=drafter, levels=2, advanced={"rounds": 1})
    assert new_tokens(engine, do_sample=False) == EXPECTED
    assert [resumed for _, resumed in drafter.prepared[:4]] == [False, True, False, True]


class Features(FixedSiblings):
    """Copies the hidden states that are available at the first proposal of each pass."""

    features = (0, 1, 3)  # of a target with three layers: the last is the state after the final norm
    feature_window = (3, 6)

    def attach(self, target: HFModel) -> None:
        self.target = target

    def __init__(self) -> None:
        super().__init__("static:0;1;0.0", 64)
        self.seen: list[dict[int, tuple[int, int, dict[int, Tensor]]]] = []

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.seen = []
        self.active: list[int] = []

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.active = [b for b, tokens in enumerate(sequences) if tokens is not None]

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        if self.active:
            if not self.seen:
                positions = torch.arange(3).expand(state.batch, -1)
                first = {layer: state.features.read(layer, positions) for layer in self.features}
                assert state.features.known_leading.tolist() == [3] * state.batch
                self.leading = [{layer: states[b] for layer, states in first.items()} for b in self.active]
            self.seen.append(
                {
                    b: (
                        int(state.length[b]),
                        int(state.feature_count[b]),
                        {layer: state.newest_features(layer, 6)[b] for layer in self.features},
                    )
                    for b in self.active
                }
            )
        self.active = []
        super().propose(state, tree, sampler)


def check_states(target: PreTrainedModel, drafter: Features, tokens: list[int], b: int = 0) -> None:
    """Compares what the drafter has seen of sequence b with the target's hidden states of its text."""
    with torch.no_grad():
        hidden = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    first = drafter.leading[b]
    for layer in drafter.features:
        torch.testing.assert_close(first[layer], hidden[layer + (layer < 3)][0, :3], rtol=1e-3, atol=1e-4)
    for seen in drafter.seen:
        if b not in seen:
            continue
        end, count, states = seen[b]
        assert count >= 6
        for layer in drafter.features:
            # transformers gives the input of the first layer first, and the normed state last.
            expected = hidden[layer + (layer < 3)][0, end - 6 : end]
            torch.testing.assert_close(states[layer], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
@pytest.mark.parametrize("offload", [False, True])
def test_features_of_texts_that_take_turns(family: str, offload: bool) -> None:
    """They are kept with a text: the target computes new tokens alone, though the drafter reads more."""
    target, reference = (perturbed(tiny(family, num_hidden_layers=3), 0.0) for _ in range(2))
    drafter = Features()
    options = {**SMALL, "offload": offload, "prefill_chunk": 16, "rounds": 1, "prefix_cache": "1GiB"}
    engine = triforce_tree.load(target, drafter=drafter, levels=2, **load_arguments(options))
    texts, held = [list(prompt) for prompt in PROMPTS[:2]], [0, 0]
    for number in range(6):
        which = number % 2 if number < 4 else 0
        out = engine.generate(texts[which], max_new_tokens=NEW, do_sample=False)
        tokens = out.sequences[0].tolist()
        assert out.reused_tokens == held[which]
        check_states(reference, drafter, tokens)
        texts[which], held[which] = [*tokens, 5, 6], len(tokens) - 1


@levels_2_and_3
@pytest.mark.parametrize("offload", [False, True])
def test_features_are_the_targets_hidden_states(levels: int, offload: bool) -> None:
    """After each verification the hidden states of the newest positions are the target's."""
    target = perturbed(tiny("llama-gqa", num_hidden_layers=3), 0.0)
    drafter = Features()
    options = {**SMALL, "offload": offload, "prefill_chunk": 16, "rounds": 1}
    engine = triforce_tree.load(target, drafter=drafter, levels=levels, **load_arguments(options))
    for _ in range(2):
        out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
        width = out.sequences.shape[1] - NEW
        for b, prompt in enumerate(PROMPTS):
            tokens = [*prompt, *out.sequences[b, width:].tolist()]
            check_states(target, drafter, tokens, b)
        assert len(drafter.seen) > 3


def test_features_of_a_stage_are_those_of_its_own_forward() -> None:
    """Without acceptance in the graph, a forward of another stage may run before acceptance."""
    target = perturbed(tiny("llama-gqa", num_hidden_layers=3), 0.0)
    drafter = Features()
    config = HierarchyConfig.from_options(tree=drafter.tree, **SMALL)
    program = DecodingProgram(HFModel(target), drafter, config, 1, 80, 2)
    program.prepare(ProbsFromLogits(greedy=True))
    program.prefill(PROMPTS[:1])
    generator = torch.Generator()
    program.run("draft", generator)
    (forward, accept), plain = program.stage("target").steps(), program.stage("plain").steps()[0]
    forward.run()
    plain.run()
    accept.run()
    count = int(program.state.count[0])
    tokens = program.state.sequence(0)
    with torch.no_grad():
        hidden = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for layer in drafter.features:
        expected = hidden[layer + (layer < 3)][:, -1 - count : -1]
        torch.testing.assert_close(
            program.state.newest_features(layer, count), expected, rtol=1e-3, atol=1e-4
        )


class Half(triforce_tree.Drafter):
    tree = "chain:4"


DRAFT = perturbed(TARGET, 0.1)


def with_tree(tree: str) -> Oracle:
    drafter = Oracle()
    drafter.tree = tree
    return drafter


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "unknown": ({"drafter": "medusa"}, "drafter='medusa' is not known; use model, lookup, mtp or an object"),
    "missing": ({"drafter": Half()}, "Half is no drafter: it has no deterministic"),
    "a number": ({"drafter": 5}, "int is no drafter: make it a subclass of triforce_tree.Drafter"),
    "two drafters": ({"drafter": Oracle(), "draft": DRAFT}, "one was given; leave one out"),
    "lookup and a draft": ({"drafter": "lookup", "draft": DRAFT}, "drafter='lookup' uses no draft model"),
    "tree": ({"drafter": Oracle(), "tree": "chain:3"}, "has a tree of its own; change drafter.tree"),
    "no draft": ({"drafter": "model"}, "drafter='model' needs a draft; give one, or drafter='lookup'"),
    "large tree": (
        {"drafter": with_tree("chain:129")},
        "tree='chain:129' cannot be read: a tree has at most 1024 proposed tokens and a depth of 128",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_drafters_are_refused_at_load(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        triforce_tree.load(TARGET, **load_arguments(options))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layer", [-1, 3])
def test_features_of_missing_layers_are_refused(layer: int) -> None:
    drafter = Features()
    drafter.features = (0, layer)
    with pytest.raises(
        ValueError, match=f"reads features of layer {layer}, but the target's layers are 0 to 1"
    ):
        triforce_tree.load(TARGET, drafter=drafter)


@levels_2_and_3
@pytest.mark.parametrize("size", [40, 63, 64, 100])
def test_chains_of_several_mask_words(levels: int, size: int) -> None:
    """All proposals are correct, so every token is accepted only if every mask bit is right."""

    class Long(Oracle):
        def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
            tokens = state.sequence(0)
            proposed = whole[len(tokens) : len(tokens) + size]
            tree.tokens.fill_(-1)
            tree.tokens[0, : 1 + len(proposed)] = torch.tensor([tokens[-1], *proposed])

    prompt, new = PROMPTS[0], 104
    whole = [*prompt, *greedy(TARGET, prompt, new)]
    drafter = Long()
    drafter.tree = f"chain:{size}"
    options = {**WHOLE, "gamma": size, "levels": levels, "rounds": 1}
    out = triforce_tree.load(TARGET, drafter=drafter, **load_arguments(options)).generate(
        prompt, max_new_tokens=new, do_sample=False
    )
    assert out.sequences[0].tolist() == whole
    assert out.levels[-1].forwards == -(-new // (size + 1))


def test_custom_drafters_through_transformers_generate() -> None:
    run = triforce_tree.custom_generate(drafter=FixedSiblings("static:0;1", 64), levels=2)
    ids = torch.tensor(PROMPTS[:1])
    output = TARGET.generate(ids, custom_generate=run, do_sample=False, max_new_tokens=NEW)
    assert output[0, ids.shape[1] :].tolist() == EXPECTED[0]


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The example runs unchanged with a tiny target and a short prompt."""
    load, prompt = triforce_tree.load, PROMPTS[0]
    monkeypatch.setattr(
        triforce_tree, "load", lambda **options: load(TARGET, tokenizer=characters(), **options)
    )
    monkeypatch.setattr("pydoc_data.topics.topics", {"only": text_of(prompt)})
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "custom_drafter.py"))
    out = capsys.readouterr().out.splitlines()
    assert out[0] == text_of(greedy(TARGET, prompt, 128))
    assert [line.split()[0] for line in out[1:]] == ["bigrams:", "target:"]
