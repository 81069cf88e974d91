"""Streamers of a batch: each follows one sequence."""

from collections.abc import Collection
from collections.abc import Sequence as Sequences
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from triforce_tree.decoding.sequence import Sequence
from triforce_tree.runtime.token_ids import id_tensor


class TokenStreamer(BaseStreamer):
    """A streamer of one sequence, which is told of the prompt's tokens and the end tokens by themselves.

    It may be given to transformers' own ``generate`` too, which sends the prompt as a batch of one.
    """

    def put(self, value: Tensor) -> bool:
        """Take new tokens ``[N]`` or a prompt ``[1, W]``; returns whether the sequence is to end."""
        if value.dim() > 1:
            self.put_prompt(value[0].tolist(), ())
            return False
        return self.put_tokens(value.tolist())

    def put_prompt(self, tokens: Sequences[int], end_tokens: Collection[int]) -> None:
        """The sequence begins.

        Args:
            tokens: the prompt's, without padding.
            end_tokens: ids that end the sequence.
        """
        raise NotImplementedError

    def put_tokens(self, tokens: Sequences[int]) -> bool:
        """Take new tokens; returns whether the sequence is to end."""
        raise NotImplementedError


class NewestScores(Protocol):
    """What a call asks for of its tokens: ``EmittedScores``."""

    def newest(self, b: int, count: int) -> dict[str, list[Tensor]]:
        """What is wanted of the last ``count`` tokens of sequence b, by name: ``[V]`` or ``[]`` of each."""


class Streamers:
    """None, or one for each sequence.

    Args:
        streamers: as transformers' own; a ``put`` that returns True ends its sequence. One with a method
            ``put_scores`` gets a dict before each put: of the logits, scores and log-probabilities that the
            call asks for, those of the tokens that follow. One with the method ``put_prompt`` of
            :class:`TokenStreamer` gets the prompt by it, and not by a put.
    """

    def __init__(self, streamers: Sequences[BaseStreamer] = ()) -> None:
        self._streamers: list[BaseStreamer | None] = list(streamers)

    @classmethod
    def of(cls, given: Any, count: int) -> "Streamers":
        """From what a user gave for ``count`` sequences: None, a streamer, or a list of them.

        Raises:
            ValueError: there are not as many streamers as sequences, or one is no streamer.
        """
        listed = given if isinstance(given, (list, tuple)) else [given]
        streamers = [each for each in listed if each is not None]
        if len(streamers) not in (0, count):
            raise ValueError(
                f"a streamer follows one sequence: the batch has {count}, and {len(streamers)} streamers "
                "were given; give a list with one for each, or none"
            )
        for each in streamers:
            if not (callable(getattr(each, "put", None)) and callable(getattr(each, "end", None))):
                raise ValueError(
                    f"streamer={each!r} has no methods put and end; give one of transformers, such as "
                    "TextStreamer(tokenizer)"
                )
        return cls(streamers)

    def part(self, rows: slice) -> "Streamers":
        """Those of some sequences."""
        return Streamers([each for each in self._streamers[rows] if each is not None])

    def begin(self, ids: Tensor, sequences: Sequences[Sequence]) -> None:
        """Send the prompts: ``ids`` ``[B, W]``, or those of ``sequences``, without padding."""
        for row, streamer in enumerate(self._streamers):
            assert streamer is not None
            if not _takes_prompt(streamer, sequences[row]):
                streamer.put(ids[row : row + 1].cpu())

    def join(self, streamer: BaseStreamer | None, sequence: Sequence) -> None:
        """Send its prompt to the streamer of a further sequence, if it has one."""
        self._streamers += [None] * (sequence.number + 1 - len(self._streamers))
        self._streamers[sequence.number] = streamer
        if streamer is not None and not _takes_prompt(streamer, sequence):
            streamer.put(id_tensor(sequence.prompt)[None])

    def put(self, number: int, tokens: Sequences[int], scores: NewestScores | None = None) -> bool:
        """Send new tokens of a sequence; whether its streamer ends it.

        Args:
            scores: of these tokens, for streamers that take them.
        """
        streamer = self._streamers[number] if self._streamers else None
        if scores is not None and (put_scores := getattr(streamer, "put_scores", None)):
            put_scores(scores.newest(number, len(tokens)))
        # transformers' own return None.
        return streamer is not None and streamer.put(torch.tensor(tokens)) is True

    def end(self, number: int) -> None:
        """A sequence has ended."""
        if self._streamers and (streamer := self._streamers[number]) is not None:
            streamer.end()
            self._streamers[number] = None


def _takes_prompt(streamer: BaseStreamer, sequence: Sequence) -> bool:
    """Whether a streamer takes its prompt by ``put_prompt``; it then has it."""
    put_prompt = getattr(streamer, "put_prompt", None)
    if put_prompt is None:
        return False
    put_prompt(sequence.prompt, sequence.ending.stop_tokens)
    return True
