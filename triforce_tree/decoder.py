"""The loop: propose, verify, commit, until the text ends. No tensor maths."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from triforce_tree.drafters.base import Drafter
from triforce_tree.level import Progress
from triforce_tree.stats import LevelStats
from triforce_tree.token_tree import Context
from triforce_tree.verify.verifier import Verifier

Stop = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Ending:
    """When a text ends.

    Attributes:
        max_new_tokens: tokens to emit at most.
        stop_tokens: ids that end the text (and belong to it).
        stop: further criteria on all tokens so far, asked after every single token; may be None.
    """

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop: Stop | None = None


class Decoder:
    """Level 2 and what drafts for it.

    Args:
        verifier: the target with its full cache.
        drafter: anything that keeps the drafter's contract.
    """

    def __init__(self, verifier: Verifier, drafter: Drafter) -> None:
        self.verifier = verifier
        self.drafter = drafter
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.finish_reason: str | None = None

    @property
    def finish_reasons(self) -> list[str | None]:
        """Of the texts, of which there is one."""
        return [self.finish_reason]

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics, level 0 first."""
        return [*self.drafter.stats, self.verifier.stats]

    def prefill(self, prompt: Sequence[int], progress: Progress | None = None) -> Context:
        """Feed the prompt to every level; all but its last token, which is the first root."""
        start = time.perf_counter()
        context = Context(list(prompt))
        self.verifier.prefill(context, progress)
        self.drafter.prefill(context)
        self.prefill_seconds += time.perf_counter() - start
        for stats in self.levels:
            stats.reset()
        return context

    def decode(self, prompt: Context, ending: Ending) -> Iterator[list[int]]:
        """Yield new tokens as each level-2 pass settles them."""
        tokens = list(prompt)
        emitted = 0
        while self.finish_reason is None:
            start = time.perf_counter()
            context = Context(tokens)
            verdict = self.verifier.verify(context, self.drafter.propose(context))
            new: list[int] = []
            for token in verdict.tokens:
                new.append(token)
                tokens.append(token)
                self.finish_reason = finish_reason(tokens, token, emitted + len(new), ending)
                if self.finish_reason:
                    break
            emitted += len(new)
            # What the verifier emitted behind the text's end is no part of it.
            self.verifier.stats.emitted -= len(verdict.tokens) - len(new)
            if not self.finish_reason:
                context = Context(tokens)
                self.verifier.commit(context)
                self.drafter.commit(context)
            self.decode_seconds += time.perf_counter() - start
            yield new


def finish_reason(tokens: list[int], token: int, emitted: int, ending: Ending) -> str | None:
    """Why a text ends with ``token``, its ``emitted``-th new one; None when it goes on."""
    if token in ending.stop_tokens:
        return "eos"
    if ending.stop is not None and ending.stop(tokens):
        return "stop"
    return "length" if emitted >= ending.max_new_tokens else None
