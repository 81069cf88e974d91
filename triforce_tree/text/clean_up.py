"""A tokenizer's clean-up of spaces, over a text that comes in pieces."""

import re
from collections.abc import Callable

# Ends of a text that characters to come may make a place that is cleaned: transformers removes the space in
# " .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're", and both in " ' ", one rule after the other.
_OPEN = re.compile(r"(?: {1,2}(?:n ?)?(?:' {0,2}[vr]?)?)$")


class CleanUp:
    """Cleaned text, as soon as it is certain.

    Args:
        clean: the whole text's clean-up.

    Attributes:
        length: characters of the cleaned text so far, those that are held back included.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean, self._held, self._given = clean, "", 0

    @property
    def length(self) -> int:
        return self._given + len(self._clean(self._held))

    def put(self, text: str) -> str:
        """What is certain after further text."""
        self._held += text
        found = _OPEN.search(self._held, max(0, len(self._held) - 8))
        if not found:
            return self.end()
        # The space after a lonely quotation mark goes with the one before it.
        quoted = self._held.endswith(" '", 0, found.start())
        return self._out(found.start() + quoted)

    def end(self) -> str:
        """The rest."""
        return self._out(len(self._held))

    def _out(self, cut: int) -> str:
        text = self._clean(self._held[:cut])
        self._held, self._given = self._held[cut:], self._given + len(text)
        return text
