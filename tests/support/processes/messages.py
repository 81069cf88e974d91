"""Patterns for error messages."""

import re


def says(*words: object) -> str:
    """Returns a pattern for a message that holds all the words, in this order."""
    return ".*".join(re.escape(str(word)) for word in words)
