"""Runs plain passes over tokens that the caller chooses, and returns the logits after each token."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.decoding.hierarchy import PlannedPrograms
from triforce_tree.decoding.out_of_memory import give_way
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits


class PlainPasses:
    """Computes the target's logits for sequences that grow by one token in each plain pass.

    Args:
        programs: makes the program, and a smaller one where memory runs out.
        prompts: all tokens of each sequence.
        progress, reuse: as for ``DecodingProgram.prefill``.

    Attributes:
        sequences: the tokens of each sequence so far.
        reused: tokens of each prompt whose keys and values the cache held.
        prefill_seconds, capture_seconds: see ``GenerateOutput``.
    """

    def __init__(
        self,
        programs: PlannedPrograms,
        prompts: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
    ) -> None:
        self._programs, self._progress, self._reuse = programs, progress, reuse
        self.sequences = [list(prompt) for prompt in prompts]
        self.reused: list[int] | None = None
        self.prefill_seconds = self.capture_seconds = 0.0
        self._program: DecodingProgram | None = None
        self._unused: torch.Generator  # nothing is drawn

    def logits(self, with_nan: bool = False) -> Tensor:
        """Returns the logits of the next token of each sequence, fp32 ``[B, V]``.

        :meth:`append` must be called before the next call.

        Args:
            with_nan: whether the logits may contain NaN.

        Raises:
            ValueError: the logits contain NaN.
            torch.OutOfMemoryError: memory is short, and the plan cannot be reduced.
        """
        while True:
            try:
                return self._pass(with_nan)
            except torch.OutOfMemoryError as error:
                out_of_memory = error
            give_way(out_of_memory, self._shrink)

    def _shrink(self) -> bool:
        """Drops the program; returns whether the memory plan could be reduced."""
        self._program = None
        return self._programs.shrink()

    def _pass(self, with_nan: bool) -> Tensor:
        program = self._program = self._program or self._begun()
        program.run("plain", self._unused)
        found = program.verifier("plain").emitted_logits(1)[:, 0]
        if not with_nan and bool(program.state.has_nan):
            raise ValueError(NAN_LOGITS)
        return found

    def append(self, tokens: Sequence[int]) -> None:
        """Appends a token to each sequence, after :meth:`logits`."""
        assert self._program is not None, "no pass was made"
        state = self._program.state
        # The pass has appended the most probable tokens, which the given ones replace.
        given = id_tensor(tokens, state.device)
        state.tokens.scatter_(1, state.length[:, None], given[:, None])
        self._program.cache.committed([[token] for token in tokens])
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.append(token)

    def ended(self, texts: Sequence[Sequence[int]]) -> None:
        """Lets later requests continue these texts, with which the sequences begin."""
        if self._program is not None:
            for b, tokens in enumerate(texts):
                self._program.ended(b, tokens, self._reuse)

    def forget(self) -> None:
        """Marks the cache as unusable for later requests, after an error."""
        if self._program is not None:
            self._program.cache.forget()

    def _begun(self) -> DecodingProgram:
        """Returns a program whose cache holds all tokens so far."""
        program = self._programs.make(self.sequences)
        program.prepare(ProbsFromLogits(greedy=True))
        self._unused = torch.Generator(program.device)
        self.capture_seconds = program.capture_seconds
        start = time.perf_counter()
        reused = program.prefill(self.sequences, self._progress, self._reuse)
        StageClock(program.device).synchronize()
        self.prefill_seconds += time.perf_counter() - start
        self.reused = self.reused or reused
        return program
