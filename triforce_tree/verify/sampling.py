"""Logits to probabilities, and seeds.

Probabilities over the vocabulary are fp32, after the user's logits processors (temperature, top-k, top-p,
penalties).
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor
from transformers import (
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process as hf

from triforce_tree.verify.top_k import SlicedTopK
from triforce_tree.verify.top_p import PartlySortedTopP

# Processors whose result does not depend on the preceding tokens: one call serves all nodes of a tree. Only
# these classes themselves: one derived from them may do anything.
_CONTEXT_FREE = {
    SlicedTopK,
    PartlySortedTopP,
    *(
        getattr(hf, name)
        for name in (
            "TemperatureLogitsWarper",
            "TopKLogitsWarper",
            "TopPLogitsWarper",
            "MinPLogitsWarper",
            "TypicalLogitsWarper",
            "EpsilonLogitsWarper",
            "EtaLogitsWarper",
            "LogitNormalization",
            "SuppressTokensLogitsProcessor",
            "InfNanRemoveLogitsProcessor",
        )
        if hasattr(hf, name)
    ),
}

# Modules whose processors make no NaN.
_KNOWN = ("transformers.", "triforce_tree.")
NAN_LOGITS = (
    "the model returned NaN logits; its weights or its dtype are at fault: try dtype=torch.float32 or check "
    "the checkpoint"
)
Paths = Callable[[], Sequence[Sequence[int] | Tensor | None]]


class ProbsFromLogits:
    """Logits to the distribution of the next token: transformers' logits processors, then softmax in fp32.

    Args:
        processors: applied in order, each with the tokens of the node's own path.
        greedy: take the most probable token; probabilities then only rank tokens.
        padding: tokens that processors see before each path: in a padded batch they count from the padding.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | None = None,
        greedy: bool = False,
        padding: Sequence[int] = (),
    ) -> None:
        processors = LogitsProcessorList(map(_in_less_time, processors or ()))
        self.greedy = greedy
        self._padding = list(padding)
        self._free = LogitsProcessorList(p for p in processors if type(p) in _CONTEXT_FREE)
        self._bound = [p for p in processors if type(p) not in _CONTEXT_FREE]
        self._ordered = list(processors)
        self._removes_nan = any(type(p) is InfNanRemoveLogitsProcessor for p in processors)

    @classmethod
    def at(cls, temperature: float) -> "ProbsFromLogits":
        """The distribution at a temperature, without other processors; 0 is greedy."""
        if temperature == 0:
            return cls(greedy=True)
        return cls(LogitsProcessorList([TemperatureLogitsWarper(temperature)]))

    @property
    def context_free(self) -> bool:
        """Whether a node's distribution depends on its own logits alone, and not on the preceding tokens."""
        return not self._bound

    @property
    def reading_text(self) -> list[LogitsProcessor]:
        """The processors that depend on the preceding tokens."""
        return self._bound

    @property
    def processors(self) -> list[LogitsProcessor]:
        """In the order in which they are applied."""
        return self._ordered

    @property
    def nan_error(self) -> str:
        """What to say of NaN in processed logits."""
        own = [type(p).__name__ for p in self._ordered if not type(p).__module__.startswith(_KNOWN)]
        if not own:
            return NAN_LOGITS
        return (
            f"the model's logits, or what {', '.join(own)} made of them, are NaN; leave the processor out to "
            "see which"
        )

    def scores(self, logits: Tensor, paths: Paths) -> Tensor:
        """Processed logits, fp32 ``[N, V]``.

        Args:
            logits: ``[N, V]``, one row per node, parents before children.
            paths: returns the N token sequences that end at the nodes; called only if a processor (a penalty,
                say) depends on them. A node without a sequence keeps its logits; so does a node below a token
                that a processor forbids: it cannot be accepted, and a processor for a grammar may fail on
                such a sequence.

        Raises:
            ValueError: logits hold NaN, and no processor removes it.
        """
        scores = logits.float()
        if not self._removes_nan and torch.isnan(scores).any():
            raise ValueError(NAN_LOGITS)
        if not self._bound:
            return self.context_free_scores(scores)
        rows = []
        padding = torch.tensor(self._padding, dtype=torch.int64, device=scores.device)
        sequences = paths()
        common = min((len(path) for path in sequences if path is not None), default=0)
        # By the tokens after the root: processed scores, or None below a token that a processor forbids.
        known: dict[tuple[int, ...], Tensor | None] = {}
        for path, row in zip(sequences, scores, strict=True):
            row = row[None].clone()
            if path is not None:
                tokens = torch.as_tensor(path, device=scores.device)
                below = tuple(tokens[common:].tolist())
                if below and below[:-1] in known:
                    above = known[below[:-1]]
                    forbidden = above is None or bool(above[0, below[-1]] == -torch.inf)
                else:
                    forbidden = False
                if not forbidden:
                    ids = torch.cat([padding, tokens])[None]
                    for processor in self._ordered:
                        row = processor(ids, row)
                known[below] = None if forbidden else row
            rows.append(row)
        return torch.cat(rows)

    def context_free_scores(self, logits: Tensor) -> Tensor:
        """:meth:`scores` where ``context_free``, for fp32 logits, without a look at NaN: nothing waits for
        the device."""
        return self._free(None, logits) if self._free else logits  # type: ignore[arg-type]

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        """Probabilities, fp32 ``[N, V]``."""
        return self.scores(logits, paths).softmax(-1)


def _in_less_time(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor, or one with the same results that takes less time."""
    if type(processor) is TopPLogitsWarper:
        return PartlySortedTopP(processor)
    return SlicedTopK(processor) if type(processor) is TopKLogitsWarper else processor


class Stream(IntEnum):
    """The purpose of a derived seed."""

    LEVEL = 0
    ROW = 1
    ATTEMPT = 2
    POSITION = 3


def derived(seed: int, stream: Stream, number: int) -> int:
    """A seed of 63 bits for one of several generators, independent of the seeds for any other arguments.

    It is a hash (numpy's ``SeedSequence``); sums such as ``seed + number`` would give seed 1, number 2 and
    seed 2, number 1 the same draws.

    Args:
        seed: of 64 bits, signed or not.
        stream, number: which of the generators derived from ``seed``.
    """
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(stream, number))
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)
