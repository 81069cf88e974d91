"""Mistral: ``[TOOL_CALLS]`` before a list in JSON, or before each name with ``[ARGS]`` and its arguments."""

import re
from dataclasses import dataclass

from triforce_tree.server.tools.calls import (
    Call,
    MalformedCallError,
    Shape,
    Tools,
    arguments_of,
    call_of,
    json_shape,
    only,
    parsed,
    separated,
    tag,
)
from triforce_tree.server.tools.pieces import BLANKS, JSON_HEAD, JSON_REST, OBJECT, Pieces

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LISTED = rf"{re.escape(_CALLS)}{BLANKS}\[?{BLANKS}{JSON_HEAD}"
_NAMED = (
    rf"{re.escape(_CALLS)}{BLANKS}([^\s\[\]{{}}\"<>]{{1,256}}){BLANKS}"
    rf"(?:{re.escape(_ID)}[^\[\]{{}}]{{0,64}})?(?:{re.escape(_ARGUMENTS)})?{BLANKS}{OBJECT}"
)
_PIECES = Pieces.of(
    f"(?:{_LISTED}|{_NAMED})", rf"(?:{JSON_REST}{BLANKS}\]?)?",
    f"(?:{JSON_REST}{BLANKS},{BLANKS}{JSON_HEAD}|{BLANKS}{_NAMED})",
)  # fmt: skip


@dataclass(frozen=True)
class Mistral:
    """Reads both forms.

    Attributes:
        listed: whether the model writes a list in JSON, as older ones do.
    """

    listed: bool = False

    opening, closing, at_start = (_CALLS,), "", False
    markers = (_CALLS, _ID, _ARGUMENTS)
    # The chat templates refuse other identifiers.
    id_length = 9
    pieces = _PIECES

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
            tags = [
                tag(f"{_CALLS}{name}{_ARGUMENTS}", json_shape(schema), "") for name, schema in tools.items()
            ]
            return separated(tags, "", several)
        tags = [
            tag(f'{{"name": "{name}", "arguments": ', json_shape(schema), "}")
            for name, schema in tools.items()
        ]
        return tag(f"{_CALLS}[", separated(tags, ", ", several), "]")
