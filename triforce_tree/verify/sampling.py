"""Computes fp32 probabilities from logits with the user's logits processors, and derives seeds."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
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
)
from transformers.generation import logits_process as hf

from triforce_tree.kernels.probs.truncation import truncate_scores
from triforce_tree.verify.checked_processors import CheckedProcessors
from triforce_tree.verify.sampling_options import SamplingKind, SamplingOptions, rounded, split, words_of

# Processors whose result does not depend on the preceding tokens, so that one call serves all nodes of a
# tree. The type must be exact, since a derived class may read the tokens.
_CONTEXT_FREE = {
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
}
_TRUNCATING = {"TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p"}

# Processors that may leave no token.
_FORBIDDING = frozenset(
    {
        hf.SequenceBiasLogitsProcessor,
        hf.NoBadWordsLogitsProcessor,
        hf.NoRepeatNGramLogitsProcessor,
        hf.MinLengthLogitsProcessor,
        hf.MinNewTokensLengthLogitsProcessor,
        hf.PrefixConstrainedLogitsProcessor,
        hf.SuppressTokensLogitsProcessor,
        hf.SuppressTokensAtBeginLogitsProcessor,
    }
)
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
        number: index of the sequence in the batch that the processors were prepared for.

    Attributes:
        processors: all processors in the order in which they are applied.
        reading_text: the processors that depend on the preceding tokens.
        context_free: whether a node's distribution depends on its logits alone, and not on the preceding
            tokens.
        removes_nan: whether a processor removes NaN from logits.
        options: what stages read from buffers of the batch, see ``sampling_options``.
        others: the processors that are applied after the options.
        in_stages: whether stages carry out all processors for any number of sequences, and can be captured.
            Otherwise one of ``others`` reads the preceding tokens, so that all processors are called on the
            host for one sequence.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | None = None,
        greedy: bool = False,
        padding: Sequence[int] = (),
        number: int = 0,
    ) -> None:
        self.greedy = greedy
        self._padding = list(padding)
        self.processors = [_of_sequence(processor, number) for processor in processors or ()]
        self.reading_text = [p for p in self.processors if type(p) not in _CONTEXT_FREE]
        self.context_free = not self.reading_text
        self.removes_nan = any(type(p) is InfNanRemoveLogitsProcessor for p in self.processors)
        self.options, self.others = split(self.processors, self._padding)
        self.in_stages = all(type(p) in _CONTEXT_FREE for p in self.others)
        if greedy:
            self.options = replace(self.options, temperature=1.0)
        self._applied = _in_less_time(self.processors)

    @classmethod
    def at(cls, temperature: float) -> "ProbsFromLogits":
        """Makes one with a temperature and no other processors; 0 means greedy."""
        if temperature == 0:
            return cls(greedy=True)
        return cls(LogitsProcessorList([TemperatureLogitsWarper(temperature)]))

    @cached_property
    def others_key(self) -> Hashable:
        """A key of ``others``. Sequences can be decoded as one batch if theirs are equal."""
        if not self.in_stages:
            # Processors that read the tokens may hold state that cannot be compared. They run outside of
            # graphs, so all of them can have the same key.
            return "text"
        settings = [sorted((name, _hashable(value)) for name, value in vars(p).items()) for p in self.others]
        kinds = (type(p) for p in self.others)
        return tuple((kind, *values) for kind, values in zip(kinds, settings, strict=True))

    @property
    def on_host(self) -> list[LogitsProcessor]:
        """Returns the processors that are called on the host, with the tokens up to each node."""
        return [] if self.in_stages else self.reading_text

    @property
    def kind(self) -> str:
        """The names of the logits processors. Measured stage times are stored under this name."""
        first = next(iter(self.processors), None)
        others = self.processors[1:] if type(first) is TemperatureLogitsWarper else self.processors
        names = [type(processor).__name__ for processor in others]
        return " ".join(["greedy" if self.greedy else "sampled", *names])

    def nan_error(self, masked: bool) -> str:
        """Returns the error message for NaN in distributions.

        Args:
            masked: whether a grammar forbids tokens.
        """
        custom = [type(p).__name__ for p in self.processors if not type(p).__module__.startswith(_KNOWN)]
        if custom:
            return (
                f"logits are NaN, from the model or from a logits processor ({', '.join(custom)}); leave the "
                "processor out to see which"
            )
        forbidding = [type(p).__name__ for p in self.processors if type(p) in _FORBIDDING]
        forbidding += ["grammar"] if masked else []
        if not forbidding:
            return NAN_LOGITS
        return (
            f"no token has a probability: all are forbidden ({', '.join(forbidding)}), or the model returned "
            "NaN logits; leave these options out to see which"
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
        if not self.removes_nan and torch.isnan(scores).any():
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
                    row = self._applied(ids, row)  # type: ignore[arg-type]
                known[below] = None if forbidden else row
            rows.append(row)
        return torch.cat(rows)

    def context_free_scores(self, logits: Tensor) -> Tensor:
        """Does the same as :meth:`scores` for fp32 logits if ``context_free``, without a check for NaN.

        It never waits for the device.
        """
        return self._applied(None, logits) if self._applied else logits  # type: ignore[arg-type]

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        """Returns probabilities, fp32 ``[N, V]``."""
        return self.scores(logits, paths).softmax(-1)


def _hashable(value: object) -> Hashable:
    return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else repr(value)


def kind_of(settings: Sequence[ProbsFromLogits]) -> SamplingKind:
    """Returns the kind of the stages for a batch with these settings, whose ``others`` are alike."""
    first, options = settings[0], [each.options for each in settings]
    if not first.in_stages:
        return SamplingKind(first.greedy, others="text")
    greedy, words = [each.greedy for each in settings], [words_of(each) for each in options]
    return SamplingKind(
        all(greedy),
        any(greedy) and not all(greedy),
        any(each.truncates for each in options),
        any(len(words) == 1 for each in options for words, _ in each.biases)
        or any(each.least_tokens > 0 for each in options),
        any(each.penalizes for each in options),
        (rounded(max(map(len, words))), rounded(max((len(w) for own in words for w, _ in own), default=0))),
        first.others_key,
    )


def _of_sequence(processor: LogitsProcessor, number: int) -> LogitsProcessor:
    """Returns a processor for one sequence of the batch that it was prepared for."""
    if type(processor) is not hf.RepetitionPenaltyLogitsProcessor:
        return processor
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        processor = copy(processor)
        processor.prompt_ignore_length = ignored[number : number + 1]
    return processor


def _in_less_time(processors: Sequence[LogitsProcessor]) -> LogitsProcessorList:
    """Returns processors with the same results, where ``truncate_scores`` takes the place of slower ones."""
    faster = CheckedProcessors()
    for processor in processors:
        name = _TRUNCATING.get(type(processor).__name__, "")
        options, left = split([processor]) if name else (SamplingOptions(), [])
        if not name or left:
            faster.append(processor)
        elif faster and isinstance(last := faster[-1], _Truncation) and last.precedes(name):
            last.options = replace(last.options, **{name: getattr(options, name)})
        else:
            faster.append(_Truncation(options))
    return faster


class _Truncation(LogitsProcessor):
    """Does what transformers' processors for top-k, top-p and min-p do, in one call."""

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options

    def precedes(self, name: str) -> bool:
        """Returns whether an option that applies after those of this processor can be added to it."""
        later = list(_TRUNCATING.values())[list(_TRUNCATING.values()).index(name) :]
        neutral = SamplingOptions()
        return all(getattr(self.options, each) == getattr(neutral, each) for each in later)

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        def one(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=scores.device)

        options = self.options
        return truncate_scores(
            scores[None], one(options.top_k, torch.int64), one(options.top_p, torch.float64),
            one(options.min_p, torch.float64),
        )[0]  # fmt: skip


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
