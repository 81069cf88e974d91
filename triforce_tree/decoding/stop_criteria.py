"""When a sequence ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Stop = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Ending:
    """When a sequence ends.

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


def append(tokens: list[int], new: Sequence[int], start: int, ending: Ending) -> str | None:
    """Append the new tokens of a pass to a sequence, up to its end.

    Args:
        start: length of its prompt.

    Returns:
        why it ends with the last one appended; None where it does not.
    """
    for token in new:
        tokens.append(token)
        reason = finish_reason(tokens, token, len(tokens) - start, ending)
        if reason is not None:
            return reason
    return None


def tokens_left(
    emitted: Sequence[int], endings: Sequence[Ending | None], reasons: Sequence[str | None]
) -> int:
    """The most tokens that a running sequence may still get.

    Args:
        emitted: new tokens of each sequence.
        endings, reasons: of each sequence; a reason of None for one that runs.
    """
    rows = zip(emitted, endings, reasons, strict=True)
    return max(e.max_new_tokens - n for n, e, reason in rows if e is not None and reason is None)
