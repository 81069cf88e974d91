"""What ``load`` takes for a model or a tokenizer, and what it says of anything else."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import greedy, prompt_of, tiny
from test_bad_input import says
from tiny_pair import TinyPair
from transformers import PreTrainedTokenizerFast

import triforce_tree

MODEL = tiny("llama-gqa")


def test_the_model_inside_a_compiled_one_is_taken() -> None:
    compiled = torch.compile(MODEL, backend="eager")
    engine = triforce_tree.load(compiled, compiled)
    assert engine.hierarchy.target.model is MODEL
    out = engine.generate(prompt_of(40), max_new_tokens=5, do_sample=False)
    assert out.sequences[0, 40:].tolist() == greedy(MODEL, prompt_of(40), 5)


def test_a_wrapper_is_named() -> None:
    with pytest.raises(TypeError, match=says("SimpleNamespace", "merge_and_unload")):
        triforce_tree.load(SimpleNamespace(peft_config={}))
    with pytest.raises(TypeError, match=says("Linear", "no transformers model, folder or hub id")):
        triforce_tree.load(MODEL, torch.nn.Linear(2, 2))


def test_a_tokenizer_may_be_a_folder(pair: TinyPair, tmp_path: Path) -> None:
    for source in (pair.target, Path(pair.target)):
        engine = triforce_tree.load(MODEL, tokenizer=source)
        assert isinstance(engine.tokenizer, PreTrainedTokenizerFast)
    engine.tokenizer.save_pretrained(tmp_path / "alone")
    assert triforce_tree.load(MODEL, tokenizer=tmp_path / "alone").tokenizer is not None


def test_what_is_no_tokenizer_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tokenizer is a Linear"):
        triforce_tree.load(MODEL, tokenizer=torch.nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        triforce_tree.load(MODEL, tokenizer=tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        triforce_tree.load(MODEL, tokenizer="./nowhere")
