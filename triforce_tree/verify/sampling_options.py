"""The sampling options of one sequence as numbers, which stages read from buffers of a whole batch.

Stages are made, and on a GPU captured, for a :class:`SamplingKind`: which of these options the sequences
have. Their values may differ from sequence to sequence.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

# Larger numbers of tokens are like this one, which fits into a buffer.
_LARGEST = 2**62


class GeneratedTokenPenalties(LogitsProcessor):
    """Subtracts from the score of each token that was generated before: ``presence``, and ``frequency`` times
    the number of its occurrences. This is OpenAI's definition; tokens of the prompt do not count.

    Args:
        prompt_tokens: tokens of the prompt, padding included.
    """

    keeps_state = False

    def __init__(self, prompt_tokens: int, frequency: float, presence: float) -> None:
        self.prompt_tokens, self.frequency, self.presence = prompt_tokens, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores ``[N, V]``, where N sequences end with ``input_ids``, int64 ``[N, L]``."""
        new = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class SamplingOptions:
    """The options of one sequence in the order in which they apply. The defaults change nothing.

    Attributes:
        biases: added to the score of the last token of each of these sequences of tokens, where the others
            precede it; the bias -inf forbids it.
        repetition: divides positive scores of tokens that occur in the text, and multiplies negative ones.
        frequency, presence: see :class:`GeneratedTokenPenalties`.
        new_from: index of the first token that counts as generated.
        repeated_from, padding: index of the first token that counts for ``repetition``, and the pad tokens
            before the text that do.
        least_tokens: the end tokens ``stops`` are forbidden until the text has this many tokens.
        temperature, top_k, top_p, min_p: as in transformers; ``top_k`` 0 keeps all tokens.
    """

    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    new_from: int = 0
    repeated_from: int = 0
    padding: frozenset[int] = frozenset()
    least_tokens: int = 0
    stops: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def penalizes(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)

    @property
    def truncates(self) -> bool:
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


def split(
    processors: Sequence[LogitsProcessor], padding: Sequence[int] = ()
) -> tuple[SamplingOptions, list[LogitsProcessor]]:
    """Returns the options that the first processors carry out, and the other processors.

    The processors must stand in the order in which transformers prepares them, as options apply in one order.

    Args:
        padding: pad tokens before the text. Processors count them as part of it.
    """
    options, place = SamplingOptions(), -1
    for count, processor in enumerate(processors):
        # A derived class may do something else, so the type must be exact.
        known, given = _PLACES.get(type(processor), -1), _Given(processor, padding)
        added = _READERS[type(processor)](options, given) if known > place else None
        if added is None:
            return options, list(processors[count:])
        options, place = added, known
    return options, []


class _Given(NamedTuple):
    """A processor, and the other arguments of :func:`split`."""

    processor: Any
    padding: Sequence[int]


_Reader = Callable[[SamplingOptions, _Given], SamplingOptions | None]


def _biases(options: SamplingOptions, given: _Given) -> SamplingOptions | None:
    given_biases = given.processor.sequence_bias.items()
    biases = tuple((tuple(words), float(bias)) for words, bias in given_biases)
    if any(not set(given.padding).isdisjoint(words[:-1]) for words, _ in biases):
        return None  # padding may be a part of them
    return replace(options, biases=options.biases + biases)


def _repetition(options: SamplingOptions, given: _Given) -> SamplingOptions | None:
    ignored = given.processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        ignored = int(ignored)
    ignored = ignored or 0
    start = max(0, ignored - len(given.padding))
    padding = frozenset(given.padding[ignored:])
    penalty = given.processor.penalty
    return replace(options, repetition=penalty, new_from=start, repeated_from=start, padding=padding)


def _least(options: SamplingOptions, least: int, processor: Any) -> SamplingOptions | None:
    stops = tuple(processor.eos_token_id.flatten().tolist())
    if options.stops not in ((), stops):
        return None
    least = min(max(options.least_tokens, least), _LARGEST)
    return replace(options, least_tokens=least, stops=stops)


def _least_length(options: SamplingOptions, given: _Given) -> SamplingOptions | None:
    return _least(options, given.processor.min_length - len(given.padding), given.processor)


def _least_new(options: SamplingOptions, given: _Given) -> SamplingOptions | None:
    prompt = given.processor.prompt_length_to_skip - len(given.padding)
    return _least(options, prompt + given.processor.min_new_tokens, given.processor)


def _suppressed(options: SamplingOptions, given: _Given) -> SamplingOptions:
    tokens = given.processor.suppress_tokens.flatten().tolist()
    forbidden = tuple(((token,), -torch.inf) for token in tokens)
    return replace(options, biases=options.biases + forbidden)


def _penalties(options: SamplingOptions, given: _Given) -> SamplingOptions | None:
    processor, start = given.processor, given.processor.prompt_tokens - len(given.padding)
    if start < options.repeated_from:
        return None
    return replace(options, frequency=processor.frequency, presence=processor.presence, new_from=start)


def _temperature(options: SamplingOptions, given: _Given) -> SamplingOptions:
    return replace(options, temperature=float(given.processor.temperature))


def _truncation(name: str) -> _Reader:
    def read(options: SamplingOptions, given: _Given) -> SamplingOptions | None:
        processor = given.processor
        if processor.filter_value != -torch.inf or processor.min_tokens_to_keep != 1:
            return None
        found: SamplingOptions = replace(options, **{name: min(getattr(processor, name), _LARGEST)})
        return found

    return read


# The order is that in which transformers applies them.
_READERS: dict[type, _Reader] = {
    hf.SequenceBiasLogitsProcessor: _biases,
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    hf.NoBadWordsLogitsProcessor: _biases,
    hf.MinLengthLogitsProcessor: _least_length,
    hf.MinNewTokensLengthLogitsProcessor: _least_new,
    hf.SuppressTokensLogitsProcessor: _suppressed,
    GeneratedTokenPenalties: _penalties,
    hf.TemperatureLogitsWarper: _temperature,
    hf.TopKLogitsWarper: _truncation("top_k"),
    hf.TopPLogitsWarper: _truncation("top_p"),
    hf.MinPLogitsWarper: _truncation("min_p"),
}
_PLACES = {kind: place for place, kind in enumerate(_READERS)}


@dataclass(frozen=True)
class SamplingKind:
    """Which options the sequences of a batch have. Stages of one kind serve all values of these options.

    Attributes:
        greedy: whether every sequence takes the most probable token.
        mixed: whether some do, and others draw.
        truncates: whether some have top-k, top-p or min-p.
        biased, penalized: whether some have a bias of tokens or a least number of tokens; penalties.
        words: 0 for none, or the most sequences of several tokens that have a bias, and the most tokens of
            one; rounded up.
        others: a key of the processors that are not read as options.
    """

    greedy: bool
    mixed: bool = False
    truncates: bool = False
    biased: bool = False
    penalized: bool = False
    words: tuple[int, int] = (0, 0)
    others: Hashable = ()

    @property
    def adjusts(self) -> bool:
        """Returns whether scores are changed before the temperature applies."""
        return self.biased or self.penalized or self.words != (0, 0)

    def covers(self, other: "SamplingKind") -> bool:
        """Returns whether stages of this kind serve a batch of another kind as well."""
        return self == other or (
            not self.greedy
            and self.others == other.others
            and self.mixed >= (other.greedy or other.mixed)
            and self.truncates >= other.truncates
            and self.biased >= other.biased
            and self.penalized >= other.penalized
            and all(own >= theirs for own, theirs in zip(self.words, other.words, strict=True))
        )


def words_of(options: SamplingOptions) -> list[tuple[tuple[int, ...], float]]:
    """Returns the biased sequences of several tokens."""
    return [(words, bias) for words, bias in options.biases if len(words) > 1]


def rounded(count: int) -> int:
    """Returns the next power of 2, or 0 for 0: the size of a buffer that serves many counts."""
    return 1 << (count - 1).bit_length() if count else 0
