"""Prompts that join a batch while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers.generation.streamers import BaseStreamer

from triforce_tree.grammar.values import Grammar


class Fits(Protocol):
    """Returns whether a batch can decode another prompt beside its sequences. See :class:`Joined`."""

    def __call__(
        self, prompt: list[int], new_tokens: int, options: Mapping[str, Any] | None = None, /
    ) -> bool: ...


@dataclass(frozen=True)
class Joined:
    """A prompt that joins a running batch.

    Attributes:
        prompt: token ids.
        new_tokens: the most new tokens.
        streamer: receives the new tokens; may be None.
        seed: seed of its draws if the batch has a list of seeds; None for no seed.
        grammar: the grammar of its new text, or None.
        options: its options of ``PER_PROMPT`` (``requests/options.py``) without ``max_new_tokens``; None for
            those of the first prompt of the batch.
    """

    prompt: list[int] = field(repr=False)
    new_tokens: int
    streamer: BaseStreamer | None = None
    seed: int | None = None
    grammar: Grammar | None = None
    options: Mapping[str, Any] | None = field(default=None, repr=False)


class Joining(Protocol):
    """A source of prompts that join a running batch. They have the options of the batch, except
    those of :class:`Joined`.

    Sequences are numbered in the order in which they begin, starting with the sequences of the batch. Prompts
    do not join if sequences are decoded one by one, or if keys and values are in host memory. A prompt shares
    stored KV slots if it begins with whole prefill chunks that are already stored.

    Attributes:
        tokens: the most tokens of all prompts that are decoded together; shared tokens count once, and a
            single prompt may be longer. None means no limit beside the number of sequences.
    """

    tokens: int | None

    def wanted(self, fits: Fits) -> int:
        """Returns how many sequences could be decoded together now, those of the batch included.

        The batch gets more or fewer places by it (``requests/batch_pool.sizes_of``). It is not called where
        another number of places would need stages to be captured, or the models have no common pages.

        Args:
            fits: see :meth:`next`.
        """

    def next(self, fits: Fits) -> Joined | None:
        """Returns the next prompt for which ``fits`` is true, or None. It is called between passes while the
        batch has a free place.
        """

    def ended(self, number: int, output: Any) -> None:
        """Receives the output of a sequence that has ended: a ``GenerateOutput`` of this sequence alone, with
        ``sequences`` in host memory and without ``text``, which its streamer can follow.

        If the sequence was decoded with others, ``levels`` has the target alone, ``prefill_seconds`` is the
        device's time for its prompt, and ``decode_seconds`` runs from its first pass to its last.
        """
