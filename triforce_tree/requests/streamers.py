"""Streamers of a batch: each follows one sequence."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequences
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from triforce_tree.decoding.sequence import Sequence
from triforce_tree.runtime.token_ids import id_tensor


class TokenStreamer(BaseStreamer):
    """A streamer of one sequence, which receives the tokens of the prompt and the end tokens in a separate
    call.

    It can also be passed to transformers' own ``generate``, which sends the prompt as a batch of one.

    Attributes:
        wants_origins: whether :meth:`put_origins` is called before each put. The names cost a copy from the
            device in each pass.
    """

    wants_origins = False

    def put_origins(self, names: Sequences[str]) -> None:
        """Receives what proposed each of the tokens that follow: ``lookup`` for matched tokens, or the name
        of a level (``Origins.take``).
        """

    def wants_end(self) -> bool:
        """Returns whether the sequence is to end. It is asked while the prompt is prefilled."""
        return False

    def put(self, value: Tensor) -> bool:
        """Takes new tokens ``[N]`` or a prompt ``[1, W]``; returns whether the sequence is to end."""
        if value.dim() > 1:
            self.put_prompt(value[0].tolist(), ())
            return False
        return self.put_tokens(value.tolist())

    def put_prompt(self, tokens: Sequences[int], end_tokens: Collection[int]) -> None:
        """Begins a sequence.

        Args:
            tokens: tokens of the prompt, without padding.
            end_tokens: ids that end the sequence.
        """
        raise NotImplementedError

    def put_tokens(self, tokens: Sequences[int]) -> bool:
        """Takes new tokens; returns whether the sequence is to end."""
        raise NotImplementedError


Newest = Callable[[int, int], dict[str, list[Tensor]]]
"""A function of the number of a sequence and a number of tokens: see ``EmittedScores.newest``."""


class Streamers:
    """The streamers of a batch: either none, or one for each sequence.

    A ``put`` that returns True ends its sequence. If a streamer has a method ``put_scores``, it is called
    before each put with a dict of the requested logits, scores and log-probabilities of the tokens that
    follow. If a streamer has the method ``put_prompt`` of :class:`TokenStreamer`, it receives the prompt
    through this method and not through ``put``.

    Args:
        given: None, a streamer as in transformers, or a list of streamers.
        count: the number of sequences.

    Raises:
        ValueError: the number of streamers differs from that of the sequences, or an entry is not a streamer.
    """

    def __init__(self, given: Any = None, count: int = 0) -> None:
        listed = given if isinstance(given, (list, tuple)) else [given]
        self._streamers: list[BaseStreamer | None] = [each for each in listed if each is not None]
        if (number := len(self._streamers)) not in (0, count):
            raise ValueError(
                f"a streamer follows one sequence: the batch has {count}, and {number} streamers were given; "
                "give a list with one for each, or none"
            )
        for each in self._streamers:
            methods = [callable(getattr(each, name, None)) for name in ("put", "end")]
            if isinstance(each, type) or not all(methods):
                raise ValueError(
                    f"streamer={each!r} is no object with methods put and end; give one of transformers, "
                    "such as TextStreamer(tokenizer)"
                )

    def alone(self, number: int) -> "Streamers":
        """Returns the streamer of one sequence."""
        return Streamers(self._streamers[number : number + 1], 1)

    def begin(self, ids: Tensor, sequences: Sequences[Sequence]) -> None:
        """Sends the prompts to the streamers: ``ids`` ``[B, W]``, or the prompts of ``sequences`` without
        padding.
        """
        for number, streamer in enumerate(self._streamers):
            assert streamer is not None
            if not _takes_prompt(streamer, sequences[number]):
                streamer.put(ids[number : number + 1].cpu())

    def join(self, streamer: BaseStreamer | None, sequence: Sequence) -> None:
        """Adds the streamer of a sequence that joins the batch, if it has one, and sends the prompt to it."""
        self._streamers += [None] * (sequence.number + 1 - len(self._streamers))
        self._streamers[sequence.number] = streamer
        if streamer is not None and not _takes_prompt(streamer, sequence):
            streamer.put(id_tensor(sequence.prompt)[None])

    def put(self, number: int, tokens: Sequences[int], newest: Newest | None = None) -> bool:
        """Sends new tokens to the streamer of a sequence. Returns whether the streamer ends the sequence.

        Args:
            newest: returns the values of these tokens, for streamers that take them.
        """
        streamer = self._streamers[number] if self._streamers else None
        if newest is not None and (put_scores := getattr(streamer, "put_scores", None)):
            put_scores(newest(number, len(tokens)))
        if isinstance(streamer, TokenStreamer):
            return streamer.put_tokens(tokens)
        # The streamers of transformers return None.
        return streamer is not None and streamer.put(torch.tensor(tokens, device="cpu")) is True

    def wants_end(self, number: int) -> bool:
        """Returns whether the streamer ends its sequence, whose prompt is being prefilled."""
        streamer = self._streamers[number] if self._streamers else None
        return isinstance(streamer, TokenStreamer) and streamer.wants_end()

    @property
    def want_origins(self) -> bool:
        """Returns whether a streamer wants to know what proposed the tokens."""
        return any(getattr(each, "wants_origins", False) for each in self._streamers)

    def put_origins(self, number: int, names: Sequences[str]) -> None:
        """Tells the streamer of a sequence, if it wants to know, what proposed its next tokens."""
        streamer = self._streamers[number]
        if isinstance(streamer, TokenStreamer) and streamer.wants_origins:
            streamer.put_origins(names)

    def end(self, number: int) -> None:
        """Calls ``end`` of the streamer of a sequence that has ended."""
        if self._streamers and (streamer := self._streamers[number]) is not None:
            streamer.end()
            self._streamers[number] = None


def _takes_prompt(streamer: BaseStreamer, sequence: Sequence) -> bool:
    """Sends the prompt to a streamer with the method ``put_prompt``. Returns whether it has the method."""
    put_prompt = getattr(streamer, "put_prompt", None)
    if put_prompt is None:
        return False
    put_prompt(sequence.prompt, sequence.ending.stop_tokens)
    return True
