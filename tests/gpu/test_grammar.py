"""Grammars under captured stages: every sequence of a batch follows its own, with drafts and without."""

import json
import re

import pytest
import torch

from tests.support.models.pair_on_gpu import FIXED, long_text, pair_on
from triforce_tree.config import load_arguments
from triforce_tree.grammar import Choice, Grammar, JSONSchema, Regex

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
GRAMMARS: list[Grammar | None] = [
    JSONSchema(SCHEMA), None, Regex("[a-d]{3,9}[.]"), Choice(["import", "imports two modules"]),
    Regex("([A-Z][a-z]{1,5} ){4}"), JSONSchema(SCHEMA), None, Choice([*"abc"]),
]  # fmt: skip
OPTIONS = [
    {"levels": 1},
    {"levels": 2, "tree": "chain:4"},
    {"levels": 2, "tree": "best-first:4,3,2"},
    {"levels": 3},
    {"levels": 3, "tail_tree": True},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_sequence_follows_its_own_grammar(temperature: float) -> None:
    engine, text = pair_on(DEVICE, torch.float32, **FIXED), long_text()
    prompts = [text[500 * i : 500 * i + 700] for i in range(len(GRAMMARS))]
    assert engine.tokenizer is not None
    how = {
        "grammar": GRAMMARS, "max_new_tokens": 60, "temperature": temperature, "seed": 1,
        "eos_token_id": engine.tokenizer.eos_token_id,
    }  # fmt: skip
    found = []
    for options in OPTIONS:
        made = engine.with_options(**load_arguments(options))
        out = made.generate(prompts, **how)
        for new, why, grammar in zip(out.text, out.finish_reason, GRAMMARS, strict=True):
            if grammar is None or why != "eos":
                continue
            if isinstance(grammar, JSONSchema):
                assert json.loads(new).keys() == {"name", "age"}
            elif isinstance(grammar, Choice):
                assert new in grammar.options
            else:
                assert re.fullmatch(grammar.pattern, new)
        assert [out.finish_reason[i] for i in (2, 3, 4, 7)] == ["eos"] * 4
        found.append(out.text)
    if not temperature:
        for options, texts in zip(OPTIONS, found, strict=True):
            assert texts == found[0], options
