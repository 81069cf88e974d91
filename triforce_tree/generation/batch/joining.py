"""Prompts that join a batch while it runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers.generation.streamers import BaseStreamer

Fits = Callable[[list[int], int], bool]
"""Whether the buffers and levels of a batch serve a prompt, and so many new tokens after it, beside those
that are decoded."""


@dataclass(frozen=True)
class Joined:
    """A prompt that joins a running batch.

    Attributes:
        prompt: token ids.
        new_tokens: most of them.
        streamer: gets its tokens; None for nobody.
        seed: of its draws, where the batch has a list of seeds; None for none.
    """

    prompt: list[int] = field(repr=False)
    new_tokens: int
    streamer: BaseStreamer | None = None
    seed: int | None = None


class Joining(Protocol):
    """Where prompts come from while a batch runs; they share all its options but the number of new tokens.

    Sequences are numbered in the order in which they begin, the batch's own first. Prompts do not join where
    sequences are decoded one by one, or where keys and values are in host memory. Those that begin with whole
    chunks of a prefill that are stored already share them.

    Attributes:
        tokens: most tokens of all prompts that are decoded together, those that are stored once counted once;
            more where a single prompt has more. None: as many as there are rows for.
    """

    tokens: int | None

    def wanted(self, fits: Fits) -> int:
        """How many sequences could be decoded together now, those of the batch included.

        Where it costs nothing, on a CPU, the batch gets as many rows; on a GPU it has ``max_batch`` from the
        beginning, as its stages are captured for a number of rows, and this is not asked.

        Args:
            fits: see :meth:`next`.
        """

    def next(self, fits: Fits) -> Joined | None:
        """The next prompt, which ``fits``, or None; asked between passes where a row is free."""

    def ended(self, number: int, output: Any) -> None:
        """A sequence has ended, decoded with others or not; ``output`` is a ``GenerateOutput`` of it alone.

        Of one that was decoded with others ``levels`` have the target alone, ``prefill_seconds`` are of all
        prompts that joined with it, ``decode_seconds`` of the passes from its first to its last one.
        """
