"""Finds stop strings in a text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence
from itertools import islice


class StopMatcher:
    """Returns the text before the first stop string, which is the one that ends first.

    Each string is matched with the algorithm of Knuth, Morris and Pratt, which reads every character once.
    Text that may be the beginning of a stop string is held back.

    Args:
        strings: the stop strings, none of which is empty.

    Attributes:
        found: whether a stop string was found. No text is returned after it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(string, _borders(string)) for string in strings]
        self._matched = [0] * len(strings)
        # Characters that may be part of a stop string; "" for a character that is not part of the text.
        self._held: deque[str] = deque()
        self.found = False

    def put(self, text: str, visible: bool = True) -> str:
        """Adds text, and returns the text that is certainly not part of a stop string.

        Args:
            visible: whether the characters belong to the returned text; otherwise they are only searched.
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
        """Returns the text that was held back."""
        return self._taken(len(self._held))

    def _taken(self, count: int) -> str:
        taken = "".join(islice(self._held, count))
        for _ in range(count):
            self._held.popleft()
        return taken


def _borders(string: str) -> list[int]:
    """Returns, for each prefix of a string, the length of its longest proper prefix that is also a suffix."""
    borders = [0] * len(string)
    length = 0
    for place in range(1, len(string)):
        while length and string[place] != string[length]:
            length = borders[length - 1]
        length += string[place] == string[length]
        borders[place] = length
    return borders
