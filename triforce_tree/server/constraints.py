"""Reads what the text of a request must be: ``response_format``, ``guided_*``, tools and ``tool_choice``."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triforce_tree.grammar import Choice, JSONSchema
from triforce_tree.runtime.files.json_files import json_depth
from triforce_tree.server.refusals import RefusedError, wrong
from triforce_tree.server.tools.calls import Schema, Shape, Tools, constant, json_shape

# Limits of schemas, grammars and tools. The nesting is limited since compilers are recursive.
_MOST_CHARACTERS, _MOST_NESTED, _MOST_TOOLS = 262_144, 64, 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_OBJECT: Schema = {"type": "object"}
# The parameters of a tool that gives none, as OpenAI defines them.
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}}
# Takes a field of a request by its name, or None.
Take = Callable[[str], Any]


@dataclass(frozen=True)
class Offer:
    """The tools of a request.

    Attributes:
        tools: the tools as the chat template reads them.
        schemas: the schemas of their arguments by name.
        enabled: whether the model may call them.
        forced: schemas of the tools of which at least one must be called; empty if none must be. A schema
            that grammars cannot enforce is replaced by one of any object, unless the tool is strict.
        guarded: schemas of all tools, if one of them is strict and the model decides whether it calls any;
            else empty. Those of the others allow any object.
        parallel: whether a message may have several calls; one is enough where a tool is named.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    schemas: Tools = field(default_factory=dict)
    enabled: bool = False
    forced: Tools = field(default_factory=dict)
    guarded: Tools = field(default_factory=dict)
    parallel: bool = True


def content_shape(take: Take) -> Shape | None:
    """Returns the structure that a request demands of the content, or None.

    Raises:
        RefusedError: a value is wrong, or several fields demand something.
    """
    found: list[tuple[str, Shape | None]] = []
    if (given := take("response_format")) is not None:
        found.append(("response_format", _response_format(given)))
    for name, read in _GUIDED.items():
        if (given := take(f"guided_{name}")) is not None:
            found.append((f"guided_{name}", read(f"guided_{name}", given)))
    if (given := take("structured_outputs")) is not None:
        # Clients of vLLM send all members of its class.
        asked = {
            name: value for name, value in (given.items() if isinstance(given, dict) else ())
            if value is not None and not (value is False and name in _SWITCHES)
        }  # fmt: skip
        if len(asked) != 1 or not asked.keys() <= {*_GUIDED, "json_object"}:
            kinds = ", ".join([*_GUIDED, "json_object"])
            raise wrong("structured_outputs", given, f"must be an object with one of {kinds}")
        [(name, value)] = asked.items()
        name = "json" if name == "json_object" else name
        value = _OBJECT if value is True else value
        found.append(("structured_outputs", _GUIDED[name]("structured_outputs", value)))
    demands = [(name, shape) for name, shape in found if shape is not None]
    if len(demands) > 1:
        names = " and ".join(name for name, _ in demands)
        raise RefusedError(f"{names} are given together; give one of them", param=demands[1][0])
    return demands[0][1] if demands else None


def offer(take: Take) -> Offer:
    """Returns the tools of a chat.

    Raises:
        RefusedError: a tool is wrong, or ``tool_choice`` does not fit the tools.
    """
    given, choice, parallel = take("tools"), take("tool_choice"), take("parallel_tool_calls")
    if parallel is not None and type(parallel) is not bool:
        raise wrong("parallel_tool_calls", parallel, "must be true or false")
    if given is not None and (not isinstance(given, list) or len(given) > _MOST_TOOLS):
        raise wrong("tools", given, f"must be a list of at most {_MOST_TOOLS} tools")
    if not given:
        if choice not in (None, "none", "auto"):
            raise RefusedError("tool_choice is given without tools; give tools", param="tool_choice")
        return Offer()
    functions = [_function(tool, number) for number, tool in enumerate(given)]
    schemas = {each["name"]: each.get("parameters", _NO_PARAMETERS) or _OBJECT for each in functions}
    if len(schemas) != len(functions):
        raise RefusedError("two tools have the same name; give each another one", param="tools")
    named = _named(choice)
    if named is None and choice not in (None, "none", "auto", "required"):
        raise wrong(
            "tool_choice", choice,
            'must be "auto", "none", "required", or {"type": "function", "function": {"name": "..."}}',
        )  # fmt: skip
    if named is not None and named not in schemas:
        raise RefusedError("tool_choice names a tool that is not among tools; offer it", param="tool_choice")
    forced = {
        each["name"]: _enforced(each, schemas[each["name"]])
        for each in functions
        if choice == "required" or each["name"] == named
    }
    guarded = {}
    if choice in (None, "auto") and any(each.get("strict") is True for each in functions):
        guarded = {
            each["name"]: _enforced(each, schemas[each["name"]]) if each.get("strict") is True else _OBJECT
            for each in functions
        }
    tools = [{"type": "function", "function": each} for each in functions]
    return Offer(tools, schemas, choice != "none", forced, guarded, parallel is not False and not named)


def check_size(name: str, value: Any) -> None:
    """Raises RefusedError if a JSON value is too long or nested too deeply for a compiler."""
    if json_depth(value, _MOST_NESTED) > _MOST_NESTED:
        raise RefusedError(f"{name} is nested deeper than {_MOST_NESTED} levels; flatten it", param=name)
    if len(value if isinstance(value, str) else json.dumps(value)) > _MOST_CHARACTERS:
        raise RefusedError(f"{name} has more than {_MOST_CHARACTERS:,} characters; shorten it", param=name)


def _response_format(given: Any) -> Shape | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_shape(_OBJECT)
    if kind == "json_schema":
        # OpenAI's chats put the schema into an object of its own; its responses do not.
        own = given["json_schema"] if isinstance(given.get("json_schema"), dict) else given
        if isinstance(own.get("schema"), dict):
            return _schema_shape("response_format", own["schema"])
        raise RefusedError("response_format has no schema; give json_schema.schema", param="response_format")
    raise wrong(
        "response_format", given, 'must be an object whose type is "text", "json_object" or "json_schema"'
    )


def _schema_shape(name: str, given: Any) -> Shape:
    check_size(name, given)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise RefusedError(f"{name} is no JSON; give a schema", param=name) from None
        check_size(name, given)
    if not isinstance(given, dict):
        raise wrong(name, given, "must be a JSON schema, an object or its text")
    try:
        JSONSchema(given)
    except ValueError as problem:
        raise RefusedError(f"{name} is refused: {problem}", param=name) from problem
    return json_shape(given)


def _text_of(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise wrong(name, given, "must be a text that is not empty")
    check_size(name, given)
    return given


def _choice_shape(name: str, given: Any) -> Shape:
    check_size(name, given)
    try:
        options = Choice(given).options
    except ValueError:
        raise wrong(name, given, "must be a list of texts that are not empty") from None
    return {"type": "or", "elements": [constant(option) for option in options]}


_GUIDED: Mapping[str, Callable[[str, Any], Shape]] = {
    "json": _schema_shape,
    "regex": lambda name, given: {"type": "regex", "pattern": _text_of(name, given)},
    "choice": _choice_shape,
    "grammar": lambda name, given: {"type": "grammar", "grammar": _text_of(name, given)},
}
# Members of ``structured_outputs`` that ask for nothing if they are false.
_SWITCHES = (
    "json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties"
)  # fmt: skip


def _function(tool: Any, number: int) -> dict[str, Any]:
    """Returns the checked function of a tool without entries that are null."""
    where = f"tools[{number}]"
    own = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else 0
    if not isinstance(own, dict):
        raise RefusedError(f"{where} is no function; give {_TOOL}", param="tools")
    name, parameters = own.get("name"), own.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RefusedError(
            f"{where} has no name of at most 128 letters, digits, dots, dashes and underscores; give {_TOOL}",
            param="tools",
        )
    if not isinstance(own.get("description") or "", str):
        raise RefusedError(f"the description of {where} is no text; give one", param="tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise RefusedError(f"the parameters of {where} are no JSON schema; give {_TOOL}", param="tools")
    check_size("tools", parameters)
    return {key: value for key, value in own.items() if value is not None}


_TOOL = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'


def _named(choice: Any) -> str | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        own = choice.get("function")
        name = own.get("name") if isinstance(own, dict) else None
        return name if isinstance(name, str) else ""
    return None


def _enforced(function: dict[str, Any], schema: Schema) -> Schema:
    try:
        JSONSchema(dict(schema))
    except ValueError as problem:
        if function.get("strict") is True:
            raise RefusedError(
                f"the parameters of the strict tool {function['name']} are refused: {problem}", param="tools"
            ) from problem
        return _OBJECT
    return schema if schema.get("type", "object") == "object" else _OBJECT
