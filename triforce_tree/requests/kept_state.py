"""Finds logits processors and stopping criteria that keep state between their calls.

Tokens of a draft tree are processed out of order, and more of them are processed than are emitted. The
sequences of a batch are processed separately. A callable that keeps state, or that reads other sequences,
must therefore be called as in transformers: once per new token, with all sequences (``in_step.py``).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from triforce_tree.requests.isolation import Isolated, NotIsolatedError, RandomNumbers
from triforce_tree.requests.request import Request

# Classes of transformers that keep state; all others there do not.
_KEEPING = frozenset(
    {
        "SynthIDTextWatermarkLogitsProcessor",
        "WhisperNoSpeechDetection",
        "DiaEOSDelayPatternLogitsProcessor",
    }
)
# Packages whose processors follow a grammar from token to token.
_GRAMMARS = frozenset(
    {
        "xgrammar",
        "outlines",
        "outlines_core",
        "lmformatenforcer",
        "guidance",
        "llguidance",
        "genlm",
        "syncode",
    }
)
_DECLARE = "give it the attribute keeps_state = False if it keeps none"
# Tokens of the prompt that made-up calls have at most.
_MOST_TOKENS = 256


def why_in_step(request: Request, vocabulary: int) -> str | None:
    """Returns why the processors and criteria of a request must be called once per token with all sequences,
    or None if this is not necessary.

    Only copies are called. Which classes of transformers keep state is known; a class derived from one of
    them is tested. If an object has a bool attribute ``keeps_state``, the attribute decides.

    Args:
        vocabulary: V of the scores.
    """
    trial = _Trial(request.input_ids, vocabulary)
    for processor in request.processors:
        if (why := _of_processor(processor, trial)) is not None:
            return why
    config = request.config
    for criterion in request.criteria:
        # The criteria get the scores of all new tokens if the output has them.
        passed = bool(config.output_scores and config.return_dict_in_generate)
        if (why := _of_criterion(criterion, trial, passed)) is not None:
            return why
    return None


def _of_processor(processor: Any, trial: "_Trial") -> str | None:
    name = _name(processor)
    if isinstance(declared := getattr(processor, "keeps_state", None), bool):
        return f"{name} keeps state" if declared else None
    if type(processor) is LogitsProcessorList:
        return next((why for each in processor if (why := _of_processor(each, trial)) is not None), None)
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return trial.why("prefix_allowed_tokens_fn", allowed, trial.of_prefixes())
    if type(processor).__module__ == logits_process.__name__:
        return f"{name} keeps state" if type(processor).__name__ in _KEEPING else None
    return trial.why(name, processor, trial.of_scores(), by_sequence=True)


def _of_criterion(criterion: Any, trial: "_Trial", scores_asked: bool) -> str | None:
    name = _name(criterion)
    if isinstance(declared := getattr(criterion, "keeps_state", None), bool):
        return f"{name} keeps state" if declared else None
    if type(criterion) is StoppingCriteriaList:
        found = (_of_criterion(each, trial, scores_asked) for each in criterion)
        return next((why for why in found if why is not None), None)
    known = type(criterion).__module__ == stopping_criteria.__name__
    if scores_asked and not (known and type(criterion).__name__ != "ConfidenceCriteria"):
        return f"{name} may read the scores that output_scores=True asks for"
    if known:
        return None
    if trial.batch > 1:
        return f"{name} may look at all sequences of the batch"
    return trial.why(name, criterion, trial.of_criteria())


def _name(given: Any) -> str:
    """Returns the class name of a callable object, or the name of a function."""
    plain = getattr(given, "__qualname__", None) or type(given).__name__
    return str(plain).rpartition("<locals>.")[2]


Call = tuple[Any, ...]


class _Trial:
    """Generated test calls of processors and criteria for one generation.

    Args:
        input_ids: int64 ``[B, W]``, the prompts.
        vocabulary: V of the scores.
    """

    def __init__(self, input_ids: Tensor, vocabulary: int) -> None:
        self._ids, self._vocabulary = input_ids, vocabulary
        self.batch = len(input_ids)

    def _texts(self) -> list[Tensor]:
        """Returns texts that are longer and shorter than their predecessors; each occurs more than once."""
        ids = self._ids[:, -_MOST_TOKENS:]
        coming = torch.arange(3, device=ids.device) + ids[:, -1:]
        longest = torch.cat([ids, coming % self._vocabulary], 1)
        other = torch.cat([ids, (coming[:, :1] + 7) % self._vocabulary], 1)
        return [ids, longest, other, longest, longest[:, :-1], ids]

    def _scores(self) -> Tensor:
        places = torch.arange(self.batch * self._vocabulary, device=self._ids.device)
        return (places * 0.7).sin().view(self.batch, self._vocabulary) * 4

    def of_scores(self) -> list[Call]:
        """Returns test calls of a logits processor."""
        return [(ids, self._scores()) for ids in self._texts()]

    def of_criteria(self) -> list[Call]:
        """Returns test calls of a stopping criterion that gets no scores."""
        return [(ids, None) for ids in self._texts()]

    def of_prefixes(self) -> list[Call]:
        """Returns test calls of a function that is used as ``prefix_allowed_tokens_fn``."""
        return [(row, ids[row]) for ids in self._texts() for row in range(self.batch)]

    def why(
        self, name: str, given: Callable[..., Any], calls: list[Call], by_sequence: bool = False
    ) -> str | None:
        """Returns why a callable must be called once per token with all sequences, or None if it need not be.

        Args:
            name: name of the callable.
            given: the callable.
            calls: arguments of the test calls; equal arguments must give equal results.
            by_sequence: whether the result for a sequence must not depend on the other sequences.
        """
        package = type(given).__module__.partition(".")[0]
        if package in _GRAMMARS:
            return f"{name} of {package} keeps state"
        drawn = RandomNumbers(self._ids.device)
        try:
            with drawn:
                copied = Isolated(given)
                answers: list[tuple[Call, Any]] = []
                for call in calls:
                    answer = copied.call(*_cloned(call))
                    for before, known in answers:
                        if _equal(call, before) and not _equal(answer, known):
                            return f"{name} keeps state (two calls with the same text have different results)"
                    answers.append((call, answer))
                apart = by_sequence and self.batch > 1 and self._differs_apart(copied, *answers[0])
                changed = copied.changed()
        except NotIsolatedError as error:
            return f"{name} may keep state, as {error}; {_DECLARE}"
        except Exception as error:
            return f"{name} may keep state, as a made-up text ended in {type(error).__name__}; {_DECLARE}"
        if drawn.drawn:
            return f"{name} draws random numbers"
        if apart:
            return f"{name} looks at other sequences of the batch"
        return f"{name} keeps state (its calls change it)" if changed else None

    def _differs_apart(self, copied: Isolated, call: Call, answer: Any) -> bool:
        ids, scores = call
        for row in range(self.batch):
            alone = copied.call(ids[row : row + 1].clone(), scores[row : row + 1].clone())
            # Sums of several rows may be rounded otherwise.
            if not torch.allclose(alone, answer[row : row + 1], 1e-3, 1e-3, equal_nan=True):
                return True
        return False


def _cloned(call: Iterable[Any]) -> list[Any]:
    """Returns copies of the arguments, because a call may overwrite its tensors."""
    return [each.clone() if isinstance(each, Tensor) else each for each in call]


def _equal(first: Any, second: Any) -> bool:
    """Returns whether two arguments or results are equal; NaN equals NaN."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return type(first) is type(second) and bool(first == second)
