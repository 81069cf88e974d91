"""Calls whose arguments are elements, each with a text: Qwen3-Coder and Qwen 3.5, GLM 4.5 and later."""

import re

from triforce_tree.server.tools.calls import (
    Call,
    MalformedCallError,
    Shape,
    Tools,
    UnfinishedCallError,
    arguments_of,
    json_shape,
    separated,
    tag,
    typed,
)
from triforce_tree.server.tools.pieces import BLANKS, Elements, Pieces


class _Elements:
    """Common parts of both formats: a call is between ``<tool_call>`` and ``</tool_call>``."""

    opening, closing, at_start = ("<tool_call>",), "</tool_call>", False
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    id_length = None

    def _body(self, text: str) -> str:
        return text.removeprefix(self.opening[0]).removesuffix(self.closing).strip()


_PARAMETER, _PAIR = r"<parameter=([^<>]{1,256})>", rf"<arg_key>([^<]{{1,256}})</arg_key>{BLANKS}<arg_value>"


class QwenXml(_Elements):
    """``<function=NAME><parameter=KEY>text</parameter></function>``"""

    pieces = Pieces.of(
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
        tags = [
            tag(
                f"<tool_call>\n<function={name}>\n", json_shape(schema, style="qwen_xml"),
                "\n</function>\n</tool_call>",
            )
            for name, schema in tools.items()
        ]  # fmt: skip
        return separated(tags, "\n", several)


class Glm(_Elements):
    """``NAME<arg_key>KEY</arg_key><arg_value>text</arg_value>``"""

    pieces = Pieces.of(
        rf"<tool_call>{BLANKS}([^\s<>{{}}]{{1,256}}){BLANKS}(?={_PAIR}|</tool_call>)",
        BLANKS,
        reader=Elements(re.compile(_PAIR), "</arg_value>", ("<arg_key>", "</tool_call>"), True, False).reader,
    )

    markers = (*_Elements.markers, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

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
        tags = [
            tag(f"<tool_call>{name}", json_shape(schema, style="glm_xml"), "</tool_call>")
            for name, schema in tools.items()
        ]
        return separated(tags, "\n", several)


def _unwrapped(value: str) -> str:
    """Returns a value without the line feeds that the template puts around it."""
    return value.removeprefix("\n").removesuffix("\n")
