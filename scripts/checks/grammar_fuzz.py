"""Checks that generated JSON is valid under its schema, for random schemas and for a public suite of schemas.

``python -m scripts.checks.grammar_fuzz`` generates a text for each random schema with the embedded pair, in
batches of different schemas, with one, two and three levels in turn, and validates every text that has ended
by ``jsonschema``.

``--suite FOLDER`` reads schemas with valid and invalid values in the layout of JSON-Schema-Test-Suite (the
source distribution of ``jsonschema`` has it in ``json/tests/draft2020-12``). Schemas that cannot be enforced
must be refused, and the grammar of any other must allow none of its invalid values. Nothing is generated for
it.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from transformers import PreTrainedTokenizerBase

import triforce_tree
from triforce_tree import Engine
from triforce_tree.grammar import JSONSchema
from triforce_tree.grammar.matching import Grammars, Matcher

_WORDS = ("name", "value", "kind", "items", "é", 'a"b', "x/y", "the key", "0", "next")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
_PATTERNS = ("^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(ab|cd)+$", "^[^x]{1,4}$", r"^\w+\.$")
_PROMPT = "The standard type hierarchy is described below.\n\nThe same as JSON:\n\n"
_TOGETHER = 6


class Checked(NamedTuple):
    """A schema and its text.

    Attributes:
        problem: what is wrong; None if the text is valid, or the beginning of a valid text.
        ended: whether the text has ended.
    """

    schema: dict[str, Any]
    text: str
    ended: bool
    problem: str | None


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """Returns a random schema of keywords that can be enforced, at most ``depth`` levels deep."""
    leaves = [_string, _integer, _number, _enum, lambda _: {"type": draw.choice(("boolean", "null"))}]
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(leaves)(draw)
    kind = draw.choice(
        ("object", "object", "object", "array", "tuple", "anyOf", "oneOf", "types", "map", "ref")
    )
    if kind == "object":
        return _object(draw, depth)
    if kind == "array":
        least = draw.randint(0, 2)
        return {
            "type": "array", "items": random_schema(draw, depth - 1), "minItems": least,
            "maxItems": least + draw.randint(0, 2),
        }  # fmt: skip
    if kind == "tuple":
        parts = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return {
            "type": "array",
            "prefixItems": parts,
            "items": False,
            "minItems": draw.randint(0, len(parts)),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
    if kind == "oneOf":
        return {"oneOf": [_integer(draw), _string(draw), _object(draw, depth)]}
    if kind == "types":
        return {"type": draw.sample(["string", "integer", "boolean", "null"], 2)}
    if kind == "map":
        return {
            "type": "object", "additionalProperties": random_schema(draw, depth - 1),
            "maxProperties": draw.randint(0, 3),
        }  # fmt: skip
    name = f"part{draw.randint(0, 9)}"
    return {"$ref": f"#/$defs/{name}", "$defs": {name: random_schema(draw, depth - 1)}}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    others = draw.random() < 0.2
    # Names that JSON escapes are refused beside additional properties.
    words = [word for word in _WORDS if not others or word != 'a"b']
    names = draw.sample(words, draw.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object", "properties": {name: random_schema(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
    }  # fmt: skip
    if others:
        schema |= {"additionalProperties": _integer(draw), "maxProperties": len(names) + 1}
    elif draw.random() < 0.3:
        schema["minProperties"] = draw.randint(0, len(names))
    return schema


def _string(draw: random.Random) -> dict[str, Any]:
    least = draw.randint(0, 4)
    more: dict[str, Any] = draw.choice(
        (
            {"minLength": least, "maxLength": least + draw.randint(0, 9)}, {"maxLength": draw.randint(0, 20)},
            {"pattern": draw.choice(_PATTERNS)}, {"format": draw.choice(_FORMATS)},
        )
    )  # fmt: skip
    return {"type": "string", **more}


def _integer(draw: random.Random) -> dict[str, Any]:
    least = draw.randint(-200, 200)
    bounds = {"minimum": least, "maximum": least + draw.randint(0, 3000)}
    more: dict[str, Any] = draw.choice(
        (
            bounds,
            {"exclusiveMinimum": least, "exclusiveMaximum": least + 9},
            {"multipleOf": draw.randint(1, 9)},
        )
    )
    return {"type": "integer", **more}


def _number(draw: random.Random) -> dict[str, Any]:
    least = draw.randint(-50, 50) / 4
    return {"type": "number", "minimum": least, "maximum": least + draw.randint(0, 9)}


def _enum(draw: random.Random) -> dict[str, Any]:
    values = [draw.choice(_WORDS), draw.randint(-9, 9), None, True, [1, "a"], {"b": draw.random()}]
    return {"enum": draw.sample(values, draw.randint(1, 4))} if draw.random() < 0.7 else {"const": values[0]}


def _hoisted(schema: Any, definitions: dict[str, Any]) -> Any:
    """Moves all $defs into ``definitions`` under new names, because references begin at the root."""
    if isinstance(schema, list):
        return [_hoisted(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        [part] = schema["$defs"].values()
        name = f"d{len(definitions)}"
        definitions[name] = None
        definitions[name] = _hoisted(part, definitions)
        return {"$ref": f"#/$defs/{name}"}
    return {key: _hoisted(part, definitions) for key, part in schema.items()}


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns random schemas whose grammars compile: some ask for impossible values."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        definitions: dict[str, Any] = {}
        schema = _hoisted(random_schema(draw), definitions)
        found.append(schema | ({"$defs": definitions} if definitions else {}))
    return found


def checked_texts(engine: Engine, given: list[dict[str, Any]], seed: int, tokens: int) -> list[Checked]:
    """Generates a text for each schema, together, and validates them."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    # White space between tokens of JSON is never needed, and a small model does not stop writing it.
    blanks = [id for id in range(engine.target.vocab_size) if not tokenizer.decode([id]).strip(" \n\t\r")]
    blanks = [id for id in blanks if id != tokenizer.eos_token_id]
    grammars = [JSONSchema(schema) for schema in given]
    out = engine.generate(
        [_PROMPT] * len(given), grammar=grammars, max_new_tokens=tokens, temperature=1.0, seed=seed,
        suppress_tokens=blanks,
    )  # fmt: skip
    assert isinstance(out.finish_reason, list)
    return [
        Checked(schema, text, reason == "eos", _problem(schema, text, reason == "eos"))
        for schema, text, reason in zip(given, out.text, out.finish_reason, strict=True)
    ]


def _problem(schema: dict[str, Any], text: str, ended: bool) -> str | None:
    if not ended:  # the matcher of its sequence has accepted each of its tokens
        return None
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def suite_cases(folder: Path) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Yields the name, the schema and the tests of each case of a suite."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"{folder} has no .json file; give a folder like tests/draft2020-12")
    for file in files:
        for case in json.loads(file.read_text()):
            if isinstance(case["schema"], dict):
                yield f"{file.stem}: {case['description']}", case["schema"], case["tests"]


def suite_problems(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[Counter[str], list[str]]:
    """Returns the numbers of schemas by what became of them, and the invalid values that grammars allow."""
    grammars, counts, problems = Grammars(tokenizer, len(tokenizer)), Counter[str](), list[str]()
    for name, schema, tests in suite_cases(folder):
        try:
            matcher = grammars.matcher(JSONSchema(schema), [tokenizer.eos_token_id])
        except ValueError:
            counts["refused"] += 1
            continue
        counts["enforced"] += 1
        for test in tests:
            counts["valid" if test["valid"] else "invalid"] += 1
            allowed = any(_allows(matcher, tokenizer, text) for text in _spellings(test["data"]))
            if allowed and not test["valid"]:
                problems.append(f"{name}: {json.dumps(test['data'])}")
            counts["valid and allowed"] += allowed and test["valid"]
    return counts, problems


def _spellings(value: Any) -> set[str]:
    return {
        json.dumps(value, separators=separators, ensure_ascii=ascii)
        for separators in ((",", ":"), (", ", ": "))
        for ascii in (True, False)
    }


def _allows(matcher: Matcher, tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Returns whether a grammar allows a text, and its end."""
    state: Matcher | None = matcher
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        state = None if state is None else state.after(token)
    return state is not None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="random schemas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=200, help="most new tokens of a text")
    parser.add_argument("--suite", type=Path, help="a folder of JSON-Schema-Test-Suite; nothing is generated")
    args = parser.parse_args()
    loaded = triforce_tree.load()
    if args.suite is not None:
        assert loaded.tokenizer is not None
        counts, problems = suite_problems(loaded.tokenizer, args.suite)
        print(dict(counts))
        for problem in problems:
            print(f"an invalid value is allowed: {problem}")
        return int(bool(problems))
    engines = [
        loaded.with_options(levels=1), loaded.with_options(levels=2),
        loaded.with_options(levels=3, budget=8, advanced={"chunk": 2, "recent": 4, "sinks": 1, "window": 8}),
    ]  # fmt: skip
    given, ended, failed = schemas(args.count, args.seed), 0, 0
    for first in range(0, len(given), _TOGETHER):
        engine = engines[first // _TOGETHER % len(engines)]
        for checked in checked_texts(
            engine, given[first : first + _TOGETHER], args.seed + first, args.tokens
        ):
            ended += checked.ended
            if checked.problem is not None:
                failed += 1
                print(f"{checked.problem}\n  schema {json.dumps(checked.schema)}\n  text   {checked.text}")
        print(f"{first + _TOGETHER} texts, {ended} ended, {failed} not valid", file=sys.stderr)
    print(f"{len(given)} schemas: {ended} texts have ended, {failed} of them are not valid")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
