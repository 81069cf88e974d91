"""Applies a tokenizer's clean-up of spaces to a text that arrives in pieces."""

import re
from collections.abc import Callable

# Matches an end of a text that later characters may turn into a pattern that the clean-up changes.
# transformers removes the space in " .", " ?", " !", " ,", " n't", " 'm", " 's", " 've" and " 're", and both
# spaces in " ' ", one rule after the other.
_OPEN = re.compile(r"(?: {1,2}(?:n ?)?(?:' {0,2}[vr]?)?)$")


class CleanUp:
    """Returns cleaned text as soon as later characters cannot change it.

    Args:
        clean: the clean-up of a whole text.

    Attributes:
        length: number of characters of the cleaned text so far, including those not returned yet.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean, self._held, self._given = clean, "", 0

    @property
    def length(self) -> int:
        return self._given + len(self._clean(self._held))

    def put(self, text: str) -> str:
        """Adds text, and returns the cleaned text that is certain now."""
        self._held += text
        open_end = _OPEN.search(self._held, max(0, len(self._held) - 8))
        if not open_end:
            return self.end()
        # In " ' " both spaces are removed together, so the cut is after the first of them.
        quoted = self._held.endswith(" '", 0, open_end.start())
        return self._out(open_end.start() + quoted)

    def end(self) -> str:
        """Returns the rest of the cleaned text."""
        return self._out(len(self._held))

    def _out(self, cut: int) -> str:
        text = self._clean(self._held[:cut])
        self._held, self._given = self._held[cut:], self._given + len(text)
        return text
