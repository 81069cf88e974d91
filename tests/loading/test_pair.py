"""The pair of small models in the package: ordinary model folders, exact on real text."""

import pydoc_data.topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import triforce_tree
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import PAIR

PROMPT_TOKENS = 3000


@pytest.fixture(scope="module")
def engine() -> triforce_tree.Engine:
    """Returns the default engine, with the models in the package, on the CPU in fp32."""
    return triforce_tree.load(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompt(engine: triforce_tree.Engine) -> list[int]:
    text = "\n".join(pydoc_data.topics.topics.values())[:40_000]
    return engine.tokenizer(text)["input_ids"][:PROMPT_TOKENS]


@pytest.mark.parametrize("which", ["target", "draft"])
def test_the_pair_loads_with_transformers_alone(which: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / which)
    model = AutoModelForCausalLM.from_pretrained(PAIR / which, use_safetensors=True)
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) <= model.config.vocab_size
    text = "The quick brown fox: naïve café,\n\tx = 3.14"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    parameters = sum(weight.numel() for weight in model.parameters())
    most, head = {"target": (16e6, 128), "draft": (2.5e6, 64)}[which]
    assert parameters <= most
    assert model.config.head_dim == head


def test_the_target_has_full_heads_and_128k_positions() -> None:
    config = AutoModelForCausalLM.from_pretrained(PAIR / "target").config
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.max_position_embeddings >= 128 * 1024 - 8


def test_package_size_and_model_card() -> None:
    files = [path for path in PAIR.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 40e6
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")]
    card = (PAIR / "README.md").read_text(encoding="utf-8").lower()
    for word in ("corpus", "licen", "apache", "needle", "pydoc"):
        assert word in card


@pytest.mark.slow
def test_three_levels_equal_the_targets_greedy_output(
    engine: triforce_tree.Engine, prompt: list[int]
) -> None:
    """In fp32 all greedy tokens are equal, and most drafted tokens are accepted."""
    options = {"max_new_tokens": 96, "do_sample": False}
    expected = engine.target.model.generate(torch.tensor([prompt]), **options)
    # The rounds are fixed, as times by the tests' clock would choose passes without drafts.
    for settings in ({"rounds": 2}, {"rounds": 1, "budget": 256, "recent": 128, "gamma": 6}):
        out = engine.with_options(**load_arguments({"levels": 3, **settings})).generate(prompt, **options)
        assert out.sequences.tolist() == expected.tolist()
        _, retrieval, target = out.levels
        assert retrieval.acceptance_rate > 0.2
        assert target.acceptance_rate > 0.5
        assert target.mean_accepted_length > 3


def test_a_text_prompt_is_continued(engine: triforce_tree.Engine) -> None:
    out = engine.generate("The for statement is used to", max_new_tokens=12, do_sample=False)
    assert len(out.text) > 12
    assert out.text.isprintable() or "\n" in out.text
