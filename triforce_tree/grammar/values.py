"""The kinds of grammars that a user may give, as values that can be compared, hashed and pickled."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triforce_tree.grammar.json_schema import check_schema
from triforce_tree.option_checks import shortened


@dataclass(frozen=True, init=False)
class JSONSchema:
    """JSON that is valid under a schema. Objects have no properties but those that the schema names, unless
    it sets ``additionalProperties``.

    Args:
        schema: the schema, as a dict or as JSON text. The order of ``properties`` is that of the text.

    Attributes:
        schema: the schema as JSON text.

    Raises:
        ValueError: the text is not JSON, or the schema has a keyword that cannot be enforced.
    """

    schema: str

    def __init__(self, schema: dict[str, Any] | str) -> None:
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema {shortened(schema)} is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ValueError(
                f"the JSON schema {shortened(schema)} must be an object, such as {{'type': 'object'}}"
            )
        check_schema(parsed)
        object.__setattr__(self, "schema", text)


@dataclass(frozen=True)
class JSONObject:
    """Any JSON object."""


@dataclass(frozen=True)
class Regex:
    """Text that matches a regular expression from its beginning to its end.

    Args:
        pattern: the expression.
    """

    pattern: str

    def __post_init__(self) -> None:
        _check_text("the regular expression", self.pattern)


@dataclass(frozen=True)
class EBNF:
    """Text that a context-free grammar produces.

    Args:
        text: rules ``name ::= ...`` in the notation of GBNF; the text is derived from the rule ``root``.
    """

    text: str

    def __post_init__(self) -> None:
        _check_text("the EBNF grammar", self.text)


@dataclass(frozen=True, init=False)
class Choice:
    """One of several texts.

    Args:
        options: the texts, each of at least one character.
    """

    options: tuple[str, ...]

    def __init__(self, options: Sequence[str]) -> None:
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise ValueError(f"the choice {shortened(options)} must be a list of at least one text")
        for option in options:
            _check_text("an option of a choice", option)
        object.__setattr__(self, "options", tuple(options))


Grammar = JSONSchema | JSONObject | Regex | EBNF | Choice


def grammars_of(value: Any, count: int) -> list[Grammar | None] | None:
    """Returns the grammar of each of ``count`` prompts, or None if no prompt has one.

    Args:
        value: one grammar for all prompts, or a list with a grammar or None for each; None for none.

    Raises:
        ValueError: the value is something else, or the list has another length.
    """
    each = value if isinstance(value, list | tuple) else [value] * count
    if len(each) != count:
        raise ValueError(
            f"grammar has {len(each)} entries for {count} sequences; give one for each, or one for all"
        )
    for one in each:
        if one is not None and not isinstance(one, Grammar):
            raise ValueError(
                f"grammar={shortened(one)} must be one of triforce_tree.grammar's JSONSchema, JSONObject, "
                "Regex, EBNF or Choice, or a list with one (or None) for each prompt"
            )
    return None if all(one is None for one in each) else list(each)


def _check_text(what: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{what} is {shortened(text)}; give a text of at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {shortened(text)} has a lone surrogate: {error}; remove it") from error
