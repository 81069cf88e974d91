"""Tokens of a running generation as pieces of text, cut at stop strings."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from triforce_tree.generation.batch.streamers import TokenStreamer
from triforce_tree.text.new_text import NewText
from triforce_tree.text.vocabulary import Vocabulary

# Log-probabilities below, minus infinity among them, are given as this: JSON has no infinite numbers.
LEAST_LOGPROB = -9999.0


class ScoredToken(NamedTuple):
    """A token and its log-probability, at least ``LEAST_LOGPROB``.

    Attributes:
        token: id.
        text: what it adds to the text; ``bytes:\\xe4\\xbd`` for a part of a character, the name of a token
            that adds none.
        bytes: those of the text; None where it adds none, or they are not known.
    """

    token: int
    text: str
    bytes: bytes | None
    logprob: float


class TokenLogprobs(NamedTuple):
    """A new token, the most probable tokens in its place, and the characters of the text before it."""

    chosen: ScoredToken
    best: list[ScoredToken]
    offset: int


class TextStream(TokenStreamer):
    """A streamer of one sequence. Text that may be the beginning of a stop string is held back.

    Args:
        tokenizer: of the target.
        stop: strings before which the text ends.
        emit: called with each piece of text, in the thread of the generation.
        cancelled: whether nobody waits for the text any more.
        alternatives: most probable tokens to report in the place of each.

    Attributes:
        text: all that was emitted.
        first: when the first new token came, by ``time.monotonic``; None before.
        count: new tokens, those of a stop string included, those after it not.
        logprobs: of so many new tokens, by the target's own distribution; empty where they are not wanted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        emit: Callable[[str], None],
        cancelled: Callable[[], bool],
        alternatives: int = 0,
    ) -> None:
        self._vocabulary, self._stop = Vocabulary(tokenizer), tuple(stop)
        self._emit, self._cancelled, self._alternatives = emit, cancelled, alternatives
        self._new = NewText(self._vocabulary, (), (), self._stop)
        self.text, self.count = "", 0
        self.first: float | None = None
        self.logprobs: list[TokenLogprobs] = []
        self._coming: list[tuple[float, list[tuple[int, float]]]] = []
        self._taken = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._new.stopped

    def put_prompt(self, tokens: Sequence[int], end_tokens: Collection[int]) -> None:
        self._new = NewText(self._vocabulary, tokens, end_tokens, self._stop)

    def put_tokens(self, tokens: Sequence[int]) -> bool:
        self.first = self.first or time.monotonic()
        pieces = []
        for token, scores in zip(tokens, self._scores(len(tokens)), strict=True):
            # Tokens of this pass after a stop string are not part of the reply.
            if self.stopped:
                break
            self.count += 1
            if scores is not None:
                self.logprobs.append(self._scored(token, *scores))
            pieces.append(self._new.put(token))
        self._send("".join(pieces))
        return self.stopped or self._cancelled()

    def put_scores(self, scores: Mapping[str, Sequence[Tensor]]) -> None:
        """Take what the call asks for of the next tokens: ``logprobs``, and ``logits`` for alternatives."""
        values = [value.item() for value in scores.get("logprobs", ())]
        best: list[list[tuple[int, float]]] = [[] for _ in values]
        if self._alternatives and (logits := scores.get("logits")):
            rows = torch.stack(list(logits)).float().log_softmax(-1)
            top = rows.topk(min(self._alternatives, rows.shape[1]))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            best = [list(zip(*pair, strict=True)) for pair in pairs]
        self._coming = list(zip(values, best, strict=True))

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens since the last call."""
        found = self.logprobs[self._taken :]
        self._taken += len(found)
        return found

    def end(self) -> None:
        self._send(self._new.end())

    def _scores(self, count: int) -> list[tuple[float, list[tuple[int, float]]] | None]:
        coming, self._coming = self._coming, []
        return [*coming] or [None] * count

    def _scored(self, token: int, logprob: float, best: list[tuple[int, float]]) -> TokenLogprobs:
        def scored(token: int, value: float) -> ScoredToken:
            # Not a number is no less than anything, and given as the least too.
            return ScoredToken(
                token, *self._new.spelled(token), value if value >= LEAST_LOGPROB else LEAST_LOGPROB
            )

        # The chosen token has one value, however its row was summed up.
        alternatives = [scored(other, logprob if other == token else value) for other, value in best]
        return TokenLogprobs(scored(token, logprob), alternatives, self._new.length)

    def _send(self, text: str) -> None:
        if text:
            self.text += text
            self._emit(text)
