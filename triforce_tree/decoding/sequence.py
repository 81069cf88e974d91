"""A text that is being decoded: the only place that holds its tokens, stop criteria and statistics."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from triforce_tree.decoding.stop_criteria import Ending, finish_reason
from triforce_tree.runtime.stats import LevelStats


@dataclass(eq=False)
class Sequence:
    """Holds one text that is being decoded.

    Attributes:
        prompt: token ids.
        ending: its stop criteria.
        number: counted from the first sequence of a call. Its random numbers depend on it.
        seed: of its own random numbers, by position; None for those that the seed of the call gives it.
        tokens: the prompt and the new tokens so far.
        finish_reason: why it has ended; None while it runs.
        row: its place in the batch, which has its KV slots; None before it has one.
        reused: tokens of the prompt whose keys and values the cache held before.
        target: statistics of the target's passes over it.
        prefill_seconds: of all prompts that were prefilled with it.
        decode_seconds: of the passes from its first to its last one.
    """

    prompt: list[int] = field(repr=False)
    ending: Ending
    number: int = 0
    seed: int | None = None
    tokens: list[int] = field(init=False, repr=False)
    finish_reason: str | None = None
    row: int | None = None
    reused: int = 0
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
        """The most tokens that may still follow."""
        return self.ending.max_new_tokens - len(self.tokens) + len(self.prompt)

    def append(self, tokens: Sequences[int]) -> list[int]:
        """Appends the tokens of a pass up to the end of the sequence; returns those that were appended."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            new = len(self.tokens) - len(self.prompt)
            self.finish_reason = finish_reason(self.tokens, token, new, self.ending)
            if self.finish_reason is not None:
                break
        return self.tokens[before:]

    def take_back(self, tokens: int) -> None:
        """Removes the last ``tokens`` tokens that :meth:`append` added."""
        del self.tokens[len(self.tokens) - tokens :]
        self.finish_reason = None

    def count(self, new: int, committed: int, proposed: int) -> None:
        """Counts a pass of the target.

        Args:
            new: tokens of the pass up to the end of the sequence.
            committed: all tokens of the pass.
            proposed: draft tokens that it verified.
        """
        self.target.forwards += 1
        self.target.proposed += proposed
        self.target.accepted += committed - 1
        self.target.emitted += new
