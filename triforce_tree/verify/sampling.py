"""Computes fp32 probabilities from logits with the user's logits processors, and derives seeds."""

from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from functools import cached_property

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

# Processors whose result does not depend on the preceding tokens, so that one call serves all nodes of a
# tree. The type must be exact, since a derived class may read the tokens.
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

# Processors of these packages are known to produce no NaN.
_KNOWN = ("transformers.", "triforce_tree.")
NAN_LOGITS = (
    "the model returned NaN logits; its weights or its dtype are at fault: try dtype=torch.float32 or check "
    "the checkpoint"
)
Paths = Callable[[], Sequence[Sequence[int] | Tensor | None]]


class ProbsFromLogits:
    """Computes next-token distributions: transformers' logits processors, then softmax in fp32.

    Args:
        processors: applied in order, each with all tokens up to the node.
        greedy: whether the most probable token is taken; probabilities then only rank tokens.
        padding: tokens on the left of each sequence that processors see, as in a padded batch of
            transformers.

    Attributes:
        processors: all processors in the order in which they are applied.
        reading_text: the processors that depend on the preceding tokens.
        context_free: whether a node's distribution depends on its logits alone, and not on the preceding
            tokens.
        temperature: the temperature of the first processor; 1 if that is no temperature, or if ``greedy``.
        others: the processors without that temperature.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | None = None,
        greedy: bool = False,
        padding: Sequence[int] = (),
    ) -> None:
        self.greedy = greedy
        self._padding = list(padding)
        self.processors: list[LogitsProcessor] = list(map(_in_less_time, processors or ()))
        self._free = LogitsProcessorList(p for p in self.processors if type(p) in _CONTEXT_FREE)
        self.reading_text = [p for p in self.processors if type(p) not in _CONTEXT_FREE]
        self.context_free = not self.reading_text
        self._removes_nan = any(type(p) is InfNanRemoveLogitsProcessor for p in self.processors)
        self.temperature, self.others = 1.0, self.processors
        # A derived class may use its temperature in another way, so the type must be exact.
        if self.processors and type(first := self.processors[0]) is TemperatureLogitsWarper:
            self.temperature = 1.0 if greedy else float(first.temperature)
            self.others = self.processors[1:]

    @classmethod
    def at(cls, temperature: float) -> "ProbsFromLogits":
        """Makes one with a temperature and no other processors; 0 means greedy."""
        if temperature == 0:
            return cls(greedy=True)
        return cls(LogitsProcessorList([TemperatureLogitsWarper(temperature)]))

    @cached_property
    def key(self) -> Hashable:
        """A key of the settings. Settings with equal keys differ only in temperature and can share CUDA
        graphs.
        """
        if not self.context_free:
            # Processors that read the tokens may hold state that cannot be compared. They run outside of
            # graphs, so all of them can have the same key.
            return self.greedy, "text"
        settings = [sorted((name, _hashable(value)) for name, value in vars(p).items()) for p in self.others]
        kinds = (type(p) for p in self.others)
        return self.greedy, tuple((kind, *values) for kind, values in zip(kinds, settings, strict=True))

    @property
    def kind(self) -> str:
        """The names of the logits processors. Measured stage times are stored under this name."""
        names = [type(processor).__name__ for processor in self.others]
        return " ".join(["greedy" if self.greedy else "sampled", *names])

    @property
    def nan_error(self) -> str:
        """The error message for NaN in processed logits."""
        custom = [type(p).__name__ for p in self.processors if not type(p).__module__.startswith(_KNOWN)]
        if not custom:
            return NAN_LOGITS
        return (
            f"logits are NaN, from the model or from a logits processor ({', '.join(custom)}); leave the "
            "processor out to see which"
        )

    def scores(self, logits: Tensor, paths: Paths) -> Tensor:
        """Returns processed logits, fp32 ``[N, V]``.

        Args:
            logits: ``[N, V]``, one row per node, parents before children.
            paths: returns the N token sequences that end at the nodes; called only if a processor, such as a
                repetition penalty, depends on the tokens. Logits of a node without a sequence are left
                unprocessed. So are those of descendants of a token that a processor forbids: such nodes
                cannot be accepted, and a processor for a grammar may fail on them.

        Raises:
            ValueError: the logits contain NaN, and no processor removes it.
        """
        scores = logits.float()
        if not self._removes_nan and torch.isnan(scores).any():
            raise ValueError(NAN_LOGITS)
        if self.context_free:
            return self.context_free_scores(scores)
        rows = []
        padding = torch.tensor(self._padding, dtype=torch.int64, device=scores.device)
        sequences = paths()
        common = min((len(path) for path in sequences if path is not None), default=0)
        # Maps the tokens after the common prefix to processed scores, or to None if one of them is forbidden.
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
                    for processor in self.processors:
                        row = processor(ids, row)
                known[below] = None if forbidden else row
            rows.append(row)
        return torch.cat(rows)

    def context_free_scores(self, logits: Tensor) -> Tensor:
        """Does the same as :meth:`scores` for fp32 logits if ``context_free``, without a check for NaN.

        It never waits for the device.
        """
        return self._free(None, logits) if self._free else logits  # type: ignore[arg-type]

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        """Returns probabilities, fp32 ``[N, V]``."""
        return self.scores(logits, paths).softmax(-1)


def _hashable(value: object) -> Hashable:
    return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else repr(value)


def _in_less_time(processor: LogitsProcessor) -> LogitsProcessor:
    """Returns a faster processor with the same results if there is one, otherwise the processor itself."""
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
    """Returns a seed of 63 bits, a hash of the arguments (numpy's ``SeedSequence``).

    A sum such as ``seed + number`` would not do: seed 1 with number 2 and seed 2 with number 1 would have the
    same draws.

    Args:
        seed: an integer of 64 bits, signed or unsigned.
        stream: the purpose of the derived seed.
        number: index of the derived seed among those of the same purpose.
    """
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(stream, number))
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)
