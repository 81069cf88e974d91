"""``generate`` with grammars on the embedded pair."""

import json
import re
from typing import Any

import jsonschema
import pytest
import regex
import torch
import xgrammar

import triforce_tree
from tests.support.models.joining import Coming
from triforce_tree import Engine
from triforce_tree.grammar import EBNF, Choice, JSONObject, JSONSchema, Regex
from triforce_tree.requests.joining import Joined

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
PROMPT = "The following JSON object describes the first author of this module:\n"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return triforce_tree.load(dtype="float32")


def test_the_text_is_that_of_plain_decoding_under_the_same_masks(engine: Engine) -> None:
    vocabulary = engine.target.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(engine.tokenizer, vocab_size=vocabulary)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    ids = engine.tokenizer(PROMPT, return_tensors="pt")
    expected = engine.target.model.generate(
        **ids, max_new_tokens=60, logits_processor=[xgrammar.contrib.hf.LogitsProcessor(compiled)]
    )
    out = engine.generate(PROMPT, max_new_tokens=60, temperature=0, grammar=JSONSchema(SCHEMA))
    assert out.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("speculation", [None, "off"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_grammar_decides_where_options_forbid_all_that_it_allows(
    engine: Engine, temperature: float, speculation: str | None
) -> None:
    words = [engine.tokenizer.encode(text) for text in ("y", "ye", "yes")]
    out = engine.generate(
        ["Is it so? ", "The module", "Is it so? "], max_new_tokens=24, temperature=temperature, seed=[3] * 3,
        grammar=[Choice(["yes", "no"]), None, Choice(["yes"])], min_new_tokens=[12, None, None],
        bad_words_ids=[None, None, words], speculation=speculation,
    )  # fmt: skip
    assert out.text[0] in ("yes", "no")
    assert out.text[2] == "yes"
    assert [out.finish_reason[0], out.finish_reason[2]] == ["eos"] * 2
    alone = engine.generate("The module", max_new_tokens=24, temperature=temperature, seed=[3])
    assert out.text[1] == alone.text


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_batch_of_different_grammars(engine: Engine, temperature: float) -> None:
    grammars = [
        JSONSchema(SCHEMA), None, Choice(["Paris", "Rome \"é\\"]), Regex("[ab]{3,5}[.]"),
        EBNF('root ::= "(" root ")" | "x"'), JSONObject(),
    ]  # fmt: skip
    prompts = [PROMPT, "The module", "The capital is ", "ab", "((", PROMPT]
    out = engine.generate(prompts, max_new_tokens=60, temperature=temperature, grammar=grammars, seed=5)
    person, free, city, letters, nested, anything = out.text
    if out.finish_reason[0] == "eos":
        jsonschema.validate(json.loads(person), SCHEMA)
    assert out.finish_reason[2:4] == ["eos"] * 2
    assert city in ("Paris", 'Rome "é\\')
    assert re.fullmatch(r"[ab]{3,5}\.", letters)
    if out.finish_reason[4] == "eos":
        assert nested == "(" * (len(nested) // 2) + "x" + ")" * (len(nested) // 2)
    if out.finish_reason[5] == "eos":
        assert isinstance(json.loads(anything), dict)
    alone = engine.generate(prompts[1], max_new_tokens=60, temperature=0)
    assert temperature or free == alone.text


def test_scores_are_masked(engine: Engine) -> None:
    out = engine.generate(
        "ab", max_new_tokens=9, grammar=Regex("[ab]{3,5}[.]"), seed=1, temperature=0.7,
        output_scores=True, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.scores is not None
    assert out.logits is not None
    pieces, text = engine.tokenizer.batch_decode([[token] for token in range(engine.target.vocab_size)]), ""
    for scores, logits, token in zip(
        out.scores, out.logits, out.sequences[0, -out.new_tokens :], strict=True
    ):
        allowed = scores[0] > -torch.inf
        torch.testing.assert_close(scores[0, allowed], logits[0, allowed] / 0.7)
        whole = regex.fullmatch("[ab]{3,5}[.]", text) is not None
        expected = [
            id == engine.tokenizer.eos_token_id if whole
            else regex.fullmatch("[ab]{3,5}[.]", text + piece, partial=True) is not None
            for id, piece in enumerate(pieces)
        ]  # fmt: skip
        assert allowed.tolist() == expected
        text += pieces[token]
    assert out.finish_reason == "eos"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"grammar": "a+"}, "grammar='a\\+' must be one of triforce_tree.grammar's JSONSchema"),
        ({"grammar": [Regex("a"), None]}, "grammar has 2 entries for 1 sequences"),
        ({"grammar": Regex("a(")}, "cannot be compiled: .*parenthesis is not closed"),
        ({"grammar": EBNF("root ::= x")}, '"x" is not defined'),
        (
            {"grammar": JSONSchema({"type": "object", "minProperties": 1})},
            "cannot be compiled: minProperties",
        ),
        ({"grammar": Regex("a"), "num_beams": 2}, "grammar is not supported with num_beams=2"),
        ({"grammar": Regex("a"), "eos_token_id": []}, "grammar needs a token that ends the text"),
    ],
)
def test_wrong_grammars(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate("The", max_new_tokens=3, **options)


def test_a_grammar_needs_a_tokenizer(engine: Engine) -> None:
    without = Engine(engine.target.model)
    with pytest.raises(ValueError, match="grammar needs a tokenizer"):
        without.generate([1, 2, 3], max_new_tokens=3, grammar=Regex("a"))


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"unit": "celsius"}}\n</tool_call>'


@pytest.mark.parametrize("options", [{}, {"drafter": "lookup", "advanced": {"rounds": 1}}])
def test_forced_tokens_are_drafted(options: dict[str, Any]) -> None:
    """A text that the grammar forces takes few passes, though it occurs nowhere before."""
    engine = triforce_tree.load(levels=2, **options)
    short = {"max_new_tokens": 20, "temperature": 0}
    free = engine.generate("The weather in", **short)
    out = engine.generate("The weather in", max_new_tokens=90, temperature=0, grammar=Choice([CALL]))
    assert out.text == CALL
    assert out.levels is not None
    assert out.new_tokens > 60
    assert out.levels[-1].forwards <= out.new_tokens / 2
    # A sequence that joins others without a grammar has the same.
    coming = Coming([Joined(engine.tokenizer("The weather in")["input_ids"], 90, grammar=Choice([CALL]))], 2)
    engine.generate("The weather in", joining=coming, max_batch=2, **short)
    joined = coming.outputs[1]
    assert joined.finish_reason == "eos"
    assert joined.levels[-1].forwards <= joined.new_tokens / 2
    # Nothing is forced after it.
    assert engine.generate("The weather in", **short).text == free.text
