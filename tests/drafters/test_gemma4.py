"""Gemma 4 assistants, which draft over the target's keys and values: proposals, distributions, and errors."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.drafters.test_honesty import Proposal, dishonesty, trees
from tests.support.distributions.enumeration import NOISE, total_variation
from tests.support.distributions.generation_distributions import Generations, target_distribution
from tests.support.distributions.head_folders import eagle_folder
from tests.support.models.families import greedy, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.decoding.stages import DraftStage
from triforce_tree.verify.sampling import ProbsFromLogits

hf = pytest.importorskip("transformers", "5.22")
WINDOW = 12
NEW = 12


def gemma(vocabulary: int = 64, **settings: Any) -> PreTrainedModel:
    return tiny("gemma4", vocab_size=vocabulary, sliding_window=WINDOW, **settings)


TARGET = gemma()
PROMPTS = [prompt_of(length) for length in (60, 41)]


def assistant(folder: Path, target: PreTrainedModel = TARGET, clusters: int = 0, **settings: Any) -> Path:
    """Saves a random assistant of three layers; with ``clusters`` its head reads half of the clusters."""
    own = target.config.to_dict()
    own.pop("architectures", None)
    own |= {
        "num_hidden_layers": 3, "num_kv_shared_layers": 3, "hidden_size": 24, "intermediate_size": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "per_layer_config": {"2": {"head_dim": 512}},
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    text: Any = hf.Gemma4TextConfig(**own)
    fields = {"backbone_hidden_size": target.config.hidden_size, **settings}
    if clusters:
        fields |= {"use_ordered_embeddings": True, "num_centroids": clusters}
        fields |= {"centroid_intermediate_top_k": clusters // 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.Gemma4AssistantForCausalLM(hf.Gemma4AssistantConfig(text_config=text, **fields))
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        if clusters:
            model.masked_embedding.token_ordering.copy_(torch.randperm(target.config.vocab_size))
    model.save_pretrained(folder)
    return folder


def engine_of(folder: Path, target: PreTrainedModel = TARGET, **options: Any) -> Engine:
    own = {"tree": "best-first:3,2", "budget": 24, "chunk": 4, "recent": 8, "gamma": 4, **options}
    return triforce_tree.load(target, drafter=folder, **load_arguments(own))


@pytest.mark.parametrize("clusters", [0, 8])
def test_chains_are_those_of_transformers(tmp_path: Path, clusters: int) -> None:
    """The reference is transformers' own assistant over the keys and values of a forward without a cache."""
    folder = assistant(tmp_path, clusters=clusters)
    model = hf.Gemma4AssistantForCausalLM.from_pretrained(folder)
    engine = engine_of(folder, tree="chain:4", levels=2, rounds=1)
    for prompt in PROMPTS:
        with engine.program([prompt], NEW, ProbsFromLogits(greedy=True)) as program:
            program.prefill([prompt])
            program.run("draft", torch.Generator())
            stage = program.stage("draft")
            assert isinstance(stage, DraftStage)
            ours = stage.tree.tokens[0].tolist()
        before = torch.tensor([prompt[:-1]])
        with torch.no_grad():
            out = TARGET(before, output_hidden_states=True, return_shared_kv_states=True)
            hidden, token = out.hidden_states[-1][:, -1:], torch.tensor([prompt[-1:]])
            # Transformers shows one position more than the window.
            states = {
                kind: tuple(part[:, :, -WINDOW if "sliding" in kind else 0 :] for part in parts)
                for kind, parts in out.shared_kv_states.items()
            }
            expected = [prompt[-1]]
            for _ in range(4):
                x = torch.cat([TARGET.get_input_embeddings()(token), hidden], -1)
                place = torch.tensor([[len(prompt) - 1]])
                step = model(inputs_embeds=x, position_ids=place, shared_kv_states=states)
                token, hidden = step.logits.argmax(-1), step.last_hidden_state
                expected.append(int(token))
        assert ours == expected


PATHS: dict[str, dict[str, Any]] = {
    "two levels": {"levels": 2, "rounds": 1},
    "chain": {"levels": 2, "rounds": 1, "tree": "chain:3"},
    "three levels": {"levels": 3, "rounds": 2},
    "chosen": {},
}


@pytest.mark.parametrize("clusters", [0, 8])
@pytest.mark.parametrize("path", PATHS)
def test_greedy_texts_are_the_targets_own(tmp_path: Path, path: str, clusters: int) -> None:
    engine = engine_of(assistant(tmp_path, clusters=clusters), **PATHS[path])
    for prompt in PROMPTS:
        out = engine.generate(prompt, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, len(prompt) :].tolist() == greedy(TARGET, prompt, NEW)
    together = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False).sequences.tolist()
    assert [ids[60:] for ids in together] == [greedy(TARGET, prompt, NEW) for prompt in PROMPTS]


def test_an_assistant_may_be_given_as_the_draft(tmp_path: Path) -> None:
    options = load_arguments({"tree": "chain:3", "levels": 2, "rounds": 1})
    engine = triforce_tree.load(TARGET, str(assistant(tmp_path)), **options)
    assert engine.draft is None
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert {level.name for level in out.levels} == {"gemma4", "target"}
    assert out.sequences[0, 60:].tolist() == greedy(TARGET, PROMPTS[0], NEW)


def generations(vocabulary: int, levels: int, tree: str, **options: Any) -> Generations:
    from triforce_tree.drafters.gemma4 import Gemma4Assistant

    target = gemma(vocabulary, vocab_size_per_layer_input=vocabulary, initializer_range=0.5)
    with TemporaryDirectory() as folder:
        drafter = Gemma4Assistant(assistant(Path(folder), target), tree)
        return Generations(target, drafter, levels, prompt_of(41, vocabulary), batch=16, **options)


@pytest.mark.parametrize(
    ("levels", "vocabulary", "tokens", "passes", "tree", "options"),
    [
        (2, 3, 2, None, "chain:2", {}),
        (2, 4, 2, 1, "static:0;1;0.0", {}),
        (2, 3, 2, 1, "best-first:2,2", {}),
        (3, 3, 2, 1, "static:0;1", {"runner_ups": True}),
        (3, 2, 3, 1, "chain:1", {"rounds": 2, "gamma": 2}),
    ],
)
def test_generated_tokens_follow_the_targets_distribution(
    levels: int, vocabulary: int, tokens: int, passes: int | None, tree: str, options: dict[str, Any]
) -> None:
    made, to_probs = generations(vocabulary, levels, tree, **options), ProbsFromLogits()
    expected = target_distribution(made.target, to_probs, made.prompt, tokens)
    assert total_variation(made.distribution(to_probs, tokens, passes), expected) < NOISE


@pytest.mark.parametrize("tree", ["static:1;0.1", "best-first:2,2"])
def test_siblings_are_drawn_from_the_reported_distribution(tree: str) -> None:
    made = generations(3, 2, tree)
    made.program.prepare(ProbsFromLogits())

    def run(_: int) -> Sequence[Proposal]:
        made.program.rewind([made.prompt] * made.batch)
        return trees(made)

    assert dishonesty(list(made.outcomes(run))) < 2 * NOISE


@pytest.mark.parametrize("offload", [False, True])
def test_drafters_read_all_states_of_layers_that_share_keys(tmp_path: Path, offload: bool) -> None:
    """In a prefill transformers leaves out tokens from the first such layer on, which has index 2."""
    folder, prompt = eagle_folder(tmp_path, TARGET, inputs=(2, 3)), PROMPTS[0]
    options = {"tree": "chain:2", "levels": 2, "offload": offload, "window": 20, "sinks": 2}
    engine = engine_of(folder, **options, prefill_chunk=16)
    with engine.program([prompt], NEW, None) as program:
        program.prefill([prompt])
        features = program.state.features
        assert features is not None
        ours = [features.read(layer, torch.arange(45, 59)[None])[0] for layer in (1, 2)]
    with torch.no_grad():
        states = TARGET(torch.tensor([prompt[:-1]]), output_hidden_states=True).hidden_states
    for own, layer in zip(ours, (1, 2), strict=True):
        torch.testing.assert_close(own, states[layer + 1][0, 45:59], rtol=1e-3, atol=1e-3)


def test_another_target_is_refused(tmp_path: Path) -> None:
    folder = assistant(tmp_path)
    with pytest.raises(ValueError, match="made for a hidden size of 32, and Gemma4ForCausalLM has 16"):
        engine_of(folder, gemma(hidden_size=16))
    with pytest.raises(ValueError, match="made for a vocabulary of 64, and Gemma4ForCausalLM has 48"):
        engine_of(folder, gemma(48))
    llama = tiny("llama-gqa")
    with pytest.raises(ValueError, match=r"reads sliding_attention of heads .* LlamaForCausalLM does"):
        engine_of(folder, llama)


def test_what_an_assistant_cannot_read_is_refused(tmp_path: Path) -> None:
    engine = engine_of(assistant(tmp_path), levels=2, offload=True)
    with pytest.raises(ValueError, match="drafter 'gemma4' reads the target's keys and values"):
        engine.generate(PROMPTS[0], max_new_tokens=3)


def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = assistant(tmp_path)
    (folder / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"the assistant in .* cannot be loaded") as error:
        engine_of(folder)
    assert "\n" not in str(error.value)
