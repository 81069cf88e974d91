"""When a text ends."""

from collections.abc import Callable
from dataclasses import dataclass

Stop = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Ending:
    """When a text ends.

    Attributes:
        max_new_tokens: tokens to emit at most.
        stop_tokens: ids that end the text (and belong to it).
        stop: further criteria on all tokens so far, asked after every single token; may be None.
    """

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop: Stop | None = None


def finish_reason(tokens: list[int], token: int, emitted: int, ending: Ending) -> str | None:
    """Why a text ends with ``token``, its ``emitted``-th new one; None when it goes on."""
    if token in ending.stop_tokens:
        return "eos"
    if ending.stop is not None and ending.stop(tokens):
        return "stop"
    return "length" if emitted >= ending.max_new_tokens else None
