"""Finds logits processors and stopping criteria that may keep state between their calls.

Tokens of a draft tree are processed out of order, and more of them are processed than are emitted. The
sequences of a batch are processed separately. A callable that keeps state, or that reads other sequences,
must therefore be called as in transformers: once per new token, with all sequences (``in_step.py``). Whether
somebody's code keeps state cannot be seen from outside, so that it has to say so.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from triforce_tree.requests.request import Request

# Processors of transformers that keep state; all others there do not.
_KEEPING = (
    "SynthIDTextWatermarkLogitsProcessor", "WhisperNoSpeechDetection", "DiaEOSDelayPatternLogitsProcessor",
)  # fmt: skip
# The criterion of transformers that reads scores.
_OF_SCORES = "ConfidenceCriteria"


def why_in_step(request: Request) -> str | None:
    """Returns why the processors and criteria of a request must be called once per token with all sequences,
    or None if this is not necessary.

    If an object has a bool attribute ``keeps_state``, the attribute decides. Which classes of transformers
    keep state is known. All other processors may keep state. Other criteria are asked about each token of a
    single sequence in any case, but without scores.
    """
    reasons = (why for part in request.parts or [request] for why in _reasons(part))
    return next((why for why in reasons if why is not None), None)


def _reasons(request: Request) -> Iterator[str | None]:
    for given in _each(request.processors):
        if type(given) is PrefixConstrainedLogitsProcessor:
            own, name = given._prefix_allowed_tokens_fn, "prefix_allowed_tokens_fn"
        else:
            own, name = given, _name(given)
        yield _declared(own, name, _of_processor(own, name))
    for given in _each(request.criteria):
        name = _name(given)
        yield _declared(given, name, _of_criterion(given, name, request))


def _each(given: Iterable[Any]) -> Iterator[Any]:
    for each in given:
        if type(each) in (LogitsProcessorList, StoppingCriteriaList):
            yield from _each(each)
        else:
            yield each


def _declared(given: Any, name: str, otherwise: str | None) -> str | None:
    """Returns the reason by the attribute ``keeps_state``, or ``otherwise`` without it."""
    declared = getattr(given, "keeps_state", None)
    if not isinstance(declared, bool):
        return otherwise
    return f"{name} keeps state" if declared else None


def _of_processor(given: Any, name: str) -> str | None:
    kind = type(given)
    if kind.__module__ == logits_process.__name__:
        return f"{name} keeps state" if kind.__name__ in _KEEPING else None
    return f"{name} may keep state; give it the attribute keeps_state = False if it keeps none"


def _of_criterion(given: Any, name: str, request: Request) -> str | None:
    kind = type(given)
    known = kind.__module__ == stopping_criteria.__name__
    if known and kind.__name__ != _OF_SCORES:
        return None
    if request.config.output_scores and request.config.return_dict_in_generate:
        return f"{name} may read the scores that output_scores=True asks for"
    if len(request.input_ids) > 1 and not known:
        return f"{name} may look at all sequences of the batch"
    return None


def _name(given: Any) -> str:
    """Returns the class name of a callable object, or the name of a function."""
    plain = getattr(given, "__qualname__", None) or type(given).__name__
    return str(plain).rpartition("<locals>.")[2]
