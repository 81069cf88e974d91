"""Inflated vocabularies, whose appended entries are never drawn, and inflated heads."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import triforce_tree
from scripts.inflate.pair import SHAPES, Shape, inflate, inflate_pair, inflate_two
from tests.support.models.families import INFLATED_TOLERANCE as TOLERANCE
from tests.support.models.families import greedy, logits, prompt_of, relative_error, tiny
from triforce_tree.config import load_arguments
from triforce_tree.loading import rounding
from triforce_tree.loading.checkpoints import PAIR, load_model
from triforce_tree.verify.sampling import ProbsFromLogits

# More than twice the tiny model's entries, and no multiple of them.
ENTRIES = 199
WIDE = f"96x5x12/4x8x100-v{ENTRIES}"


@pytest.fixture(scope="module")
def both() -> tuple[PreTrainedModel, LlamaForCausalLM]:
    small = tiny("llama-gqa")
    return small, inflate(small, WIDE)


def probs(processors: list[Any], temperature: float, scores: torch.Tensor) -> torch.Tensor:
    if processors:
        scores = LogitsProcessorList(processors)(None, scores)
    return (scores / temperature).softmax(-1)


@pytest.mark.usefixtures("poisoned_empty")
def test_entries_of_the_model_have_its_probs_and_others_none(both: Any) -> None:
    small, big = both
    count, ids = small.config.vocab_size, prompt_of(60)
    assert big.config.vocab_size == ENTRIES
    assert big.lm_head.weight.shape == big.model.embed_tokens.weight.shape == (ENTRIES, 96)
    ours, exact = logits(big, ids), logits(small, ids)
    assert ours.isfinite().all()
    assert relative_error(ours[:, :count], exact) < TOLERANCE
    for temperature in (0.3, 1.0, 10.0):
        for chosen in ([], [TopKLogitsWarper(7)], [TopPLogitsWarper(0.9)]):
            found, expected = probs(chosen, temperature, ours), probs(chosen, temperature, exact)
            assert not found[:, count:].any()
            assert torch.allclose(found[:, :count], expected, atol=1e-4)
    assert greedy(big, ids, 40) == greedy(small, ids, 40)


def test_every_weight_of_the_appended_entries_is_real(both: Any) -> None:
    """They are copies in both matrices, and the stream's constant is the only other difference."""
    small, big = both
    count = small.config.vocab_size
    for own, matrix in (
        (small.lm_head.weight, big.lm_head.weight),
        (small.model.embed_tokens.weight, big.model.embed_tokens.weight),
    ):
        assert torch.equal(matrix[:, :32], own[torch.arange(ENTRIES) % count])
    assert (big.model.embed_tokens.weight[:, 32] == big.model.embed_tokens.weight[0, 32]).all()
    assert (big.lm_head.weight[count:, 32] < 0).all()
    assert big.num_parameters() == Shape.of(big.config).parameters(ENTRIES)
    # A prompt with an appended id reads as one with the id that it copies, to rounding.
    assert relative_error(logits(big, [3, count + 3])[:, :count], logits(small, [3, 3])) < TOLERANCE


def test_the_embedded_target_in_bf16() -> None:
    """The error of the model's own entries stays that of the dtype."""
    reference = load_model(PAIR / "target", "cpu", torch.float32)
    own = load_model(PAIR / "target", "cpu", torch.bfloat16)
    big = inflate(own, "512x6x4/4x128x1152-v9001")
    ids, count = prompt_of(150, 4096), 4096
    exact = logits(reference, ids)
    ours = logits(big, ids)
    errors = [(x - exact).square().mean().sqrt() for x in (ours[:, :count], logits(own, ids))]
    assert errors[0] < 1.5 * errors[1]
    # Lower by so much that fp32 has no probability for it, and far from what bf16 cannot hold.
    assert (ours.amax(-1) - ours[:, count:].amax(-1)).min() > 1000
    assert ours.min() > -1e9


@pytest.mark.parametrize("tree", ["chain:3", "best-first:3,2,2", "static:0;1;0.0"])
def test_three_levels_accept_what_they_accept_without(tree: str) -> None:
    """Trees, top-k of the draft and traversal over the large vocabulary."""
    small, draft = tiny("llama"), tiny("llama", seed=1)
    big, big_draft = inflate_two(small, draft, WIDE, "40x2x4/4x8x64")
    assert big_draft.config.vocab_size == ENTRIES
    options = {"levels": 3, "budget": 16, "chunk": 4, "recent": 8, "gamma": 4, "tree": tree}
    results = []
    for models in ((small, draft), (big, big_draft)):
        engine = triforce_tree.load(*models, **load_arguments(options))
        out = engine.generate(prompt_of(120), max_new_tokens=30, do_sample=False)
        results.append((out.sequences.tolist(), [(s.forwards, s.proposed, s.accepted) for s in out.levels]))
        for temperature in (0.5, 2.0):
            drawn = engine.generate(
                prompt_of(120), max_new_tokens=30, do_sample=True, temperature=temperature, seed=3
            ).sequences
            assert int(drawn.max()) < small.config.vocab_size
    assert results[0] == results[1]


def test_the_engines_probs_of_a_tree_are_the_small_models(both: Any) -> None:
    small, big = both
    count, ids = small.config.vocab_size, prompt_of(40)
    paths = [ids[: i + 1] for i in range(len(ids))]
    to_probs = ProbsFromLogits(LogitsProcessorList([TopKLogitsWarper(5)]))
    found = to_probs(logits(big, ids), lambda: paths)
    assert torch.allclose(found[:, :count], to_probs(logits(small, ids), lambda: paths), atol=1e-4)
    assert not found[:, count:].any()


def test_low_logits_do_not_hide_wrong_ones(both: Any) -> None:
    """The comparison at load still sees an error in the entries that can be drawn."""
    small, big = both
    exact = logits(big, prompt_of(30))
    wrong = exact.clone()
    wrong[:, : small.config.vocab_size] = wrong[:, : small.config.vocab_size].flip(-1)
    assert rounding.relative_error(wrong, exact) > 0.5
    assert rounding.relative_error(exact * (1 + 1e-6), exact) < 1e-5
    lifted = exact.clone()
    lifted[:, -1] = 0.0
    assert rounding.relative_error(lifted, exact) > 0.5
    masked = exact.clone()
    masked[:, small.config.vocab_size :] = -torch.inf
    assert rounding.relative_error(masked, masked) == 0.0
    triforce_tree.load(big, tokenizer=None, levels=1).generate(prompt_of(20), max_new_tokens=2)


def test_named_shapes_have_the_originals_vocabulary() -> None:
    assert {name: shape.vocabulary for name, shape in SHAPES.items()} == {
        "llama-2-7b": 32_000, "llama-3.1-8b": 128_256, "llama-2-13b": 32_000, "qwen3-30b-a3b": 151_936,
        "llama-68m": 32_000,
    }  # fmt: skip
    assert Shape.parse("96x5x6/6x8x100-v200-tied") == Shape(96, 5, 6, 6, 8, 100, True, 200)
    assert Shape.parse("96x5x6/6x8x20-e16/4-v200") == Shape(96, 5, 6, 6, 8, 20, False, 200, 16, 4)
    assert str(SHAPES["qwen3-30b-a3b"]) == "2048x48x32/4x128x768-e128/8-v151936"
    assert SHAPES["qwen3-30b-a3b"].parameters(151_936) == pytest.approx(30.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "draft_shape", "vocabulary"),
    [
        ("512x6x4/4x128x1152", "256x3x4/4x64x512", None),
        ("512x6x4/4x128x1152-v4500", "320x2x5/5x64x512", 4500),
    ],
)
def test_an_inflated_pair_has_the_vocabulary_of_its_shape(
    shape: str, draft_shape: str, vocabulary: int | None
) -> None:
    """Inflated by a little only: a full-size pair would take minutes."""
    target, draft, tokenizer = inflate_pair(shape, "cpu", torch.float32, draft_shape=draft_shape)
    engine = triforce_tree.load(target, draft, tokenizer=tokenizer)
    out = engine.generate("The for statement is used to", max_new_tokens=6, do_sample=False)
    small = triforce_tree.load(device="cpu", dtype=torch.float32)
    expected = small.generate("The for statement is used to", max_new_tokens=6, do_sample=False)
    assert out.text == expected.text
    sizes = target.config.vocab_size, draft.config.vocab_size
    assert sizes == (vocabulary or small.target.vocab_size,) * 2


@pytest.mark.parametrize(
    "family, shape",
    [
        ("llama", "96x5x4/4x16x100"),
        ("llama-gqa", "96x5x8/4x24x100"),
        ("llama-mqa", "96x5x6/2x16x100-v80"),
        ("llama3-rope", "96x5x4/4x32x100"),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_heads_of_more_dimensions(family: str, shape: str) -> None:
    small = tiny(family)
    big = inflate(small, shape)
    ids, count = prompt_of(50), small.config.vocab_size
    assert relative_error(logits(big, ids)[:, :count], logits(small, ids)) < TOLERANCE
    assert greedy(big, ids, 40) == greedy(small, ids, 40)
    used = big.model.layers[1].self_attn.k_proj.weight
    assert (used[:, : small.config.hidden_size] != 0).all(), "keys and values are dense"


def test_chunks_are_chosen_as_by_the_small_heads() -> None:
    small = tiny("llama-gqa")
    big, draft, results = inflate(small, "96x5x12/4x16x100"), tiny("llama", seed=1), []
    for model in (small, big):
        engine = triforce_tree.load(
            model, draft, levels=3, budget=16, advanced={"chunk": 4, "recent": 8, "gamma": 4, "rounds": 1}
        )
        out = engine.generate(prompt_of(150), max_new_tokens=30, do_sample=False)
        results.append((out.sequences.tolist(), [(s.forwards, s.proposed, s.accepted) for s in out.levels]))
    assert results[0] == results[1]


def test_nine_heads_over_three_fit_into_thirty_two_over_eight() -> None:
    """The heads of SmolLM2-135M in those of Llama-3.1-8B, a quarter as large, with YaRN."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    small = tiny(
        "llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3, head_dim=16,
        tie_word_embeddings=True, rope_parameters=yarn | {"rope_theta": 100_000.0},
    )  # fmt: skip
    big = inflate(small, "128x3x32/8x32x100-v300")
    ids, count = prompt_of(200), small.config.vocab_size
    assert relative_error(logits(big, ids)[:, :count], logits(small, ids)) < TOLERANCE
    assert greedy(big, ids, 30) == greedy(small, ids, 30)


@pytest.mark.parametrize(
    "model, shape, words",
    [
        ({}, "96x5x6/6x8x100-v40", ["vocabulary=40", "less than the model's"]),
        ({}, "32x5x4/4x8x100-v500", ["hidden=32", "larger hidden size"]),
        ({"tie_word_embeddings": True}, "96x5x6/6x8x100-v500-tied", ["leave out -tied"]),
        ({"rms_norm_eps": 1e-12}, "96x5x6/6x8x100-v500", ["rms_norm_eps=1e-12"]),
        ({"dtype": torch.float16}, "96x5x6/6x8x100-v500", ["torch.float16", "torch.bfloat16"]),
        ({"family": "llama-yarn"}, "96x5x6/6x16x100", ["yarn", "truncate=False", "head_dim 8"]),
        ({"family": "llama-dynamic"}, "96x5x6/6x16x100", ["dynamic", "head_dim 8"]),
    ],
)
def test_what_cannot_be_appended_or_widened_is_refused(
    model: dict[str, Any], shape: str, words: list[str]
) -> None:
    dtype = model.pop("dtype", torch.float32)
    small = tiny(model.pop("family", "llama"), **model).to(dtype)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are the match
        inflate(small, shape)
    assert not [word for word in words if word not in str(error.value)], str(error.value)
