"""Models and tokenizers that ``load`` accepts, and its errors for anything else."""

from pathlib import Path

import pytest
import torch
from families import tiny
from tiny_pair import TinyPair
from transformers import PreTrainedTokenizerFast

import triforce_tree

MODEL = tiny("llama-gqa")


def test_a_tokenizer_may_be_a_folder(pair: TinyPair, tmp_path: Path) -> None:
    for source in (pair.target, Path(pair.target)):
        engine = triforce_tree.load(MODEL, tokenizer=source)
        assert isinstance(engine.tokenizer, PreTrainedTokenizerFast)
    engine.tokenizer.save_pretrained(tmp_path / "alone")
    assert triforce_tree.load(MODEL, tokenizer=tmp_path / "alone").tokenizer is not None


def test_an_invalid_tokenizer_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the tokenizer is of type Linear"):
        triforce_tree.load(MODEL, tokenizer=torch.nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        triforce_tree.load(MODEL, tokenizer=tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        triforce_tree.load(MODEL, tokenizer="./nowhere")
