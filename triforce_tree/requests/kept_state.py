"""Finds logits processors and stopping criteria that keep state between their calls.

Tokens of a draft tree are processed out of order, and more of them are processed than are emitted. The
sequences of a batch are processed separately. A callable that keeps state, or that reads other sequences,
must therefore be called as in transformers: once per new token, with all sequences (``in_step.py``).
"""

from collections.abc import Callable, Iterable
from types import ModuleType
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
# Classes of transformers that are tested: the former calls a function of the user, the latter reads scores.
_TESTED = ("PrefixConstrainedLogitsProcessor", "ConfidenceCriteria")
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
    for module, entries in ((logits_process, request.processors), (stopping_criteria, request.criteria)):
        for given in entries:
            if (why := _why(given, module, request, vocabulary)) is not None:
                return why
    return None


def _why(given: Any, module: ModuleType, request: Request, vocabulary: int) -> str | None:
    """Returns the reason for one processor or criterion, or None.

    Args:
        module: the module of transformers' own processors, or of its criteria.
    """
    kind = type(given)
    if isinstance(declared := getattr(given, "keeps_state", None), bool):
        return f"{_name(given)} keeps state" if declared else None
    if kind in (LogitsProcessorList, StoppingCriteriaList):
        reasons = (_why(each, module, request, vocabulary) for each in given)
        return next((why for why in reasons if why is not None), None)
    if kind.__module__ == module.__name__ and kind.__name__ not in _TESTED:
        return f"{_name(given)} keeps state" if kind.__name__ in _KEEPING else None
    name, ids, batch = _name(given), request.input_ids, len(request.input_ids)
    if kind is PrefixConstrainedLogitsProcessor:
        calls = [(b, text[b]) for text in _texts(ids, vocabulary) for b in range(batch)]
        return _why_of_calls("prefix_allowed_tokens_fn", given._prefix_allowed_tokens_fn, calls, ids.device)
    if module is logits_process:
        places = torch.arange(batch * vocabulary, device=ids.device)
        scores = (places * 0.7).sin().view(batch, vocabulary) * 4
        texts = [(text, scores) for text in _texts(ids, vocabulary)]
        return _why_of_calls(name, given, texts, ids.device, apart=batch > 1)
    if request.config.output_scores and request.config.return_dict_in_generate:
        return f"{name} may read the scores that output_scores=True asks for"
    if kind.__module__ == module.__name__:
        return None
    if batch > 1:
        return f"{name} may look at all sequences of the batch"
    return _why_of_calls(name, given, [(text, None) for text in _texts(ids, vocabulary)], ids.device)


def _name(given: Any) -> str:
    """Returns the class name of a callable object, or the name of a function."""
    plain = getattr(given, "__qualname__", None) or type(given).__name__
    return str(plain).rpartition("<locals>.")[2]


Call = tuple[Any, ...]


def _texts(ids: Tensor, vocabulary: int) -> list[Tensor]:
    """Returns texts that are longer and shorter than their predecessors; each occurs more than once."""
    ids = ids[:, -_MOST_TOKENS:]
    coming = torch.arange(3, device=ids.device) + ids[:, -1:]
    longest = torch.cat([ids, coming % vocabulary], 1)
    other = torch.cat([ids, (coming[:, :1] + 7) % vocabulary], 1)
    return [ids, longest, other, longest, longest[:, :-1], ids]


def _why_of_calls(
    name: str, given: Callable[..., Any], calls: list[Call], device: torch.device, apart: bool = False
) -> str | None:
    """Returns why a callable must be called once per token with all sequences, or None if it need not be.

    Args:
        name: name of the callable.
        given: the callable.
        calls: arguments of the test calls; equal arguments must give equal results.
        device: the device of the arguments.
        apart: whether the result for a sequence must not depend on the other sequences of the call.
    """
    package = type(given).__module__.partition(".")[0]
    if package in _GRAMMARS:
        return f"{name} of {package} keeps state"
    drawn = RandomNumbers(device)
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
            differs = apart and _differs_apart(copied, *answers[0])
            changed = copied.changed()
    except NotIsolatedError as error:
        return f"{name} may keep state, as {error}; {_DECLARE}"
    except Exception as error:
        return f"{name} may keep state, as a made-up text ended in {type(error).__name__}; {_DECLARE}"
    if drawn.drawn:
        return f"{name} draws random numbers"
    if differs:
        return f"{name} looks at other sequences of the batch"
    return f"{name} keeps state (its calls change it)" if changed else None


def _differs_apart(copied: Isolated, call: Call, answer: Any) -> bool:
    """Returns whether a processor gives a sequence other scores when it is called with this sequence
    alone.
    """
    ids, scores = call
    for b in range(len(ids)):
        alone = copied.call(ids[b : b + 1].clone(), scores[b : b + 1].clone())
        # Sums over a batch may be rounded differently.
        if not torch.allclose(alone, answer[b : b + 1], 1e-3, 1e-3, equal_nan=True):
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
