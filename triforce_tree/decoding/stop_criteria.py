"""Decides when a sequence ends."""

from collections.abc import Callable
from dataclasses import dataclass

Stop = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Ending:
    """Holds the criteria by which a sequence ends.

    Attributes:
        max_new_tokens: tokens to emit at most.
        stop_tokens: ids that end the sequence, of which they are the last token.
        stop: further criteria, called after every token with all tokens so far; may be None.
    """

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop: Stop | None = None


def finish_reason(tokens: list[int], token: int, emitted: int, ending: Ending) -> str | None:
    """Why a sequence ends with ``token``, its ``emitted``-th new one; None where it does not."""
    if token in ending.stop_tokens:
        return "eos"
    if ending.stop is not None and ending.stop(tokens):
        return "stop"
    return "length" if emitted >= ending.max_new_tokens else None
