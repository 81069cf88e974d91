"""Stop strings in a text that comes in pieces."""

from collections import deque
from collections.abc import Sequence
from itertools import islice


class StopMatcher:
    """Text up to the first stop string, which is the one that ends first.

    Each string is matched as by Knuth, Morris and Pratt: every character is looked at once, however the text
    is cut. Text with which a stop string may begin is held back.

    Args:
        strings: none of them empty.

    Attributes:
        found: whether one was found; no text comes after it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(string, _borders(string)) for string in strings]
        self._matched = [0] * len(strings)
        # A character for each that may be part of a stop string, empty where it is not part of the text.
        self._held: deque[str] = deque()
        self.found = False

    def put(self, text: str, visible: bool = True) -> str:
        """The text that is certain to come before any stop string.

        Args:
            visible: whether the characters are part of the text, not only of what is searched.
        """
        if self.found:
            return ""
        for character in text:
            self._held.append(character if visible else "")
            for number, (string, borders) in enumerate(self._strings):
                matched = self._matched[number]
                while matched and string[matched] != character:
                    matched = borders[matched - 1]
                self._matched[number] = matched + (string[matched] == character)
            ended = [
                len(string)
                for (string, _), matched in zip(self._strings, self._matched, strict=True)
                if matched == len(string)
            ]
            if ended:
                self.found = True
                before = self._taken(len(self._held) - max(ended))
                self._held.clear()
                return before
        return self._taken(len(self._held) - max(self._matched, default=0))

    def end(self) -> str:
        """What was held back."""
        return self._taken(len(self._held))

    def _taken(self, count: int) -> str:
        taken = "".join(islice(self._held, count))
        for _ in range(count):
            self._held.popleft()
        return taken


def _borders(string: str) -> list[int]:
    """For each beginning of a string, the length of the longest shorter one that it ends with."""
    borders = [0] * len(string)
    length = 0
    for place in range(1, len(string)):
        while length and string[place] != string[length]:
            length = borders[length - 1]
        length += string[place] == string[length]
        borders[place] = length
    return borders
