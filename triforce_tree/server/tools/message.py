"""The message of an assistant: content, reasoning and calls with identifiers, as its text is generated."""

import secrets
import string
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from triforce_tree.server.tools.formats import Parsing
from triforce_tree.server.tools.spans import Part

# A whole text is parsed in pieces of so many characters, as some steps take time in proportion to a piece.
_PIECE = 4096


@dataclass
class ToolCall:
    """A call of a message.

    Attributes:
        number: its place among the calls of the message.
        id: its identifier.
        name: the name of the tool.
        arguments: the JSON text of the arguments so far. It stays incomplete if the text ends within it, and
            is no JSON if the model writes none.
    """

    number: int
    id: str
    name: str
    arguments: str = ""


class Delta(NamedTuple):
    """What is added to a message.

    Attributes:
        content, reasoning, arguments: what is appended; ``arguments`` to those of ``call``.
        call: the call that begins or goes on; None if content or reasoning is added.
        begins: whether the call begins.
    """

    content: str = ""
    reasoning: str = ""
    arguments: str = ""
    call: ToolCall | None = None
    begins: bool = False


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
        self._parallel = parallel
        self.content, self.reasoning = "", ""
        self.calls: list[ToolCall] = []
        # The call that goes on; None if it is left out.
        self._newest: ToolCall | None = None

    def reasoning_tokens(self, starts: Sequence[int]) -> int:
        """Returns how many tokens lie in the reasoning and its markers.

        Args:
            starts: the number of characters of the text before each token.
        """
        return sum(
            bisect_left(starts, stop) - bisect_left(starts, start) for start, stop in self._parser.thoughts
        )

    def put(self, text: str) -> list[Delta]:
        """Returns what is certain after one more piece."""
        return self._added(self._parser.put(text))

    def end(self) -> list[Delta]:
        """Returns the rest after the last piece."""
        return self._added(self._parser.end())

    def put_whole(self, text: str) -> list[Delta]:
        """Returns what a whole text adds."""
        starts = range(0, len(text), _PIECE)
        return [*chain.from_iterable(self.put(text[at : at + _PIECE]) for at in starts), *self.end()]

    def _added(self, parts: list[Part]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if part.content or part.reasoning:
                self.content += part.content
                self.reasoning += part.reasoning
                deltas.append(Delta(part.content, part.reasoning))
                continue
            if part.tool:
                self._newest = None
                if self._parallel or not self.calls:
                    self._newest = ToolCall(len(self.calls), self._new_id(), part.tool)
                    self.calls.append(self._newest)
            if (call := self._newest) is None:
                continue
            call.arguments += part.arguments
            if not part.tool and deltas and deltas[-1].call is call:
                last = deltas[-1]
                deltas[-1] = last._replace(arguments=last.arguments + part.arguments)
            else:
                deltas.append(Delta(arguments=part.arguments, call=call, begins=bool(part.tool)))
        return deltas

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self._id_length))
