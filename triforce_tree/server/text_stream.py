"""Converts the tokens of a running generation to pieces of text, which end before a stop string."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.requests.streamers import TokenStreamer
from triforce_tree.text.new_text import NewText
from triforce_tree.text.vocabulary import Vocabulary

# Lower log-probabilities, including minus infinity, are replaced by this, as JSON has no infinite numbers.
LEAST_LOGPROB = -9999.0


class ScoredToken(NamedTuple):
    """A token and its log-probability, which is at least ``LEAST_LOGPROB``, or None for the first of a text.

    Attributes:
        token: the token id.
        text: the text that the token adds; like ``bytes:\\xe4\\xbd`` for part of a character, and the token's
            name if it adds no text.
        bytes: the bytes of the text; None if there is no text or its bytes are not known.
    """

    token: int
    text: str
    bytes: bytes | None
    logprob: float | None


class TokenLogprobs(NamedTuple):
    """Log-probabilities at the position of one new token.

    Attributes:
        chosen: the new token.
        best: the most probable tokens at its position.
        offset: the number of characters of the text before the token.
    """

    chosen: ScoredToken
    best: list[ScoredToken]
    offset: int


class LevelText(NamedTuple):
    """Text of consecutive tokens that the same level proposed.

    Attributes:
        text: what the tokens add to the text; a later token may complete a character.
        level: ``draft`` or another drafter's name, ``lookup``, ``retrieval`` or ``target``.
        tokens: number of tokens; 0 for text that was held back until the end.
    """

    text: str
    level: str
    tokens: int


class TextStream(TokenStreamer):
    """A streamer of one sequence. Text that may be the beginning of a stop string is held back.

    Args:
        vocabulary: that of the target's tokenizer.
        stop: strings before which the text ends.
        emit: a callback for each piece of text, called in the thread of the generation.
        cancelled: returns whether the generation should end because nobody waits for the text.
        alternatives: number of most probable tokens to report for each new token.
        passed: called after each pass with the number of its new tokens, and the seconds since the pass
            before it; None for the first one.
        wants_origins: whether :meth:`take_levels` is called.
        least: number of new tokens whose text may have stop strings without ending.
        shown: ids of special tokens whose names are part of the text.

    Attributes:
        text: the text that was emitted so far.
        first, newest: the times of the first and of the last pass by ``time.monotonic``; None before.
        count: number of new tokens, including those of a stop string, but none after it.
        starts: the number of characters of the new text before each of the ``count`` new tokens.
        logprobs: log-probabilities of the ``count`` new tokens by the target's distribution; empty if the
            client wants none.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str],
        emit: Callable[[str], None],
        cancelled: Callable[[], bool],
        alternatives: int = 0,
        passed: Callable[[int, float | None], None] = lambda tokens, seconds: None,
        wants_origins: bool = False,
        least: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        self._passed, self.wants_origins, self._shown = passed, wants_origins, shown
        self._origins: list[str] = []
        self._levels: list[LevelText] = []
        self._vocabulary, self._stop = vocabulary, tuple(stop)
        self._emit, self._cancelled, self._alternatives = emit, cancelled, alternatives
        self._least, self._echoed = least, 0
        self._new = NewText(self._vocabulary, (), (), self._stop, shown)
        self.text, self.count = "", 0
        self.first: float | None = None
        self.newest: float | None = None
        self.starts: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._coming: list[tuple[float, list[tuple[int, float]]]] = []
        self._taken = 0

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string was found."""
        return self._new.stopped

    def put_prompt(self, tokens: Sequence[int], end_tokens: Collection[int]) -> None:
        self._new = NewText(
            self._vocabulary, tokens, end_tokens, () if self._least else self._stop, self._shown
        )

    def echo(
        self, prompt: Sequence[int], scores: Sequence[tuple[float, list[tuple[int, float]]]] | None
    ) -> None:
        """Begins the text with that of the prompt.

        Args:
            scores: the log-probability of each token from the second on, and the most probable tokens in its
                place with theirs; None if the client wants none.
        """
        self._new, pieces = NewText(self._vocabulary, ()), []
        for place, token in enumerate(prompt):
            if scores is not None:
                own, best = scores[place - 1] if place else (None, [])
                self.logprobs.append(self._scored(token, own, best))
            pieces.append(self._new.put(token))
        text = "".join([*pieces, self._new.end()])
        self._send(text)
        self._echoed = len(text)

    def wants_end(self) -> bool:
        return self._cancelled()

    def put_origins(self, names: Sequence[str]) -> None:
        self._origins = list(names)

    def put_tokens(self, tokens: Sequence[int]) -> bool:
        now, before, known = time.monotonic(), self.newest, self.count
        self.first, self.newest = self.first or now, now
        pieces = []
        for token, scores in zip(tokens, self._scores(len(tokens)), strict=True):
            # Tokens that the same pass emitted after a stop string are not part of the reply.
            if self.stopped:
                break
            if self.count == self._least > 0:
                self._new.search(self._stop)
            self.count += 1
            self.starts.append(self._new.length)
            if scores is not None:
                self.logprobs.append(self._scored(token, *scores))
            pieces.append(self._new.put(token))
        self._add_levels(pieces)
        self._passed(self.count - known, None if before is None else now - before)
        self._send("".join(pieces))
        return self.stopped or self._cancelled()

    def put_scores(self, scores: Mapping[str, Sequence[Tensor]]) -> None:
        """Stores the scores of the tokens that ``put_tokens`` receives next.

        Args:
            scores: ``logprobs`` has a scalar for each token; ``logits`` has ``[V]`` for each token, and is
                needed for alternatives.
        """
        values = [value.item() for value in scores.get("logprobs", ())]
        best: list[list[tuple[int, float]]] = [[] for _ in values]
        if self._alternatives and (logits := scores.get("logits")):
            rows = torch.stack(list(logits)).float().log_softmax(-1)
            top = rows.topk(min(self._alternatives, rows.shape[1]))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            best = [list(zip(*pair, strict=True)) for pair in pairs]
        self._coming = list(zip(values, best, strict=True))

    def _add_levels(self, pieces: Sequence[str]) -> None:
        """Notes what proposed the tokens with these texts; without names they are the target's own."""
        names, self._origins = self._origins, []
        if not self.wants_origins:
            return
        for piece, name in zip_longest(pieces, names[: len(pieces)], fillvalue="target"):
            last = self._levels[-1] if self._levels else None
            if last is not None and last.level == name:
                self._levels[-1] = LevelText(last.text + piece, name, last.tokens + 1)
            else:
                self._levels.append(LevelText(piece, name, 1))

    def take_levels(self) -> list[LevelText]:
        """Returns what proposed the tokens since the last call."""
        levels, self._levels = self._levels, []
        return levels

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Returns the log-probabilities of the tokens since the last call."""
        new = self.logprobs[self._taken :]
        self._taken += len(new)
        return new

    def end(self) -> None:
        rest = self._new.end()
        if rest and self.wants_origins:
            self._levels.append(LevelText(rest, "target", 0))
        self._send(rest)

    def _scores(self, count: int) -> list[tuple[float, list[tuple[int, float]]] | None]:
        coming, self._coming = self._coming, []
        return [*coming] or [None] * count

    def _scored(self, token: int, logprob: float | None, best: list[tuple[int, float]]) -> TokenLogprobs:
        def scored(token: int, value: float | None) -> ScoredToken:
            if value is not None:
                # The comparison is false for NaN, which is replaced too.
                value = value if value >= LEAST_LOGPROB else LEAST_LOGPROB
            return ScoredToken(token, *self._new.spelled(token), value)

        # The chosen token keeps one value: the log-softmax here may differ from it in the last bits.
        alternatives = [scored(other, logprob if other == token else value) for other, value in best]
        return TokenLogprobs(scored(token, logprob), alternatives, self._echoed + self._new.length)

    def _send(self, text: str) -> None:
        if text:
            self.text += text
            self._emit(text)
