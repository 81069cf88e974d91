"""Inflated models compute the small model's function, and their free entries are dense and random."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

import triforce_tree
from scripts.inflate.pair import SHAPES, Shape, inflate
from tests.support.models.families import INFLATED_TOLERANCE as TOLERANCE
from tests.support.models.families import greedy, logits, prompt_of, relative_error, tiny
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import PAIR, load_model
from triforce_tree.models.recurrent.pass_through import CACHE

# The tiny Llamas have 32 hidden, 2 layers, 4 heads of 8, MLP 64: (family, shape).
CASES = {
    "hidden only": ("llama", "80x2x4/4x8x64"),
    "layers only": ("llama", "32x7x4/4x8x64"),
    "heads only": ("llama", "36x2x6/6x8x64"),
    "neurons only": ("llama", "32x2x4/4x8x100"),
    "all": ("llama", "96x5x6/6x8x100"),
    "experts": ("llama", "96x5x6/6x8x100-e6/2"),
    "experts narrower than the MLP": ("llama-gqa", "96x5x12/4x8x20-e16/4"),
    "MHA in GQA": ("llama", "96x5x12/4x8x100"),
    "MHA in wider GQA": ("llama", "80x5x20/5x8x100"),
    "GQA in GQA": ("llama-gqa", "90x5x9/3x8x100"),
    "GQA in MHA": ("llama-gqa", "96x5x6/6x8x100"),
    "MQA of 4 in groups of 3": ("llama-mqa", "90x5x9/3x8x100"),
    "scaled rotary frequencies": ("llama3-rope", "96x5x12/4x8x100"),
    "rotary frequencies by head_dim": ("llama-yarn", "96x5x12/4x8x100"),
}


@pytest.fixture(scope="module", autouse=True)
def _device_contexts_list_the_real_empty() -> None:
    """torch lists once which functions follow ``with torch.device(...)``. If ``torch.empty`` were replaced at
    that time, 7B models would be made in memory instead of on "meta"."""
    with torch.device("meta"):
        assert torch.empty(1).is_meta


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return load_model(PAIR / "target", "cpu", torch.float32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("poisoned_empty")
def test_an_inflated_model_computes_the_same_function(case: str) -> None:
    """``torch.empty`` gives NaN here, so entries and frequencies that are never written would show."""
    family, shape = CASES[case]
    small = tiny(family)
    big = inflate(small, shape)
    assert Shape.of(big.config) == replace(Shape.parse(shape), vocabulary=small.config.vocab_size)
    ids = prompt_of(50)
    assert relative_error(logits(big, ids), logits(small, ids)) < TOLERANCE
    assert greedy(big, ids, 40) == greedy(small, ids, 40)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_embeddings(tied: bool) -> None:
    small = tiny("llama", tie_word_embeddings=True)
    big = inflate(small, Shape(96, 5, 6, 6, 8, 100, tied=tied))
    embedding, head = big.model.embed_tokens.weight, big.lm_head.weight
    assert (embedding.data_ptr() == head.data_ptr()) is tied
    assert relative_error(logits(big, prompt_of(50)), logits(small, prompt_of(50))) < TOLERANCE
    assert big.num_parameters() == Shape.of(big.config).parameters(big.config.vocab_size)


def test_entries_are_zero_only_where_they_must_be() -> None:
    """Contiguous and finite; nonzero wherever the docstring's table says free; no shared storage."""
    small = tiny("llama")
    big = inflate(small, "96x5x12/4x8x100")
    copied = {1, 3}  # the layers in the middle of each half of the depth
    for name, weight in big.named_parameters():
        assert weight.is_contiguous()
        assert weight.isfinite().all()
        zeros = float((weight == 0).float().mean())
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        if name.endswith("embed_tokens.weight"):
            assert zeros == pytest.approx(1 - 32 / 96)
        elif not writes:
            assert zeros == 0, name
        elif int(name.split(".")[2]) not in copied:
            assert zeros == 1, name
        else:
            used = 32 / 96 * (4 / 12 if "o_proj" in name else 64 / 100)
            assert zeros == pytest.approx(1 - used), name
    storages = {weight.untyped_storage().data_ptr() for weight in big.parameters()}
    assert len(storages) == len(list(big.parameters()))


@torch.no_grad()
def test_keys_and_values_are_full_size() -> None:
    out = inflate(tiny("llama"), "96x5x12/4x8x100")(torch.tensor([prompt_of(30)]), use_cache=True)
    assert len(out[CACHE].layers) == 5
    for layer in out[CACHE].layers:
        for tensor in (layer.keys, layer.values):
            assert tensor.shape == (1, 4, 30, 8)
            assert (tensor.abs().amax(-1) > 0).all()


@torch.no_grad()
def test_heads_without_effect_attend_as_the_small_models() -> None:
    """Random ones would let a retrieval cache exchange more chunks than a trained model does."""
    small, ids = tiny("llama"), torch.tensor([prompt_of(30)])
    big = inflate(small, "96x5x6/6x8x100")  # the small layers are layers 1 and 3
    own, new = (model(ids, use_cache=True)[CACHE].layers for model in (small, big))
    for layer, source in enumerate((0, 0, 1, 1, 1)):
        for part in ("keys", "values"):
            tensor, expected = getattr(new[layer], part), getattr(own[source], part)
            assert relative_error(tensor[:, 4:], tensor[:, :2]) < TOLERANCE
            if layer < 4:  # after the last small layer the stream is another one
                assert relative_error(tensor[:, :4], expected) < TOLERANCE
    queries = big.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(queries[32:, :32], queries[:16, :32])


def test_the_seed_changes_only_the_free_entries() -> None:
    small, shape = tiny("llama"), "96x5x12/4x8x100"
    first, again, other = (inflate(small, shape, seed=seed) for seed in (0, 0, 1))
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
    assert relative_error(logits(other, prompt_of(20)), logits(first, prompt_of(20))) < TOLERANCE


def test_the_small_model_is_unchanged() -> None:
    small, untouched = tiny("llama"), tiny("llama")
    inflate(small, "96x5x12/4x8x100")
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), untouched.parameters(), strict=True))
    assert small.config.to_dict() == untouched.config.to_dict()


def test_a_saved_model_loads_with_the_same_logits(tmp_path: Path) -> None:
    small = tiny("llama-gqa")
    big = inflate(small, "96x5x12/4x8x100")
    big.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded, prompt_of(50)), logits(big, prompt_of(50)))
    assert Shape.parse(loaded.config.inflated_from) == Shape.of(small.config)


def test_the_embedded_target_can_be_inflated(target: PreTrainedModel) -> None:
    """Heads as in llama-3.1-8b: groups of four, with one query head each from the target."""
    big = inflate(target, "512x8x16/4x128x1280")
    ids = prompt_of(200, target.config.vocab_size)
    assert relative_error(logits(big, ids), logits(target, ids)) < TOLERANCE
    assert greedy(big, ids, 24) == greedy(target, ids, 24)


def test_the_error_in_bf16_is_close_to_the_targets_own(target: PreTrainedModel) -> None:
    exact = load_model(PAIR / "target", "cpu", torch.bfloat16)
    big = inflate(exact, "512x6x4/4x128x1152")
    assert big.dtype == torch.bfloat16
    ids = prompt_of(200, target.config.vocab_size)
    reference = logits(target, ids)
    ours, own = ((logits(m, ids) - reference).square().mean().sqrt() for m in (big, exact))
    assert ours < 1.5 * own


def test_acceptance_is_the_same_under_grouped_queries() -> None:
    """The retrieval model selects the same chunks as for the small model, so the same tokens are accepted."""
    small = tiny("llama")
    big = inflate(small, "80x5x16/4x8x100")
    draft, results = tiny("llama", seed=1), []
    options = {"levels": 3, "budget": 16, "chunk": 4, "recent": 8, "gamma": 4, "rounds": 1}
    for model in (small, big):
        out = triforce_tree.load(model, draft, **load_arguments(options)).generate(
            prompt_of(150), max_new_tokens=40, do_sample=False
        )
        results.append((out.sequences.tolist(), [(s.forwards, s.proposed, s.accepted) for s in out.levels]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "family, shape, words",
    [
        ("llama", "96x5x6/6x12x100", ["head_dim=12", "model's 8", "choose a shape of head_dim 8"]),
        ("llama", "30x5x6/6x8x100", ["hidden=30", "model's 32"]),
        ("llama", "80x1x6/6x8x100", ["layers=1", "model's 2"]),
        ("llama", "80x5x2/2x8x100", ["heads=2", "model's 4"]),
        ("llama", "96x5x6/6x8x50", ["mlp=50", "model's 64"]),
        ("llama", "96x5x12/3x8x100", ["kv_heads=3", "need 4"]),
        ("llama", "96x5x6/6x8x100-tied", ["-tied"]),
        ("llama", "80x5x6/6x8x100", ["hidden=80", "heads=6"]),
        ("llama", "7b", ["unknown shape '7b'", "llama-2-7b", "hidden x layers"]),
        ("llama", "96x5x6/4x8x100", ["heads=6", "kv_heads=4"]),
        ("llama", "80x0x6/6x8x100", ["positive"]),
        ("mistral", "96x5x6/6x8x100", ["MistralForCausalLM"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(family: str, shape: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are the match
        inflate(tiny(family), shape)
    assert not [word for word in words if word not in str(error.value)], str(error.value)


def test_biases_are_refused() -> None:
    with pytest.raises(ValueError, match="attention_bias"):
        inflate(tiny("llama", attention_bias=True), "96x5x6/6x8x100")


def test_named_shapes_have_the_originals_sizes() -> None:
    """6.74, 8.03 and 13.0 G weights with the originals' vocabularies; ``str`` and ``parse`` are inverse."""
    counts = {"llama-2-7b": 6_738_415_616, "llama-3.1-8b": 8_030_261_248, "llama-2-13b": 13_015_864_320}
    vocabularies = {"llama-2-7b": 32_000, "llama-3.1-8b": 128_256, "llama-2-13b": 32_000}
    for name, count in counts.items():
        assert SHAPES[name].parameters(vocabularies[name]) == count
    for shape in SHAPES.values():
        assert Shape.parse(str(shape)) == shape
        with torch.device("meta"):
            model = inflate_config(shape)
        assert model.num_parameters() == shape.parameters(64)


def inflate_config(shape: Shape) -> LlamaForCausalLM | MixtralForCausalLM:
    """Returns a model of the shape, made by transformers."""
    config = tiny("llama").config
    config.update(
        {
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.mlp,
        }
    )
    if shape.experts:
        sizes = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.active}
        return MixtralForCausalLM(MixtralConfig(**config.to_diff_dict() | {"model_type": "mixtral"} | sizes))
    return LlamaForCausalLM(config)
