"""Splits a text with marked spans into content, reasoning and tool calls, piece by piece."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from triforce_tree.server.tools.calls import (
    Call,
    MalformedCallError,
    Shape,
    Tools,
    UnfinishedCallError,
    optional,
    regex,
    sequence,
    tag,
)
from triforce_tree.server.tools.pieces import ArgumentReader, Pieces, partial

# A call may contain its own closing marker in a string, so the next ones are tried too, up to this many.
_MOST_CLOSINGS = 8


class Part(NamedTuple):
    """A part of a text.

    Attributes:
        content, reasoning: what is to be appended.
        tool: the name of the tool of a call that begins; empty if none does.
        arguments: what is to be appended to the arguments of the newest call.
    """

    content: str = ""
    reasoning: str = ""
    tool: str = ""
    arguments: str = ""


class Parser:
    """Takes a text in pieces of any size. The parts together do not depend on where the text was cut.

    Args:
        step: takes the beginning of ``_text``, the text that was not read yet, and may replace itself as
            ``_step``. If it needs more text, it changes neither. Its argument says whether the text ends.

    Attributes:
        thoughts: where reasoning lies in the text so far, with its markers: the first character of each
            stretch, and the one after it.
    """

    def __init__(self, step: Callable[[bool], Iterator[Part]]) -> None:
        self._step, self._text, self._length = step, "", 0
        self.thoughts: list[tuple[int, int]] = []

    def put(self, text: str) -> list[Part]:
        """Returns the parts that are certain after one more piece."""
        self._text += text
        self._length += len(text)
        return self._parts(final=False)

    def end(self) -> list[Part]:
        """Returns the rest after the last piece."""
        return self._parts(final=True)

    def _parts(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        before = None
        while self._text and before != (self._step, len(self._text)):
            before = self._step, len(self._text)
            parts += self._step(final)
        return parts

    def _taken(self, markers: Sequence[str], final: bool) -> tuple[str, str]:
        """Takes the text before the first of the markers, and returns it with this marker. Without one it
        takes all text that is certainly not the beginning of one.
        """
        at, found = first(self._text, markers)
        end = at if found else len(self._text) - (0 if final else partial(self._text, markers))
        text, self._text = self._text[:end], self._text[end:]
        return text, found


class Format(Protocol):
    """How a model marks reasoning and calls in its text; ``FORMATS`` has all of them.

    Attributes:
        markers: names of special tokens that the text must show.
        id_length: number of characters of an identifier of a call, letters and digits; None for OpenAI's.
    """

    markers: tuple[str, ...] = ()
    id_length: int | None = None

    def fits(self, template: str) -> bool:
        """Returns whether a chat template teaches this format."""

    def parser(self, tools: Tools, reasoning: "Reasoning | None") -> Parser:
        """Returns a parser of one text.

        Args:
            tools: the tools that may be called; empty if calls are not looked for.
            reasoning: the markers of reasoning; None if the text has none.
        """

    def calls_shape(self, tools: Tools, reasoning: "Reasoning | None", several: bool) -> Shape:
        """Returns the structure of a text that calls a tool, or several, perhaps after reasoning."""

    def text_shape(self, tools: Tools, reasoning: "Reasoning | None", several: bool) -> Shape:
        """Returns the structure of any text in which calls are those of the tools."""

    def content_shape(self, content: Shape, reasoning: "Reasoning | None") -> Shape:
        """Returns the structure of a text whose content has the structure ``content``."""


@dataclass(frozen=True)
class Reasoning:
    """The markers around the reasoning at the beginning of a text.

    Attributes:
        inside: whether the prompt has already opened it.
    """

    opening: str
    closing: str
    inside: bool = False

    def before(self, shape: Shape) -> Shape:
        """Returns the structure of a text that may begin with reasoning and then has this structure."""
        text = {"type": "any_text"}
        blanks = regex(r"\n{0,2}")
        if self.inside:
            return sequence(tag("", text, self.closing), blanks, shape)
        thoughts = sequence(tag(self.opening, text, self.closing), blanks)
        return sequence(optional(thoughts), shape)


class Spans(Format):
    """The format of texts whose calls are spans between markers. Without a subclass it has no calls.

    Attributes:
        opening: strings that begin calls.
        closing: the string that ends what ``opening`` has begun; empty for the end of the text.
        at_start: whether calls are found only at the beginning of a text. Such calls need the name of a tool
            that was offered, as other texts may begin like them.
        pieces: how arguments are read while they are written; None if they are read when the span has ended.
    """

    opening: tuple[str, ...] = ()
    closing, at_start = "", False
    pieces: Pieces | None = None

    def fits(self, template: str) -> bool:
        return True

    def calls(self, text: str, tools: Tools) -> list[Call]:
        """Returns the calls of a text from ``opening`` to ``closing``, which may be missing at its end.

        Raises:
            MalformedCallError: the text is no call in this format.
        """
        raise NotImplementedError

    def shape(self, tools: Tools, several: bool) -> Shape:
        """Returns the structure of a text that consists of one call, or of one or several."""
        raise NotImplementedError

    def parser(self, tools: Tools, reasoning: Reasoning | None) -> Parser:
        return _SpanParser(self if tools else Spans(), tools, reasoning)

    def calls_shape(self, tools: Tools, reasoning: Reasoning | None, several: bool) -> Shape:
        return self.content_shape(self.shape(tools, several), reasoning)

    def text_shape(self, tools: Tools, reasoning: Reasoning | None, several: bool) -> Shape:
        shape = self.shape(tools, several)
        if not self.at_start:
            tags, opening = shape.get("tags", [shape]), self.opening[0]
            marked = {
                "type": "triggered_tags", "triggers": [opening], "tags": tags,
                "stop_after_first": not several,
            }  # fmt: skip
            return self.content_shape(marked, reasoning)
        # A text that begins like a call is one.
        others = self.opening if reasoning is None else (*self.opening, reasoning.opening)
        return self.content_shape({"type": "or", "elements": [shape, *_without(others)]}, reasoning)

    def content_shape(self, content: Shape, reasoning: Reasoning | None) -> Shape:
        return content if reasoning is None else reasoning.before(content)


class _SpanParser(Parser):
    """The parser of :class:`Spans`.

    Blanks between reasoning and what follows, and blanks before and after calls, are not part of the content.
    A span that is no call becomes content with its markers and blanks.
    """

    def __init__(self, form: Spans, tools: Tools, reasoning: Reasoning | None) -> None:
        super().__init__(self._beginning if form.opening or reasoning is not None else self._content)
        if reasoning is not None and reasoning.inside:
            self._step = self._thoughts
        self._form, self._tools, self._reasoning = form, tools, reasoning
        # The reasoning begins with the text, and is empty so far.
        self.thoughts = [(0, 0)]
        # Within a span: the blanks before it, the place from which its end is searched, the place after its
        # first closing marker, and the number of closing markers.
        self._blanks, self._from, self._first, self._closings = "", 0, 0, 0
        # Whether only blanks follow the last call.
        self._after_call = False
        # Reads the arguments of the call that is being written.
        self._reader: ArgumentReader

    def _beginning(self, final: bool) -> Iterator[Part]:
        """At the beginning of the text or after the reasoning."""
        text = self._text.lstrip()
        known = self._reasoning
        if known is not None and text.startswith(known.opening):
            self._text, self._step = text[len(known.opening) :], self._thoughts
            self.thoughts = [(0, self._length - len(self._text))]
            return
        openings = self._form.opening if self._form.at_start else ()
        for opening in openings:
            if text.startswith(opening):
                self._open(self._text[: len(self._text) - len(text)], text, opening)
                return
        awaited = (*openings, known.opening) if known is not None else openings
        if final or not any(each.startswith(text) for each in (*awaited, "")):
            self._step = self._content
        yield from ()

    def _thoughts(self, final: bool) -> Iterator[Part]:
        assert self._reasoning is not None
        closing = self._reasoning.closing
        text, found = self._taken((closing,), final)
        yield from _shown(reasoning=text)
        if found:
            self._text, self._step, self._reasoning = self._text[len(closing) :], self._after_thoughts, None
        self.thoughts = [(0, self._length - len(self._text))]

    def _after_thoughts(self, final: bool) -> Iterator[Part]:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._beginning
        yield from ()

    def _content(self, final: bool) -> Iterator[Part]:
        text = self._text
        if not self._form.opening or self._form.at_start:
            self._text = ""
            yield from _shown(text)
            return
        at, opening = first(text, self._form.opening)
        held = 0 if opening or final else partial(text, self._form.opening)
        end = at if opening else len(text) - held
        content = text[:end].rstrip()
        blanks = text[len(content) : end]
        if content:
            self._after_call = False
            yield Part(content)
        if opening:
            self._open(blanks, text[at:], opening)
            return
        self._text = text[len(content) :]
        if final:
            self._text = ""
            if not self._after_call:
                yield from _shown(blanks)

    def _open(self, blanks: str, text: str, opening: str) -> None:
        self._blanks, self._text, self._step = blanks, text, self._span
        self._from, self._first, self._closings = len(opening), 0, 0

    def _span(self, final: bool) -> Iterator[Part]:
        closing, pieces = self._form.closing, self._form.pieces
        if pieces is not None and (found := pieces.head.match(self._text)) and self._may_call(found):
            yield self._begun(found)
            return
        while closing and (at := self._text.find(closing, self._from)) >= 0:
            self._from = at + len(closing)
            self._first = self._first or self._from
            self._closings += 1
            try:
                calls = self._form.calls(self._text[: self._from], self._tools)
            except UnfinishedCallError:
                if self._closings < _MOST_CLOSINGS:
                    continue
                yield from self._released(self._first)
            except MalformedCallError:
                yield from self._released(self._first)
            else:
                yield from self._called(calls, self._from)
            return
        if not final:
            self._from = max(self._from, len(self._text) - len(closing) + 1) if closing else self._from
            return
        try:
            yield from self._called(self._form.calls(self._text, self._tools), len(self._text))
        except MalformedCallError:
            yield from self._released(self._first or len(self._text))

    def _may_call(self, head: re.Match[str]) -> bool:
        return not self._form.at_start or _tool(head) in self._tools

    def _begun(self, head: re.Match[str]) -> Part:
        """Begins to read the arguments of a call."""
        assert self._form.pieces is not None
        name = _tool(head)
        self._reader = self._form.pieces.reader(self._tools.get(name, {}))
        self._text, self._step, self._from = self._text[head.end() :], self._arguments, 0
        return Part(tool=name)

    def _arguments(self, final: bool) -> Iterator[Part]:
        taken = self._reader.take(self._text, final)
        self._text = self._text[taken.used :]
        if taken.arguments:
            yield Part(arguments=taken.arguments)
        if taken.ended:
            self._step = self._after_arguments
        elif final:
            self._text = ""

    def _after_arguments(self, final: bool) -> Iterator[Part]:
        closing, pieces = self._form.closing, self._form.pieces
        assert pieces is not None
        if pieces.more is not None and (found := pieces.more.match(self._text)) and self._may_call(found):
            yield self._begun(found)
        elif closing and (at := self._text.find(closing, self._from)) >= 0:
            yield from self._called([], at + len(closing))
        elif final:
            rest = pieces.tail.match(self._text)
            yield from self._called([], 0 if rest is None else rest.end())
        else:
            self._from = max(0, len(self._text) - len(closing) + 1)

    def _called(self, calls: list[Call], end: int) -> Iterator[Part]:
        """Ends a span with calls."""
        self._text, self._step, self._after_call = self._text[end:], self._content, True
        for call in calls:
            yield Part(tool=call.name, arguments=call.arguments)

    def _released(self, end: int) -> Iterator[Part]:
        """Returns the beginning of a span that is no call as content."""
        text, self._text = self._text[:end], self._text[end:]
        self._step, self._after_call = self._content, False
        yield Part(self._blanks + text)


def _without(markers: Sequence[str]) -> list[Shape]:
    """Returns the structures of any text that does not begin with blanks and one of the markers."""
    following: dict[str, str] = {}
    for marker in markers:
        for place, character in enumerate(marker):
            following[marker[:place]] = following.get(marker[:place], "") + re.escape(character)
    short = "|".join(map(re.escape, filter(None, following)))
    other = "|".join(f"{re.escape(begun)}[^{nexts}]" for begun, nexts in following.items() if begun)
    first = rf"[^ \n\r\t{following['']}]"
    blanks = r"[ \n\r\t]*"
    return [
        sequence(regex(f"{blanks}({first}{other and f'|{other}'})"), {"type": "any_text"}),
        regex(f"{blanks}({short})?") if short else regex(blanks),
    ]


def _tool(head: re.Match[str]) -> str:
    return next(name for name in head.groups() if name is not None)


def _shown(content: str = "", reasoning: str = "") -> Iterator[Part]:
    if content or reasoning:
        yield Part(content, reasoning)


def first(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str]:
    """Returns the place of the first marker after ``start`` and the marker, or (-1, "")."""
    found = [(at, marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    return min(found, default=(-1, ""))
