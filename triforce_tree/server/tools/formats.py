"""The formats of tool calls, by families of models, and the choice of one for a tokenizer."""

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from triforce_tree.server.tools.calls import (
    Call,
    MalformedCallError,
    Schema,
    Shape,
    Tools,
    UnfinishedCallError,
    arguments_of,
    call_of,
    calls_shape,
    constant,
    json_shape,
    only,
    optional,
    parsed,
    separated,
    sequence,
    tag,
    typed,
)
from triforce_tree.server.tools.harmony import Harmony
from triforce_tree.server.tools.pieces import BLANKS, JSON_HEAD, JSON_REST, OBJECT, Elements, Pieces
from triforce_tree.server.tools.spans import Format, Parser, Reasoning, Spans


class _Marked(Spans):
    """The formats whose calls are between ``<tool_call>`` and ``</tool_call>``."""

    opening, closing = ("<tool_call>",), "</tool_call>"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def _body(self, text: str) -> str:
        return text.removeprefix(self.opening[0]).removesuffix(self.closing).strip()


class Hermes(_Marked):
    """Hermes 2 and 3, Qwen 2.5 and 3: ``{"name": ..., "arguments": {...}}``"""

    pieces = Pieces(f"<tool_call>{BLANKS}{JSON_HEAD}", f"(?:{JSON_REST})?")

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template

    def calls(self, text: str, tools: Tools) -> list[Call]:
        return [call_of(only(self._body(text)))]

    def shape(self, tools: Tools, several: bool) -> Shape:
        begin, end = '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"
        return calls_shape(tools, several, begin, end, "\n")


_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LISTED = rf"{re.escape(_CALLS)}{BLANKS}\[?{BLANKS}{JSON_HEAD}"
_NAMED = (
    rf"{re.escape(_CALLS)}{BLANKS}([^\s\[\]{{}}\"<>]{{1,256}}){BLANKS}"
    rf"(?:{re.escape(_ID)}[^\[\]{{}}]{{0,64}})?(?:{re.escape(_ARGUMENTS)})?{BLANKS}{OBJECT}"
)


@dataclass(frozen=True)
class Mistral(Spans):
    """``[TOOL_CALLS]`` before a list in JSON, or before each name with ``[ARGS]`` and its arguments. Both
    forms are read.

    Attributes:
        listed: whether the model writes a list in JSON, as older ones do.
    """

    listed: bool = False

    opening = (_CALLS,)
    markers = (_CALLS, _ID, _ARGUMENTS)
    # The chat templates refuse other identifiers.
    id_length = 9
    pieces = Pieces(
        f"(?:{_LISTED}|{_NAMED})", rf"(?:{JSON_REST}{BLANKS}\]?)?",
        f"(?:{JSON_REST}{BLANKS},{BLANKS}{JSON_HEAD}|{BLANKS}{_NAMED})",
    )  # fmt: skip

    def fits(self, template: str) -> bool:
        return _CALLS in template and (_ARGUMENTS in template) is not self.listed

    def calls(self, text: str, tools: Tools) -> list[Call]:
        calls: list[Call] = []
        for part in text.split(_CALLS)[1:]:
            part = part.strip()
            if part.startswith(("[", "{")):
                value = only(part)
                calls += map(call_of, value if isinstance(value, list) else [value])
                continue
            name, found, rest = part.partition(_ARGUMENTS)
            if not found:
                at = part.find("{")
                name, rest = (part[:at], part[at:]) if at > 0 else (part, "")
            name = name.partition(_ID)[0].strip()
            value, end = parsed(rest)
            if not name or rest[end:].strip():
                raise MalformedCallError("text follows the call")
            calls.append(Call(name, arguments_of(value)))
        if not calls:
            raise MalformedCallError("no call")
        return calls

    def shape(self, tools: Tools, several: bool) -> Shape:
        if not self.listed:
            return calls_shape(tools, several, f"{_CALLS}%s{_ARGUMENTS}", "")
        listed = calls_shape(tools, several, '{"name": "%s", "arguments": ', "}", ", ")
        return tag(f"{_CALLS}[", listed, "]")


_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = rf"{BLANKS}([^\s<>{{}}]{{1,256}}){BLANKS}"
_HEAD = rf"{_CALL}(?:\w{{1,32}}{_SEPARATOR}{_NAME}```json{BLANKS}|{_NAME}{_SEPARATOR}{BLANKS}){OBJECT}"
_AFTER = rf"{BLANKS}(?:```{BLANKS})?(?:{_CALL_END})?{BLANKS}"


@dataclass(frozen=True)
class DeepSeek(Spans):
    """DeepSeek V3, R1 and V3.1: calls between special tokens. Both forms are read.

    Attributes:
        fenced: whether the model writes ``function``, the name, and the arguments as a block of Markdown (V3,
            R1), or only the name and the arguments (V3.1).
    """

    fenced: bool = True

    opening, closing = (_BEGIN,), _END
    markers = (_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR)
    pieces = Pieces(rf"{_BEGIN}{BLANKS}{_HEAD}", _AFTER, _AFTER + _HEAD)

    def fits(self, template: str) -> bool:
        return _BEGIN in template and ("```json" in template) is self.fenced

    def calls(self, text: str, tools: Tools) -> list[Call]:
        body = text.removeprefix(_BEGIN).removesuffix(_END)
        before, *parts = body.split(_CALL)
        if before.strip() or not parts:
            raise MalformedCallError("no call")
        return [self._call(part.strip().removesuffix(_CALL_END)) for part in parts]

    def _call(self, text: str) -> Call:
        first, found, second = text.partition(_SEPARATOR)
        if not found:
            raise MalformedCallError("no name")
        name, fence, rest = second.partition("```json")
        if not fence:
            return Call(_named(first), arguments_of(only(second)))
        return Call(_named(name), arguments_of(only(rest.strip().removesuffix("```"))))

    def shape(self, tools: Tools, several: bool) -> Shape:
        if self.fenced:
            begin, end = f"{_CALL}function{_SEPARATOR}%s\n```json\n", f"\n```{_CALL_END}"
            return tag(_BEGIN, calls_shape(tools, several, begin, end, "\n"), _END)
        return tag(_BEGIN, calls_shape(tools, several, f"{_CALL}%s{_SEPARATOR}", _CALL_END), _END)


def _named(text: str) -> str:
    if not text.strip():
        raise MalformedCallError("no name")
    return text.strip()


_TAG = "<|python_tag|>"


class LlamaJson(Spans):
    """Llama 3: the whole text is ``{"name": ..., "parameters": {...}}``, or several with semicolons."""

    opening, at_start = (_TAG, "{"), True
    markers = (_TAG,)
    pieces = Pieces(
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
        return calls_shape(tools, several, '{"name": "%s", "parameters": ', "}", "; ")


class Pythonic(Spans):
    """Llama 3.2 and 4: the whole text is ``[name(argument=value), ...]`` with literal values."""

    opening, at_start = (_TAG, "<|python_start|>", "["), True
    markers = (_TAG, "<|python_start|>", "<|python_end|>")

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


_PARAMETER, _PAIR = r"<parameter=([^<>]{1,256})>", rf"<arg_key>([^<]{{1,256}})</arg_key>{BLANKS}<arg_value>"


class QwenXml(_Marked):
    """Qwen3-Coder and Qwen 3.5: ``<function=NAME><parameter=KEY>text</parameter></function>``"""

    pieces = Pieces(
        rf"<tool_call>{BLANKS}<function=([^\s<>]{{1,256}})>{BLANKS}(?={_PARAMETER}|</function>)",
        rf"{BLANKS}(?:</function>)?{BLANKS}",
        reader=Elements(
            re.compile(_PARAMETER), "</parameter>", ("<parameter=", "</function>"), False, True
        ).reader,
    )

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template and "<function=" in template

    def calls(self, text: str, tools: Tools) -> list[Call]:
        body = self._body(text)
        if not body.startswith("<function="):
            raise MalformedCallError("no function")
        if not body.endswith("</function>"):
            raise UnfinishedCallError("the function goes on")
        name, found, rest = body[len("<function=") : -len("</function>")].partition(">")
        if not found or not name.strip():
            raise MalformedCallError("no name")
        known = tools.get(name.strip(), {}).get("properties") or {}
        values = {}
        head, *parameters = rest.split("<parameter=")
        for parameter in parameters:
            key, found, value = parameter.partition(">")
            # Models leave out the end of a parameter at times.
            value, ended, after = value.rpartition("</parameter>")
            if not found or (ended and after.strip()):
                raise MalformedCallError("text between parameters")
            value = value if ended else after
            values[key.strip()] = typed(_unwrapped(value), known.get(key.strip()))
        if head.strip():
            raise MalformedCallError("text before the parameters")
        return [Call(name.strip(), arguments_of(values))]

    def shape(self, tools: Tools, several: bool) -> Shape:
        begin, end = "<tool_call>\n<function=%s>\n", "\n</function>\n</tool_call>"
        return calls_shape(tools, several, begin, end, "\n", style="qwen_xml")


class Glm(_Marked):
    """GLM 4.5 and later: ``NAME<arg_key>KEY</arg_key><arg_value>text</arg_value>``"""

    pieces = Pieces(
        rf"<tool_call>{BLANKS}([^\s<>{{}}]{{1,256}}){BLANKS}(?={_PAIR}|</tool_call>)",
        BLANKS,
        reader=Elements(re.compile(_PAIR), "</arg_value>", ("<arg_key>", "</tool_call>"), True, False).reader,
    )

    markers = (*_Marked.markers, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template and "<arg_key>" in template

    def calls(self, text: str, tools: Tools) -> list[Call]:
        name, *pairs = self._body(text).split("<arg_key>")
        name = name.strip()
        if not name or any(character in name for character in "<>{}\n"):
            raise MalformedCallError("no name")
        known = tools.get(name, {}).get("properties") or {}
        values = {}
        for pair in pairs:
            key, _, rest = pair.partition("</arg_key>")
            before, opened, value = rest.partition("<arg_value>")
            value, closed, after = value.rpartition("</arg_value>")
            if not opened or not closed or before.strip() or after.strip():
                raise UnfinishedCallError("an argument has no value")
            values[key.strip()] = typed(value, known.get(key.strip()))
        return [Call(name, arguments_of(values))]

    def shape(self, tools: Tools, several: bool) -> Shape:
        return calls_shape(tools, several, "<tool_call>%s", "</tool_call>", "\n", style="glm_xml")


def _unwrapped(value: str) -> str:
    """Returns a value without the line feeds that the template puts around it."""
    return value.removeprefix("\n").removesuffix("\n")


NO_CALLS = "none"
# The first one that fits a chat template is taken.
FORMATS: dict[str, Format] = {
    "harmony": Harmony(),
    "mistral": Mistral(),
    "mistral_json": Mistral(listed=True),
    "deepseek_v3": DeepSeek(),
    "deepseek_v31": DeepSeek(fenced=False),
    "qwen3_coder": QwenXml(),
    "glm": Glm(),
    "hermes": Hermes(),
    "pythonic": Pythonic(),
    "llama3_json": LlamaJson(),
    NO_CALLS: Spans(),
}
# Markers of reasoning, in the chat template or the vocabulary.
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Parsing:
    """How the texts of one request are parsed. It can be sent to another process.

    Attributes:
        name: the name of the format.
        tools: the tools that the model may call.
        reasoning: the markers of reasoning; None if it is not separated.
    """

    name: str = NO_CALLS
    tools: Tools = field(default_factory=dict)
    reasoning: Reasoning | None = None

    @property
    def format(self) -> Format:
        return FORMATS[self.name]

    @property
    def markers(self) -> tuple[str, ...]:
        """The names of special tokens that the text must show."""
        own = self.format.markers if self.tools or self.name == "harmony" else ()
        return own if self.reasoning is None else (*own, self.reasoning.opening, self.reasoning.closing)

    def parser(self) -> Parser:
        return self.format.parser(self.tools, self.reasoning)


def format_name(template: str) -> str:
    """Returns the name of the first format that fits a chat template."""
    return next(name for name, each in FORMATS.items() if each.fits(template))


def reasoning_markers(template: str, vocabulary: Collection[Any]) -> Reasoning | None:
    """Returns the markers of reasoning that a model writes, or None."""
    for opening, closing in _REASONING:
        if closing in template or (opening in vocabulary and closing in vocabulary):
            return Reasoning(opening, closing)
    return None
