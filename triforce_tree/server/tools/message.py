"""The message of an assistant: content, reasoning and calls with identifiers, as its text is generated."""

import secrets
import string
from typing import NamedTuple

from triforce_tree.server.tools.calls import Call
from triforce_tree.server.tools.formats import Parsing
from triforce_tree.server.tools.spans import Part

# A whole text is parsed in pieces of so many characters, as some steps take time in proportion to a piece.
_PIECE = 4096


class NamedCall(NamedTuple):
    """A call with its place in the message and its identifier."""

    number: int
    id: str
    call: Call


class Delta(NamedTuple):
    """What is added to a message: content, reasoning, or a call."""

    content: str = ""
    reasoning: str = ""
    call: NamedCall | None = None


class Message:
    """Parses the text of an assistant piece by piece.

    Args:
        parsing: how the text is parsed.
        parallel: whether the message may have several calls; else it has the first one alone.

    Attributes:
        content, reasoning, calls: the message so far.
    """

    def __init__(self, parsing: Parsing, parallel: bool = True) -> None:
        self._parser, self._id_length = parsing.parser(), parsing.format.id_length
        self._most = None if parallel else 1
        self.content, self.reasoning = "", ""
        self.calls: list[NamedCall] = []

    def put(self, text: str) -> list[Delta]:
        """Returns what is certain after one more piece."""
        return self._added(self._parser.put(text))

    def end(self) -> list[Delta]:
        """Returns the rest after the last piece."""
        return self._added(self._parser.end())

    def put_whole(self, text: str) -> None:
        """Adds a whole text."""
        for start in range(0, len(text), _PIECE):
            self.put(text[start : start + _PIECE])
        self.end()

    def _added(self, parts: list[Part]) -> list[Delta]:
        deltas = []
        for part in parts:
            self.content += part.content
            self.reasoning += part.reasoning
            if part.call is None:
                deltas.append(Delta(part.content, part.reasoning))
            elif self._most is None or len(self.calls) < self._most:
                self.calls.append(NamedCall(len(self.calls), self._new_id(), part.call))
                deltas.append(Delta(call=self.calls[-1]))
        return deltas

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self._id_length))
