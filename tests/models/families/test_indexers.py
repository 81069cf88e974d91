"""Sparse attention by an indexer (DeepSeek-V3.2, GLM-5, ...): transformers' own tokens and distributions."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import triforce_tree
from scripts.checks.models.build import build
from scripts.checks.models.classes import Family
from scripts.checks.models.outcomes import EQUAL
from scripts.checks.models.paths import Outcome, Trial
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from triforce_tree import Engine, UnsupportedModelError
from triforce_tree.config import load_arguments
from triforce_tree.kernels.attention.plan import AttentionParams, pack_mask
from triforce_tree.kernels.attention.reference import tree_attention
from triforce_tree.kv.indexed import in_halves, joined, selected_attention, visible_slots
from triforce_tree.models.hf_model import HFModel

# GLM's, Hunyuan's and Mistral's have layers that attend to what an earlier layer's indexer has chosen, and
# Mistral's layers share keys and values; Hunyuan's have sinks, and dots' some layers with a window. The
# oldest supported release of transformers lacks some.
FAMILIES = [
    name
    for name in (
        "AXK2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Dots3NoteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV4ForCausalLM",
        "MistralLarge4ForConditionalGeneration",
    )
    if hasattr(transformers, name)
]
VOCABULARY = 64
# They repeat themselves, so that suffix matching proposes tokens.
PROMPTS = [2 * prompt_of(length, VOCABULARY) for length in (42, 30, 20)]
NEW = 12
CHUNK = 23
PATHS: dict[str, dict[str, Any]] = {
    "plain": {"levels": 1},
    "lookup": {"levels": 2, "rounds": 1},
    "drafted": {"levels": 2, "rounds": 1, "tree": "best-first:3,2", "window": 6, "sinks": 2},
    "auto": {"tree": "best-first:3,2", "window": 6, "sinks": 2},
}


@cache
def model_of(name: str) -> PreTrainedModel:
    """Returns a tiny random model whose layers attend to 24 tokens."""
    return build(Family(name, ""))


@cache
def expected(name: str) -> list[list[int]]:
    return [greedy(model_of(name), prompt, NEW) for prompt in PROMPTS]


def engine_of(name: str, path: str = "lookup", **options: Any) -> Engine:
    own = {**PATHS[path], "prefill_chunk": CHUNK, **options}
    draft = tiny("llama-gqa", vocab_size=model_of(name).config.get_text_config().vocab_size)
    return triforce_tree.load(model_of(name), draft if "tree" in own else None, **load_arguments(own))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_texts_are_transformers_own(name: str, path: str) -> None:
    engine = engine_of(name, path)
    for prompt, tokens in zip(PROMPTS[:2], expected(name), strict=False):
        out = engine.generate(prompt, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, len(prompt) :].tolist() == tokens
        names = {level.name for level in out.levels if level.forwards}
        assert "target" in names
        assert "retrieval" not in names
        assert path == "auto" or (out.levels[-1].proposed == 0) == (path == "plain")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_read_with_tensors_of_its_own_device(name: str) -> None:
    """A default device whose tensors cannot be read stands for a model on a GPU."""
    model = model_of(name)
    with torch.device("meta"):
        assert HFModel(model).indexed


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_forwards_are_captured(name: str) -> None:
    """The text is transformers' own, and all forwards run in CUDA graphs."""
    assert Trial(build(Family(name, "")), "cuda").run("captured") == Outcome(EQUAL)


def test_a_batch_and_a_session() -> None:
    name = "GlmMoeDsaForCausalLM"
    engine = engine_of(name)
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    longest = len(PROMPTS[0])
    assert [ids[longest:] for ids in out.sequences.tolist()] == expected(name)
    session = engine.session(PROMPTS[0])
    text = session.generate([3, 4], max_new_tokens=NEW, do_sample=False).sequences[0].tolist()
    assert text[-NEW:] == greedy(model_of(name), text[:-NEW], NEW)
    again = session.generate([5], max_new_tokens=NEW, do_sample=False)
    assert again.reused_tokens > longest
    assert again.sequences[0, -NEW:].tolist() == greedy(model_of(name), [*text, 5], NEW)


def test_a_saved_session_has_the_indexers_keys(tmp_path: Any) -> None:
    name = "GlmMoeDsaForCausalLM"
    session = engine_of(name).session(PROMPTS[0])
    text = session.generate([3], max_new_tokens=NEW, do_sample=False).sequences[0].tolist()
    session.save(tmp_path / "saved")
    loaded = engine_of(name).load_session(tmp_path / "saved")
    out = loaded.generate([5], max_new_tokens=NEW, do_sample=False)
    assert out.reused_tokens > len(PROMPTS[0])
    assert out.sequences[0, -NEW:].tolist() == greedy(model_of(name), [*text, 5], NEW)


def test_logits_at_each_token_are_transformers_own() -> None:
    name = "DeepseekV32ForCausalLM"
    out = engine_of(name, "drafted").generate(
        PROMPTS[0],
        max_new_tokens=NEW,
        do_sample=True,
        seed=3,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        theirs = model_of(name)(out.sequences).logits[0, len(PROMPTS[0]) - 1 : -1]
    torch.testing.assert_close(torch.cat(out.logits), theirs, rtol=1e-3, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three levels": ({"levels": 3}, "levels=3 is not possible with .* an indexer already chooses"),
    "8 bits": ({"kv_bits": 8}, "kv_bits=8 is not possible with"),
    "offloading": ({"offload": True}, "offload=True is not possible with"),
    "exact": ({"exact": True}, "exact=True does not serve .* indexers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_indexer_excludes_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        engine_of("DeepseekV32ForCausalLM", **options)


def test_an_indexed_draft_and_a_tree_of_texts_are_refused() -> None:
    target = model_of("DeepseekV32ForCausalLM")
    with pytest.raises(UnsupportedModelError, match="by an indexer, and a draft attends to a window"):
        triforce_tree.load(target, perturbed(target, 0.1))
    with pytest.raises(UnsupportedModelError, match="by an indexer, which knows no branches of a tree"):
        engine_of("DeepseekV32ForCausalLM").tree(PROMPTS[0])


@pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "Glm5NextForConditionalGeneration"])
def test_indexers_of_blocks_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} attends to 24 tokens that an indexer chooses"):
        HFModel(build(Family(name, "")))


def test_attention_to_selected_slots() -> None:
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    batch, heads, groups, count, slots, chosen = 2, 3, 2, 5, 31, 7
    q, k, v = (
        drawn(batch, heads * groups, count, 8),
        drawn(batch, heads, slots, 8),
        drawn(batch, heads, slots, 6),
    )
    visible = torch.rand(batch, count, slots, generator=random) < 0.4
    visible[..., 0] = True
    # Query 0 of the first sequence sees fewer slots than are selected.
    visible[0, 0, 3:] = False
    selected = (
        torch.rand(batch, count, slots, generator=random).masked_fill(~visible, -1).topk(chosen).indices
    )
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.nan
    visible[..., -1] = False
    sinks = drawn(heads * groups)
    params = AttentionParams(0.3, softcap=2.0, sinks=sinks, selected=selected.int())
    ours = selected_attention(q, k, v, params, visible)
    for b in range(batch):
        for t in range(count):
            own = [s for s in selected[b, t].tolist() if visible[b, t, s]]
            mask = torch.ones(1, len(own), dtype=torch.bool)
            out, _ = tree_attention(
                q[b : b + 1, :, t : t + 1], k[b : b + 1, :, own], v[b : b + 1, :, own], mask,
                scale=0.3, softcap=2.0, sinks=sinks,
            )  # fmt: skip
            torch.testing.assert_close(ours[b, t], out[0, :, 0])


def test_the_slots_of_indexers() -> None:
    keys = torch.randn(2, 5, 7)
    k, v = in_halves(keys)
    assert (k.shape, v.shape) == ((2, 1, 5, 4), (2, 1, 5, 3))
    assert joined(k, v).equal(keys)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    seen = visible_slots(lengths, pack_mask(mask).repeat(2, 1), 2, 70)
    assert seen.shape == (2, 2, 70)
    for b, length in enumerate([4, 0]):
        for t in range(2):
            tail = [length + j for j in range(3) if mask[t, j]]
            assert seen[b, t].nonzero()[:, 0].tolist() == [*range(length), *tail]
