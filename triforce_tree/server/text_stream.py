"""The texts of requests, and their streams, which convert new tokens to pieces of text."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce_tree.requests.output import GenerateOutput
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


@dataclass(eq=False)
class ServedText:
    """One text of a request: its prompt, its settings, and its results.

    Attributes:
        prompt: token ids.
        settings: options of ``generate``, which may differ from those of sequences beside it.
        speculation: the option of ``generate`` that limits drafts; it is equal for all sequences of a batch.
        echo: whether its text begins with that of the prompt.
        stop: strings before which its text ends.
        alternatives: number of most probable tokens to report for each new token.
        client: name or address of the client; the queue is fair to clients, see ``FairQueue``.
        levels: whether to report what proposed each new token.
        seed: seed of its draws, which then do not depend on the batch; None for a random seed.
        shown: ids of special tokens whose names are part of the text.
        emit: called with pieces of text while it is decoded, then once with None. It is called in the
            scheduler's thread or, if the text was cancelled before it began, in the thread that next calls
            ``Scheduler.submit``.
        cancelled: whether its decoding should end. Any thread may set it, when nobody waits for the text any
            more or the server ends.
        stream: the stream with its text so far; None before decoding begins.
        output: the output of the sequence; None before it has ended.
        cut: whether it was cancelled before its end.
        error: the reason why it could not be decoded; None if there is none.
        alone: whether it is decoded by itself, after a batch with it has failed.
        began: the time of its arrival by ``time.monotonic``.
        waited: the seconds that it has waited in the queue.
    """

    prompt: list[int] = field(repr=False)
    settings: dict[str, Any]
    stop: tuple[str, ...]
    emit: Callable[[str | None], None]
    seed: int | None = None
    alternatives: int = 0
    levels: bool = False
    speculation: Mapping[str, Any] | None = None
    echo: bool = False
    shown: frozenset[int] = frozenset()
    client: str = ""
    cancelled: bool = False
    stream: "TextStream | None" = None
    output: GenerateOutput | None = None
    cut: bool = False
    error: BaseException | None = None
    alone: bool = False
    began: float = field(default_factory=time.monotonic)
    waited: float = 0.0

    @cached_property
    def options(self) -> dict[str, Any]:
        """Returns the settings that ``Joined.options`` has."""
        own = ("max_new_tokens", "grammar")
        return {name: value for name, value in self.settings.items() if name not in own}

    @property
    def complete(self) -> bool:
        """Returns whether the text has ended as its request demands."""
        return self.output is not None and not self.cut and self.error is None

    def end_waiting(self) -> None:
        """Records the seconds that the text has waited in the queue."""
        self.waited = time.monotonic() - self.began

    def result(self, name: str) -> Any:
        """Returns ``finish_reason``, ``new_tokens`` or another value of the output."""
        return getattr(self.output, name)


class TextStream(TokenStreamer):
    """A streamer of one sequence. Text that may be the beginning of a stop string is held back.

    Args:
        sequence: the text to decode, with its settings.
        vocabulary: the vocabulary of the target's tokenizer.
        over: returns whether decoding of the sequence should end because nobody waits for its text.
        passed: called after each pass with the sequence, the number of its new tokens, and the seconds since
            the pass before it; None for the first one.

    Attributes:
        text: the text that was emitted so far.
        first, newest: the times of the first and of the last pass by ``time.monotonic``; None before the
            first pass.
        count: number of new tokens, including those of a stop string, but excluding those after it.
        starts: the number of characters of the new text before each of the ``count`` new tokens.
        logprobs: log-probabilities of the ``count`` new tokens by the target's distribution; empty if the
            client wants none.
    """

    def __init__(
        self,
        sequence: ServedText,
        vocabulary: Vocabulary,
        over: Callable[[ServedText], bool],
        passed: Callable[[ServedText, int, float | None], None] = lambda *_: None,
    ) -> None:
        self._sequence, self._vocabulary, self._over, self._passed = sequence, vocabulary, over, passed
        self.wants_origins = sequence.levels
        # Number of new tokens whose text may have stop strings without ending.
        self._least: int = sequence.settings.get("min_new_tokens") or 0
        self._new, self._echoed = NewText(vocabulary, (), (), sequence.stop, sequence.shown), 0
        self._origins: list[str] = []
        self._levels: list[LevelText] = []
        self.text, self.count = "", 0
        self.first: float | None = None
        self.newest: float | None = None
        self.starts: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._coming: Sequence[tuple[float, list[tuple[int, float]]] | None] = []
        self._taken = 0

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string was found."""
        return self._new.stopped

    def put_prompt(self, tokens: Sequence[int], end_tokens: Collection[int]) -> None:
        stop = () if self._least else self._sequence.stop
        self._new = NewText(self._vocabulary, tokens, end_tokens, stop, self._sequence.shown)

    def echo(
        self, prompt: Sequence[int], scores: Sequence[tuple[float, list[tuple[int, float]]]] | None
    ) -> None:
        """Begins the text with that of the prompt.

        Args:
            scores: for each token from the second on, its log-probability, and the most probable tokens at
                its position with their log-probabilities; None if the client wants none.
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
        return self._over(self._sequence)

    def put_origins(self, names: Sequence[str]) -> None:
        self._origins = list(names)

    def put_tokens(self, tokens: Sequence[int]) -> bool:
        now, before, known = time.monotonic(), self.newest, self.count
        self.first, self.newest = self.first or now, now
        coming, self._coming = self._coming or [None] * len(tokens), []
        pieces = []
        for token, scores in zip(tokens, coming, strict=True):
            # Tokens that the same pass emitted after a stop string are not part of the reply.
            if self.stopped:
                break
            if self.count == self._least > 0:
                self._new.search(self._sequence.stop)
            self.count += 1
            self.starts.append(self._new.length)
            if scores is not None:
                self.logprobs.append(self._scored(token, *scores))
            pieces.append(self._new.put(token))
        self._add_levels(pieces)
        self._passed(self._sequence, self.count - known, None if before is None else now - before)
        self._send("".join(pieces))
        return self.stopped or self._over(self._sequence)

    def put_scores(self, scores: Mapping[str, Sequence[Tensor]]) -> None:
        """Stores the scores of the tokens that ``put_tokens`` receives next.

        Args:
            scores: ``logprobs`` has a scalar for each token; ``logits`` has ``[V]`` for each token, and is
                needed for alternatives.
        """
        values = [value.item() for value in scores.get("logprobs", ())]
        best: list[list[tuple[int, float]]] = [[] for _ in values]
        if (most := self._sequence.alternatives) and (logits := scores.get("logits")):
            rows = torch.stack(list(logits)).float().log_softmax(-1)
            top = rows.topk(min(most, rows.shape[1]))
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

    def take_scores(self) -> tuple[list[TokenLogprobs], list[LevelText]]:
        """Returns the log-probabilities of the tokens since the last call, and what proposed them."""
        logprobs, levels = self.logprobs[self._taken :], self._levels
        self._taken, self._levels = len(self.logprobs), []
        return logprobs, levels

    def end(self) -> None:
        rest = self._new.end()
        if rest and self.wants_origins:
            self._levels.append(LevelText(rest, "target", 0))
        self._send(rest)

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
            self._sequence.emit(text)
