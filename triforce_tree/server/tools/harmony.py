"""OpenAI's gpt-oss: messages with a header, which names a channel and perhaps the tool that is called."""

import re
from collections.abc import Iterator

from triforce_tree.server.tools.calls import (
    MalformedCallError,
    Shape,
    Tools,
    arguments_of,
    call_tags,
    constant,
    only,
    optional,
    sequence,
    tag,
)
from triforce_tree.server.tools.pieces import BLANKS, OBJECT, JsonArguments
from triforce_tree.server.tools.spans import Format, Parser, Part, Reasoning, first

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BOUNDS = (*_ENDS, _START, _CHANNEL)
_HEADERS = (_START, _CHANNEL)
# The prompt ends with the role of the first header, which may go on with the tool that is called.
_RECIPIENT = " to="
_LONGEST = max(map(len, _BOUNDS))
_BEGINS = re.compile(BLANKS + OBJECT)
# A header is shorter; a longer one is content.
_MOST_HEADER = 512


class Harmony(Format):
    """Channel ``analysis`` is reasoning, a message to a tool is a call, everything else is content."""

    markers = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def fits(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def parser(self, tools: Tools, reasoning: Reasoning | None) -> Parser:
        return _Messages(tools)

    def calls_shape(self, tools: Tools, reasoning: Reasoning | None, several: bool) -> Shape:
        return sequence(optional(_before("analysis")), {"type": "or", "elements": _calls(tools)})

    def text_shape(self, tools: Tools, reasoning: Reasoning | None, several: bool) -> Shape:
        before = {"type": "or", "elements": [_before("analysis"), _before("commentary")]}
        last = {"type": "or", "elements": [*_calls(tools), _final({"type": "any_text"})]}
        return sequence({"type": "star", "content": before}, last)

    def content_shape(self, content: Shape, reasoning: Reasoning | None) -> Shape:
        return sequence(optional(_before("analysis")), _final(content))


def _calls(tools: Tools) -> list[Shape]:
    return call_tags(tools, f"{_CHANNEL}commentary to=functions.%s {_CONSTRAIN}json{_MESSAGE}", "")


def _final(content: Shape) -> Shape:
    return sequence(constant(f"{_CHANNEL}final{_MESSAGE}"), content)


def _before(channel: str) -> Shape:
    """Returns the structure of a message that another one follows."""
    return tag(f"{_CHANNEL}{channel}{_MESSAGE}", {"type": "any_text"}, f"{_ENDS[0]}{_START}assistant")


class _Messages(Parser):
    """The parser of :class:`Harmony`."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(self._beginning)
        self._tools = tools
        # The header of the message that is being read, with its markers, and the tool that it calls.
        self._header, self._tool, self._reasons = "", "", False
        # The place in the arguments of a call from which their end is searched.
        self._from = 0
        # Reads the arguments once they have begun as an object.
        self._reader: JsonArguments | None = None

    def end(self) -> list[Part]:
        # A call may have no arguments.
        return super().end() + (list(self._call("", "")) if self._step == self._arguments else [])

    def _beginning(self, final: bool) -> Iterator[Part]:
        if self._text.startswith(_RECIPIENT):
            self._step = self._in_header
        elif final or not _RECIPIENT.startswith(self._text):
            self._step = self._outside
        yield from ()

    def _outside(self, final: bool) -> Iterator[Part]:
        """Before and after messages; text here is content, in case that a model writes no headers."""
        text, found = self._taken(_HEADERS, final)
        if text:
            yield Part(text)
        if found:
            self._step = self._in_header

    def _in_header(self, final: bool) -> Iterator[Part]:
        at = self._text.find(_MESSAGE, 0, _MOST_HEADER + len(_MESSAGE))
        if at < 0:
            if final or len(self._text) >= _MOST_HEADER + len(_MESSAGE):
                # The first character alone, as a header may begin after it.
                yield Part(self._text[0])
                self._text, self._step = self._text[1:], self._outside
            return
        end = at + len(_MESSAGE)
        self._header, self._text = self._text[:end], self._text[end:]
        # A message that was begun and has no body is replaced by the next one.
        header = self._header[self._header.rfind(_START) + 1 :]
        tool = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
        self._tool = tool[1] if tool and self._tools else ""
        self._reasons = not self._tool and f"{_CHANNEL}analysis" in header
        if self._reasons:
            self.thoughts.append((self._length - len(self._text) - len(self._header), 0))
            self._thought()
        self._step, self._from, self._reader = self._arguments if self._tool else self._body, 0, None

    def _body(self, final: bool) -> Iterator[Part]:
        text, found = self._taken(_BOUNDS, final)
        if text:
            yield Part(reasoning=text) if self._reasons else Part(text)
        if found:
            self._next(found)
        if self._reasons:
            self._thought()

    def _thought(self) -> None:
        """Records that the reasoning of the present message reaches up to the rest of the text."""
        self.thoughts[-1] = self.thoughts[-1][0], self._length - len(self._text)

    def _arguments(self, final: bool) -> Iterator[Part]:
        if self._reader is None and (begins := _BEGINS.match(self._text)):
            self._reader, self._text, self._step = JsonArguments(), self._text[begins.end() :], self._object
            yield Part(tool=self._tool)
            return
        at, found = first(self._text, _BOUNDS, self._from)
        self._from = max(0, len(self._text) - _LONGEST)
        if found:
            body, self._text = self._text[:at], self._text[at:]
            ending = found if found in _ENDS else ""
            self._next(found)
            yield from self._call(body, ending)
        elif final:
            body, self._text = self._text, ""
            yield from self._call(body, "")

    def _object(self, final: bool) -> Iterator[Part]:
        """In the arguments of a call."""
        assert self._reader is not None
        taken = self._reader.take(self._text, final)
        self._text = self._text[taken.used :]
        if taken.arguments:
            yield Part(arguments=taken.arguments)
        if taken.ended:
            self._step = self._after_object

    def _after_object(self, final: bool) -> Iterator[Part]:
        at, found = first(self._text, _BOUNDS)
        if found:
            self._text = self._text[at:]
            self._next(found)
        else:
            self._text = "" if final else self._text[-_LONGEST:]
        yield from ()

    def _next(self, found: str) -> None:
        if found in _ENDS:
            self._text = self._text[len(found) :]
        self._step = self._in_header if found in _HEADERS else self._outside

    def _call(self, body: str, ending: str) -> Iterator[Part]:
        if self._step == self._arguments:
            self._step = self._outside
        try:
            yield Part(tool=self._tool, arguments=arguments_of(only(body) if body.strip() else {}))
        except MalformedCallError:
            yield Part(self._header + body + ending)
