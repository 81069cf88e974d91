"""DeepSeek V3, R1 and V3.1: calls between special tokens."""

from dataclasses import dataclass

from triforce_tree.server.tools.calls import (
    Call,
    MalformedCallError,
    Shape,
    Tools,
    arguments_of,
    json_shape,
    only,
    separated,
    tag,
)
from triforce_tree.server.tools.pieces import BLANKS, OBJECT, Pieces

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"
_NAME = rf"{BLANKS}([^\s<>{{}}]{{1,256}}){BLANKS}"
_HEAD = rf"{_CALL}(?:\w{{1,32}}{_SEPARATOR}{_NAME}```json{BLANKS}|{_NAME}{_SEPARATOR}{BLANKS}){OBJECT}"
_AFTER = rf"{BLANKS}(?:```{BLANKS})?(?:{_CALL_END})?{BLANKS}"
_PIECES = Pieces.of(rf"{_BEGIN}{BLANKS}{_HEAD}", _AFTER, _AFTER + _HEAD)


@dataclass(frozen=True)
class DeepSeek:
    """Reads both forms.

    Attributes:
        fenced: whether the model writes ``function``, the name, and the arguments as a block of Markdown (V3,
            R1), or only the name and the arguments (V3.1).
    """

    fenced: bool = True

    opening, closing, at_start = (_BEGIN,), _END, False
    markers, id_length = (_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR), None
    pieces = _PIECES

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
        begin = f"{_CALL}function{_SEPARATOR}{{}}{_FENCE}" if self.fenced else f"{_CALL}{{}}{_SEPARATOR}"
        end = f"{_FENCE_END}{_CALL_END}" if self.fenced else _CALL_END
        tags = [tag(begin.format(name), json_shape(schema), end) for name, schema in tools.items()]
        return tag(_BEGIN, separated(tags, "\n" if self.fenced else "", several), _END)


def _named(text: str) -> str:
    if not text.strip():
        raise MalformedCallError("no name")
    return text.strip()
