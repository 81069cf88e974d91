"""A text that is being decoded: its tokens, stop criteria and statistics."""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from triforce_tree.grammar.matching import Matcher
from triforce_tree.runtime.stats import LevelStats
from triforce_tree.verify.sampling import ProbsFromLogits

Stop = Callable[[list[int]], bool]
"""A stop criterion: called with all tokens so far, it returns whether the sequence ends."""


@dataclass(frozen=True)
class Ending:
    """Holds the criteria by which a sequence ends.

    Attributes:
        max_new_tokens: the most new tokens.
        stop_tokens: ids that end the sequence; the id that was emitted is its last token.
        stop: a further criterion, called after every token; may be None.
    """

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop: Stop | None = None

    def reason(self, tokens: list[int], new: int) -> str | None:
        """Returns why a sequence ends after its last token, or None if it does not end.

        Args:
            tokens: all tokens so far.
            new: how many of them are new.
        """
        if tokens[-1] in self.stop_tokens:
            return "eos"
        if self.stop is not None and self.stop(tokens):
            return "stop"
        return "length" if new >= self.max_new_tokens else None


@dataclass(eq=False)
class Sequence:
    """Holds one text that is being decoded.

    Attributes:
        prompt: token ids.
        ending: the stop criteria.
        number: the number of the sequence in its call, from 0. Its random numbers depend on it.
        seed: the sequence's own seed, see ``verify/seeded.py``; None if it has none.
        matcher: the state of the grammar of its new tokens so far; None without a grammar.
        to_probs: its sampling options; None for those of the decoding loop.
        outputs: which of "logits", "scores" and "logprobs" are wanted of its new tokens.
        tokens: the prompt and the new tokens so far.
        finish_reason: why it has ended; None while it runs.
        index: its batch index, which determines its KV slots; None before it has one.
        reused: tokens of the prompt whose keys and values the cache held before.
        computed: tokens of the prompt that were computed for it, between passes of others.
        target: statistics of the target's passes over it.
        prefill_seconds: the seconds of its prefill: those of the device if it joined others, else those of
            the host for all prompts together.
        decode_seconds: the seconds of the passes from its first to its last one.
    """

    prompt: list[int] = field(repr=False)
    ending: Ending
    number: int = 0
    seed: int | None = None
    matcher: Matcher | None = field(default=None, repr=False)
    to_probs: ProbsFromLogits | None = field(default=None, repr=False)
    outputs: frozenset[str] = frozenset()
    tokens: list[int] = field(init=False, repr=False)
    finish_reason: str | None = None
    index: int | None = None
    reused: int = 0
    computed: int = 0
    target: LevelStats = field(default_factory=lambda: LevelStats("target"))
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def new(self) -> list[int]:
        """Returns the new tokens so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """Returns the most tokens that may still follow."""
        return self.ending.max_new_tokens - len(self.tokens) + len(self.prompt)

    def append(self, tokens: Sequences[int]) -> list[int]:
        """Appends the tokens of a pass up to the end of the sequence; returns those that were appended."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            self.finish_reason = self.ending.reason(self.tokens, len(self.tokens) - len(self.prompt))
            if self.finish_reason is not None:
                break
        added = self.tokens[before:]
        if self.matcher is not None:
            self.matcher.accept(added)
        return added

    def take_back(self, tokens: int) -> None:
        """Removes the last ``tokens`` tokens that :meth:`append` added."""
        del self.tokens[len(self.tokens) - tokens :]
        self.finish_reason = None
        if self.matcher is not None:
            self.matcher.take_back(tokens)
