"""The option ``attention_backend``: another backend gives the same text, and impossible ones are refused."""

from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.families import prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.decoding.choice.stage_costs import settings_of
from triforce_tree.kernels.attention import backend as backends
from triforce_tree.verify.sampling import ProbsFromLogits


@pytest.fixture(scope="module", autouse=True)
def sdpa() -> None:
    """A backend that has only what every backend must have."""
    backends.register("sdpa", "tests.support.kernels.sdpa_backend", "SdpaBackend")


OPTIONS: dict[str, Any] = {"budget": 64, "chunk": 8, "recent": 16, "window": 16, "prefill_chunk": 16}


def engine(family: str, **options: Any) -> Engine:
    return triforce_tree.load(tiny(family), tiny(family, 1), **load_arguments({**OPTIONS, **options}))


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_the_text_is_the_same(family: str, levels: int) -> None:
    texts = {}
    for name in ("auto", "sdpa"):
        own = engine(family, levels=levels, attention_backend=name)
        prompt = prompt_of(90)
        texts[name] = own.generate(prompt, max_new_tokens=24, temperature=0.0).sequences.tolist()
    assert texts["sdpa"] == texts["auto"]


def test_texts_that_begin_alike_and_trees_of_texts() -> None:
    texts = {}
    for name in ("auto", "sdpa"):
        own = engine("llama-gqa", levels=2, attention_backend=name)
        prompt = prompt_of(90)
        many = [[*prompt, token] for token in (1, 2, 3)]
        tree = own.tree(prompt)
        forks = tree.fork(tree.root, 2)
        texts[name] = (
            own.generate(many, max_new_tokens=9, temperature=0.0).sequences.tolist(),
            [branch.tokens for branch in tree.generate(forks, max_new_tokens=5, temperature=0.0)],
        )
    assert texts["sdpa"] == texts["auto"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "flash"}, "attention_backend='flash' is not known; use auto, triton, cpu"),
        ({"attention_backend": 3}, "attention_backend=3 must be the name of a backend, or 'auto'"),
        ({"attention_backend": "triton"}, "attention_backend='triton' runs on cuda, not on cpu"),
        ({"attention_backend": "flashinfer"}, "attention_backend='flashinfer' runs on cuda, not on cpu"),
        ({"attention_backend": "sdpa", "kv_bits": 8}, "'sdpa' does not work with kv_bits=8"),
        ({"attention_backend": "sdpa", "exact": True}, "'sdpa' does not work with exact=True"),
        ({"attention_backend": "sdpa", "offload": True}, "'sdpa' does not work with an offloaded cache"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine("llama-gqa", **options)


def test_costs_are_kept_by_backend() -> None:
    found = []
    for name in ("auto", "cpu", "sdpa"):
        own = engine("llama-gqa", levels=2, attention_backend=name)
        own.generate(prompt_of(40), max_new_tokens=4, temperature=0.0)
        program = own.last_program
        assert program is not None
        found.append(settings_of(program, ProbsFromLogits(greedy=True))["attention"])
    assert found == ["cpu", "cpu", "sdpa"]
    assert torch.device("cpu") == program.device
