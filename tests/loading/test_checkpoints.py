"""Models and tokenizers that ``load`` accepts, and its errors for anything else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import triforce_tree
from tests.support.models.families import greedy, prompt_of, tiny
from tests.support.models.tiny_pair import TinyPair

MODEL = tiny("llama-gqa")


def test_a_tokenizer_may_be_a_folder(pair: TinyPair, tmp_path: Path) -> None:
    for source in (pair.target, Path(pair.target)):
        engine = triforce_tree.load(MODEL, tokenizer=source)
        assert isinstance(engine.tokenizer, PreTrainedTokenizerFast)
    engine.tokenizer.save_pretrained(tmp_path / "alone")
    assert triforce_tree.load(MODEL, tokenizer=tmp_path / "alone").tokenizer is not None


def test_an_invalid_tokenizer_is_refused_at_load(tmp_path: Path) -> None:
    for odd in (torch.nn.Linear(2, 2), 5, {"a": 1}):
        with pytest.raises(TypeError, match=rf"^the tokenizer is of type {type(odd).__name__}[^\n]*$"):
            triforce_tree.load(MODEL, tokenizer=odd)
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        triforce_tree.load(MODEL, tokenizer=tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        triforce_tree.load(MODEL, tokenizer="./nowhere")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "edit",
    [
        {"rope_parameters": {**YARN, "rope_theta": 10_000.0}, "max_position_embeddings": 256},
        # Model cards describe it like this, together with the original number of positions.
        {"rope_scaling": YARN, "rope_theta": 10_000.0, "rope_parameters": None},
    ],
)
def test_yarn_in_config_json_extends_a_model(edit: dict[str, Any], tmp_path: Path) -> None:
    tiny("llama-gqa", max_position_embeddings=64).save_pretrained(tmp_path)
    ids, options = prompt_of(150), {"max_new_tokens": 12, "do_sample": False}
    with pytest.raises(ValueError, match="exceed the model's 64 positions"):
        triforce_tree.load(tmp_path).generate(ids, **options)
    plain = greedy(AutoModelForCausalLM.from_pretrained(tmp_path), ids, 12)
    arguments = edit if "max_position_embeddings" in edit else {}
    as_arguments = greedy(AutoModelForCausalLM.from_pretrained(tmp_path, **arguments), ids, 12)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in (config | edit).items() if value is not None}))
    expected = greedy(AutoModelForCausalLM.from_pretrained(tmp_path), ids, 12)
    assert expected != plain
    assert as_arguments == (expected if arguments else plain)
    engine = triforce_tree.load(tmp_path, levels=3, budget=64, advanced={"recent": 32})
    assert engine.generate(ids, **options).sequences[0, 150:].tolist() == expected
    assert engine.target.max_positions == 256
    with pytest.raises(ValueError, match="exceed the model's 256 positions"):
        engine.generate(prompt_of(250), **options)
