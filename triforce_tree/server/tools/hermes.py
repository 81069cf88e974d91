"""Hermes 2 and 3, Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from triforce_tree.server.tools.calls import Call, Shape, Tools, call_of, json_shape, only, separated, tag
from triforce_tree.server.tools.pieces import BLANKS, JSON_HEAD, JSON_REST, Pieces


class Hermes:
    opening, closing, at_start = ("<tool_call>",), "</tool_call>", False
    markers, id_length = ("<tool_call>", "</tool_call>"), None
    pieces = Pieces.of(f"<tool_call>{BLANKS}{JSON_HEAD}", f"(?:{JSON_REST})?")

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template

    def calls(self, text: str, tools: Tools) -> list[Call]:
        return [call_of(only(text.removeprefix(self.opening[0]).removesuffix(self.closing)))]

    def shape(self, tools: Tools, several: bool) -> Shape:
        tags = [
            tag(f'<tool_call>\n{{"name": "{name}", "arguments": ', json_shape(schema), "}\n</tool_call>")
            for name, schema in tools.items()
        ]
        return separated(tags, "\n", several)
