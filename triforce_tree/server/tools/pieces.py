"""Reads the arguments of tool calls while a model writes them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from triforce_tree.server.tools.calls import Schema, is_text, typed

# Blanks between the parts of a call, up to a number that keeps the patterns short.
BLANKS = r"\s{0,64}"
# Matches where an object certainly begins.
OBJECT = rf"(?=\{{{BLANKS}[\"}}])"
# Matches the head of a call in JSON, up to its arguments, if the name comes first.
JSON_HEAD = (
    rf'\{{{BLANKS}"name"{BLANKS}:{BLANKS}"([^"\\<>\[\]\x00-\x1f]{{1,256}})"{BLANKS},{BLANKS}'
    rf'"(?:arguments|parameters)"{BLANKS}:{BLANKS}{OBJECT}'
)
# Other members of such an object, up to its end.
JSON_REST = r"[^{}\[\]]{0,256}\}"


class Taken(NamedTuple):
    """What a reader takes from a text.

    Attributes:
        arguments: what is added to the JSON text of the arguments.
        used: the number of characters that were read.
        ended: whether the arguments have ended.
    """

    arguments: str
    used: int
    ended: bool


class ArgumentReader(Protocol):
    """Reads the arguments of one call. All that it returns does not depend on where the text was cut."""

    def take(self, text: str, final: bool) -> Taken:
        """Reads what is certain of a text, which begins with what was not used before.

        Args:
            final: whether the text ends.
        """


class Pieces:
    """How a format lets the arguments of calls be read while they are written.

    Patterns have one group that matches, the name of the tool.

    Args:
        head: the beginning of a span up to the arguments of its first call. It contains no closing marker.
        more: from the end of arguments to those of the next call in the same span; None if there is none.
        tail: what may follow the last arguments if the closing marker is missing.
        reader: makes the reader of arguments from the schema of the tool.
    """

    def __init__(
        self,
        head: str,
        tail: str,
        more: str | None = None,
        reader: Callable[[Schema], ArgumentReader] = lambda schema: JsonArguments(),
    ) -> None:
        self.head, self.tail, self.reader = re.compile(head), re.compile(tail), reader
        self.more = None if more is None else re.compile(more)


class JsonArguments:
    """Reads an object in JSON as it is; control characters in strings are escaped, which models forget.

    A text that is no JSON ends at the latest with the text.
    """

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def take(self, text: str, final: bool) -> Taken:
        out, at = list[str](), 0
        while at < len(text):
            if self._escaped:
                out.append(text[at])
                at, self._escaped = at + 1, False
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                out.append(text[at:])
                at = len(text)
                break
            out.append(text[at : found.start()])
            at, character = found.end(), found[0]
            if character in _NO_JSON:
                return Taken("".join(out), found.start(), True)
            if character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = character == "\\"
                character = character if self._escaped else _escaped(character)
            else:
                self._depth += 1 if character in "{[" else -1
            out.append(character)
            if not self._depth:
                return Taken("".join(out), at, True)
        return Taken("".join(out), at, False)


# Characters that are no JSON outside of strings, and with which markers begin.
_NO_JSON = "<`"
_IN_STRING, _OUTSIDE = re.compile(r'["\\\x00-\x1f]'), re.compile(rf'["{{}}\[\]{_NO_JSON}]')


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class Elements:
    """How arguments are written as elements, each with a text.

    Attributes:
        key: a pattern from the beginning of an element to that of its text; its group is the key.
        closing: what ends the text of an element.
        following: what may follow an element: the beginnings of the next one and of the end.
        needs_closing: whether ``following`` alone does not end a text.
        blank_lines: whether one line feed at the beginning and one at the end are not part of the text.
    """

    key: re.Pattern[str]
    closing: str
    following: tuple[str, str]
    needs_closing: bool
    blank_lines: bool

    def reader(self, schema: Schema) -> "ElementArguments":
        return ElementArguments(self, schema)


class ElementArguments:
    """Reads arguments that are elements. Those that are texts by the schema are read while they are written,
    the others when they have ended.
    """

    def __init__(self, form: Elements, schema: Schema) -> None:
        self._form, self._properties = form, schema.get("properties") or {}
        feed, closing = "\n?" if form.blank_lines else "", re.escape(form.closing)
        follows = f"(?={'|'.join(map(re.escape, form.following))})"
        alone = "" if form.needs_closing else f"|{follows}"
        self._end = re.compile(rf"{feed}(?:{closing}{BLANKS}{follows}{alone})")
        self._last_end = re.compile(rf"{feed}{closing}{BLANKS}\Z")
        self._key: str | None = None
        # Whether no character of the present text was read, and the number of elements before it.
        self._fresh, self._count = False, 0

    def take(self, text: str, final: bool) -> Taken:
        out, at, ended = list[str](), 0, False
        before: tuple[int, str | None] | None = None
        while not ended and (at, self._key) != before:
            before = at, self._key
            step = self._between if self._key is None else self._within
            added, at, ended = step(text, at, final)
            out.append(added)
        return Taken("".join(out), at, ended)

    @property
    def _texts(self) -> bool:
        """Returns whether the present argument is a text."""
        return is_text(self._properties.get(self._key))

    def _between(self, text: str, at: int, final: bool) -> Taken:
        found = self._form.key.match(text, at)
        if found:
            self._key, self._fresh = found[1].strip(), self._form.blank_lines
            before = ", " if self._count else "{"
            self._count += 1
            quote = '"' if self._texts else ""
            return Taken(f"{before}{json.dumps(self._key, ensure_ascii=False)}: {quote}", found.end(), False)
        if text.startswith(self._form.following[0], at) and len(text) - at <= _MOST_KEY and not final:
            return Taken("", at, False)
        return Taken("}" if self._count else "{}", at, True)

    def _within(self, text: str, at: int, final: bool) -> Taken:
        if self._fresh and (at < len(text) or final):
            at, self._fresh = at + text.startswith("\n", at), False
        texts = self._texts
        found = self._end.search(text, at) or (self._last_end.search(text, at) if final else None)
        if found:
            value = text[at : found.start()]
            known = self._properties.get(self._key)
            self._key = None
            added = f'{_escaped(value)}"' if texts else json.dumps(typed(value, known), ensure_ascii=False)
            return Taken(added, found.end(), False)
        stop = len(text) if final else self._certain(text, at)
        return Taken(_escaped(text[at:stop]), stop, False) if texts else Taken("", at, False)

    def _certain(self, text: str, at: int) -> int:
        """Returns the place in a text before which the present argument does not end."""
        form, stop = self._form, len(text)
        closed = text.rfind(form.closing, at)
        after = text[closed + len(form.closing) :] if closed >= 0 else ""
        if closed >= 0 and any(each.startswith(after.lstrip()) for each in form.following):
            stop = closed
        else:
            stop -= partial(text[at:], (form.closing, *(() if form.needs_closing else form.following)))
        return stop - (form.blank_lines and stop > at and text[stop - 1] == "\n")


# The beginning of an element has fewer characters than this up to its text.
_MOST_KEY = 512


def partial(text: str, markers: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - count :]
        if any(marker.startswith(end) for marker in markers):
            return count
    return 0
