"""What all formats of tool calls share: the call, its errors, and the reading of arguments."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

Schema = Mapping[str, Any]
# The JSON schemas of the arguments of the tools that a request offers, by name.
Tools = Mapping[str, Schema]
# A part of an xgrammar structural tag, as JSON.
Shape = dict[str, Any]


class Call(NamedTuple):
    """A tool call; ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


class MalformedCallError(ValueError):
    """A text that begins like a tool call is none, and is shown as text."""


class UnfinishedCallError(MalformedCallError):
    """A closing marker was found within a string, so the call may go on after it."""


def arguments_of(value: Any) -> str:
    """Returns the arguments of a call, an object or its JSON text, as JSON text.

    Raises:
        MalformedCallError: the arguments are not an object.
    """
    if isinstance(value, str):
        value = parsed(value)[0]
    if not isinstance(value, dict):
        raise MalformedCallError("the arguments are not an object")
    return json.dumps(value, ensure_ascii=False)


def call_of(value: Any) -> Call:
    """Returns the call in an object with ``name`` and ``arguments`` or ``parameters``.

    Raises:
        MalformedCallError: the value is not such an object.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise MalformedCallError("the call has no name")
    given = value.get("arguments", value.get("parameters"))
    return Call(value["name"], arguments_of({} if given is None else given))


def parsed(text: str, start: int = 0) -> tuple[Any, int]:
    """Returns the JSON value that begins at ``start``, after whitespace, and the place after it.

    Raises:
        UnfinishedCallError: the text ends within a string.
        MalformedCallError: there is no JSON value.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        kind = UnfinishedCallError if error.msg.startswith("Unterminated string") else MalformedCallError
        raise kind(error.msg) from error
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(str(error)) from error


def only(text: str) -> Any:
    """Returns the JSON value that is the whole text.

    Raises:
        MalformedCallError: the text is not one JSON value.
    """
    value, end = parsed(text)
    if text[end:].strip():
        raise MalformedCallError("text follows the call")
    return value


def is_text(schema: Any) -> bool:
    """Returns whether an argument that a model writes without quotes is a text by its schema."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    types = {declared} if isinstance(declared, str) else set(declared or ())
    alternatives = isinstance(schema, Mapping) and ("anyOf" in schema or "oneOf" in schema)
    return types == {"string"} or not (types or alternatives)


def typed(text: str, schema: Any) -> Any:
    """Returns the value of an argument that a model wrote without quotes, by the type in its schema."""
    if is_text(schema):
        return text
    try:
        return only({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except MalformedCallError:
        return text


# Most successive blanks between the parts of a constrained JSON text. Without a limit a model may write
# blanks for ever.
_MOST_BLANKS = 32


def tag(begin: str, content: Shape, end: str) -> Shape:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_shape(schema: Schema, **more: Any) -> Shape:
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": _MOST_BLANKS, **more}


def constant(text: str) -> Shape:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Shape:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Shape) -> Shape:
    return {"type": "sequence", "elements": list(elements)}


def optional(shape: Shape) -> Shape:
    return {"type": "optional", "content": shape}


def separated(tags: list[Shape], separator: str, several: bool) -> Shape:
    """Returns the structure of one of ``tags``, or of one or several."""
    return {
        "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
        "stop_after_first": not several,
    }  # fmt: skip


def call_tags(tools: Tools, begin: str, end: str, **more: Any) -> list[Shape]:
    """Returns the structure of a call of each tool, with its name in place of ``%s`` in ``begin``."""
    return [tag(begin % name, json_shape(schema, **more), end) for name, schema in tools.items()]


def calls_shape(tools: Tools, several: bool, begin: str, end: str, separator: str = "", **more: Any) -> Shape:
    """Returns the structure of one call of the tools, or of one or several; see :func:`call_tags`."""
    return separated(call_tags(tools, begin, end, **more), separator, several)


def _no_number(text: str) -> NoReturn:
    raise MalformedCallError(f"{text} is no JSON")


# Models write line feeds in strings without escapes.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)
