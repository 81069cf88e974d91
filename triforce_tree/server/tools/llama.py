"""Llama 3 (a JSON object as the whole text), Llama 3.2 and 4 (a list of Python calls as the whole text)."""

import ast
import re
from typing import Any

from triforce_tree.server.tools.calls import (
    Call,
    MalformedCallError,
    Schema,
    Shape,
    Tools,
    arguments_of,
    call_of,
    constant,
    json_shape,
    optional,
    parsed,
    separated,
    sequence,
    tag,
)
from triforce_tree.server.tools.pieces import BLANKS, JSON_HEAD, JSON_REST, Pieces

_TAG = "<|python_tag|>"


class LlamaJson:
    """``{"name": ..., "parameters": {...}}``, several with semicolons between them."""

    opening, closing, at_start = (_TAG, "{"), "", True
    markers: tuple[str, ...] = (_TAG,)
    id_length = None
    pieces = Pieces.of(
        rf"(?:{re.escape(_TAG)})?{BLANKS}{JSON_HEAD}",
        f"(?:{JSON_REST})?",
        f"{JSON_REST}{BLANKS};{BLANKS}{JSON_HEAD}",
    )

    def fits(self, template: str) -> bool:
        return '"parameters"' in template and ("<|python_tag|>" in template or "<|eom_id|>" in template)

    def calls(self, text: str, tools: Tools) -> list[Call]:
        rest, calls = text.strip().removeprefix(_TAG), []
        while rest:
            value, end = parsed(rest)
            calls.append(_offered(call_of(value), tools))
            rest = rest[end:].strip()
            if rest and not rest.startswith(";"):
                raise MalformedCallError("text follows the call")
            rest = rest[1:].strip()
        if not calls:
            raise MalformedCallError("no call")
        return calls

    def shape(self, tools: Tools, several: bool) -> Shape:
        tags = [
            tag(f'{{"name": "{name}", "parameters": ', json_shape(schema), "}")
            for name, schema in tools.items()
        ]
        return separated(tags, "; ", several)


class Pythonic:
    """``[name(argument=value), ...]`` with literal values."""

    opening, closing, at_start = (_TAG, "<|python_start|>", "["), "", True
    markers: tuple[str, ...] = (_TAG, "<|python_start|>", "<|python_end|>")
    id_length = None
    pieces: Pieces | None = None

    def fits(self, template: str) -> bool:
        return "[func_name1(" in template

    def calls(self, text: str, tools: Tools) -> list[Call]:
        text = text.strip().removeprefix(_TAG).removeprefix("<|python_start|>").removesuffix("<|python_end|>")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        # The parser of Python has limits of its own for nested or long expressions.
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise MalformedCallError(str(error)) from error
        if not isinstance(tree, ast.List) or not tree.elts:
            raise MalformedCallError("no list of calls")
        return [_offered(_python_call(node), tools) for node in tree.elts]

    def shape(self, tools: Tools, several: bool) -> Shape:
        tags = [tag(f"{name}(", _python_arguments(schema), ")") for name, schema in tools.items()]
        return tag("[", separated(tags, ", ", several), "]")


def _offered(call: Call, tools: Tools) -> Call:
    """Returns a call of a tool that was offered; other texts may look like calls of this format."""
    if call.name not in tools:
        raise MalformedCallError(f"{call.name} is not offered")
    return call


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedCallError("no call with named arguments")
    try:
        name = ast.unparse(node.func)
        values = {word.arg: _literal(word.value) for word in node.keywords}
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(str(error)) from error
    if None in values:
        raise MalformedCallError("an argument has no name")
    return Call(name, arguments_of(values))


def _literal(node: ast.expr) -> Any:
    """Returns the value of a literal of Python or JSON."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            # None stands for ``**other``.
            if all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                pairs = zip(keys, values, strict=True)
                return {key.value: _literal(value) for key, value in pairs if isinstance(key, ast.Constant)}
    raise MalformedCallError("an argument is no literal")


def _python_arguments(schema: Schema) -> Shape:
    """Returns the structure of named arguments: the required ones, then any of the others, in order."""
    properties, needed = schema.get("properties") or {}, schema.get("required") or []
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}

    def argument(name: str, before: str) -> Shape:
        own = properties[name] if isinstance(properties[name], dict) else {}
        return sequence(constant(f"{before}{name}="), json_shape({**own, **shared}))

    required = [name for name in properties if name in needed]
    others = [name for name in properties if name not in needed]
    if required:
        parts = [argument(name, ", " if number else "") for number, name in enumerate(required)]
        return sequence(*parts, *(optional(argument(name, ", ")) for name in others))
    # The first one of the arguments has no comma before it.
    alternatives = [
        sequence(argument(name, ""), *(optional(argument(later, ", ")) for later in others[number + 1 :]))
        for number, name in enumerate(others)
    ]
    return {"type": "or", "elements": [constant(""), *alternatives]}
