"""Grammars as values: what they accept, and which schemas are refused because they cannot be enforced."""

import pickle
from typing import Any

import pytest

import triforce_tree
from triforce_tree.grammar import EBNF, Choice, JSONObject, JSONSchema, Regex

PERSON = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "a": {"type": "integer"}},
    "required": ["b"],
}


def test_grammars_are_values() -> None:
    assert triforce_tree.grammar.Regex("a+") == Regex("a+") != Regex("a")
    assert JSONSchema(PERSON) == JSONSchema(JSONSchema(PERSON).schema)
    given = {JSONSchema(PERSON), JSONObject(), Regex("a|b"), EBNF('root ::= "a"'), Choice(["a", "b"])}
    assert pickle.loads(pickle.dumps(given)) == given
    assert list(JSONSchema(PERSON).schema).index("b") < list(JSONSchema(PERSON).schema).index("a")


@pytest.mark.parametrize(
    "kind, value, message",
    [
        (JSONSchema, "{", "is not JSON: Expecting property name"),
        (JSONSchema, [1], "must be an object"),
        (JSONSchema, {"const": {1, 2}}, "is not JSON"),
        (Regex, "", "give a text of at least one character"),
        (EBNF, 3, "the EBNF grammar is 3; give a text"),
        (Choice, [], "must be a list of at least one text"),
        (Choice, "ab", "must be a list"),
        (Choice, ["a", ""], "an option of a choice is ''"),
        (Regex, "\ud800", "lone surrogate"),
    ],
)
def test_wrong_values(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(value)


NUMBER, TEXT = {"type": "number"}, {"type": "string"}


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "integer", "not": {}}, "the schema has 'not', which cannot be enforced for integer"),
        ({"type": "array", "uniqueItems": True}, "has 'uniqueItems'"),
        ({"minimum": 3}, "has 'minimum' without 'type'"),
        ({"type": "strnig"}, "has the type 'strnig'; give one of string, integer"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "'pattern' beside a length"),
        ({"type": "object", "required": ["z"]}, "requires 'z', which is not among its 'properties'"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, r"the schema.properties.a has 'if'"),
        ({"type": "array", "items": [TEXT]}, "its name is 'prefixItems'"),
        ({"type": "array", "prefixItems": [TEXT, {"contains": {}}]}, r"prefixItems\[1\] has 'contains'"),
        ({"anyOf": [TEXT], "type": "string"}, "has 'type' beside 'anyOf'"),
        ({"allOf": [TEXT, NUMBER]}, "'allOf' with several schemas"),
        ({"oneOf": [NUMBER, {"type": "integer"}]}, "'oneOf' whose schemas may hold for the same value"),
        ({"$ref": "other.json"}, "refers to 'other.json'; only '#'"),
        ({"$ref": "#/$defs/a"}, "which the schema does not have"),
        ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}, "minLength": 2}, "has 'minLength' beside '\\$ref'"),
        (
            {"$defs": {"a": {"type": "array", "minContains": 1}}, "type": "null"},
            r"\$defs.a has 'minContains'",
        ),
        ({"type": "string", "const": 3}, "has the value 3, which is not of its 'type'"),
        ({"enum": []}, "no list of at least one value"),
        ({"type": "object", "properties": {"a": False}}, "a is False"),
        ({"type": "object", "additionalProperties": TEXT, "minProperties": 1}, "names, which may repeat"),
        (
            {"type": "object", "patternProperties": {"a": TEXT, "b": TEXT}},
            "'patternProperties' beside others",
        ),
        ({"type": "object", "properties": {'a"': TEXT}, "additionalProperties": True}, "which JSON escapes"),
        ({"maxProperties": 2}, "has 'maxProperties' without 'type'"),
        ({"type": "object", "unevaluatedProperties": False}, "'unevaluatedProperties', which cannot"),
        ({"type": "array", "unevaluatedItems": False}, "has 'unevaluatedItems'"),
    ],
)
def test_schemas_that_cannot_be_enforced(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JSONSchema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [TEXT, NUMBER]},
        {"oneOf": [{"const": 1}, {"enum": [2, 3]}]},
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
                for kind in ("a", "b")
            ]
        },
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "x-order": 3},
        {"type": ["integer", "null"], "minimum": 3, "title": "number", "default": None},
        {"allOf": [{"$ref": "#/definitions/a~1b"}], "definitions": {"a/b": TEXT}},
        {"type": "array", "uniqueItems": False, "items": {"enum": [1, "a", None]}},
    ],
)
def test_schemas_that_can_be_enforced(schema: dict[str, Any]) -> None:
    JSONSchema(schema)
