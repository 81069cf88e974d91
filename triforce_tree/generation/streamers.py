"""Streamers of a batch: each follows one sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from triforce_tree.generation.scores import EmittedScores


class Streamers:
    """None, or one for each sequence.

    Args:
        streamers: as transformers' own; a ``put`` that returns True ends its sequence. One with a method
            ``put_scores`` gets a dict before each put: of the logits, scores and log-probabilities that the
            call asks for, those of the tokens that follow.
    """

    def __init__(self, streamers: Sequence[BaseStreamer] = ()) -> None:
        self._streamers = list(streamers)

    @classmethod
    def of(cls, given: Any, count: int) -> "Streamers":
        """From what a user gave for ``count`` sequences: None, a streamer, or a list of them.

        Raises:
            ValueError: there are not as many streamers as sequences.
        """
        listed = given if isinstance(given, (list, tuple)) else [given]
        streamers = [each for each in listed if each is not None]
        if len(streamers) not in (0, count):
            raise ValueError(
                f"a streamer follows one sequence: the batch has {count}, and {len(streamers)} streamers "
                "were given; give a list with one for each, or none"
            )
        return cls(streamers)

    def part(self, rows: slice) -> "Streamers":
        """Those of some sequences."""
        return Streamers(self._streamers[rows])

    def begin(self, ids: Tensor) -> None:
        """Send the prompts ``[B, W]``."""
        for row, streamer in enumerate(self._streamers):
            streamer.put(ids[row : row + 1].cpu())

    def put(
        self, fresh: Sequence[Sequence[int]], end: Callable[[int], None], scores: EmittedScores | None = None
    ) -> None:
        """Send the new tokens of each sequence; ``end`` is called with those that their streamers end.

        Args:
            scores: of these tokens, for streamers that take them.
        """
        for row, (streamer, tokens) in enumerate(zip(self._streamers, fresh, strict=bool(self._streamers))):
            if tokens and scores is not None and (put_scores := getattr(streamer, "put_scores", None)):
                put_scores(scores.newest(row, len(tokens)))
            # transformers' own return None.
            if tokens and streamer.put(torch.tensor(tokens)) is True:
                end(row)

    def end(self) -> None:
        for streamer in self._streamers:
            streamer.end()
