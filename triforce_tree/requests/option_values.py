"""Types and limits of the options of a call, in one table.

Importing this module does not import torch, so that wrong values are refused at once.
"""

import math
import numbers
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

from triforce_tree.option_checks import shortened

# Fp32 holds logits divided or multiplied by numbers in this interval, and divided by temperatures up to
# _HOTTEST.
_LEAST, _MOST, _HOTTEST = 1e-30, 1e30, 1e38
# The most that a penalty subtracts from the score of a token for each time that it was generated.
_MOST_SUBTRACTED = 100.0
# The most beams or texts of one prompt.
_MOST_TEXTS = 65_536
# Options of one token id; the others may have several.
_SINGLE = frozenset({"forced_bos_token_id", "pad_token_id"})
# Options that transformers reads as lists.
_LISTS = frozenset({"suppress_tokens", "begin_suppress_tokens"})


def checked(name: str, value: Any) -> Any:
    """Returns the value of an option, in the form in which it is used: whole numbers as int, switches as
    bool, and stop strings, logits processors and stopping criteria as lists. None is returned as it is.

    Raises:
        ValueError: the value is of another type, or out of range.
    """
    check = _CHECKS.get(name)
    if value is None or check is None:
        return value
    if isinstance(check, _AtLeast):
        if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) > 0:
            raise ValueError(f"{name}={shortened(value)} must be an integer, not {type(value).__name__}")
        if not check.least <= index(value) <= check.most:
            most = "" if check.most == math.inf else f" and at most {check.most}"
            raise ValueError(
                f"{name}={shortened(value)} must be at least {check.least}{most}; {check.remedy}"
            )
        return index(value)
    if isinstance(check, _Within):
        _check_type(name, value)
        if not check.least <= value <= check.most:
            raise ValueError(f"{name}={shortened(value)} must lie in {check.interval}; {check.remedy}")
        return float(value)
    return check(name, value)


class _AtLeast(NamedTuple):
    """Describes integers from ``least`` to ``most``, those of numpy and torch included."""

    least: int
    remedy: str = "leave it out for the default"
    most: float = math.inf


class _Within(NamedTuple):
    """Describes numbers from ``least`` to ``most``. Messages print the interval as ``interval``."""

    least: float
    most: float
    interval: str
    remedy: str


def _check_type(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={shortened(value)} must be a number, not {type(value).__name__}")


def _temperature(name: str, value: Any) -> Any:
    _check_type(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={shortened(value)} must be a finite number of at least 0; 0 means greedy")
    if 0 < value < _LEAST:
        raise ValueError(f"{name}={shortened(value)} is below {_LEAST:g}; use 0, which means greedy")
    if value > _HOTTEST:
        raise ValueError(f"{name}={shortened(value)} is above {_HOTTEST:g}; from 1e6 on all draw about alike")
    return float(value)


def _token_ids(name: str, value: Any) -> Any:
    if name in _SINGLE and isinstance(value, list | tuple):
        raise ValueError(f"{name}={shortened(value)} must be a single token id; give one of them")
    if getattr(value, "ndim", 0) > 0:  # a tensor or an array, which has integers of 64 bits at most
        return value
    if name in _LISTS and not isinstance(value, list | tuple):
        raise ValueError(f"{name}={shortened(value)} must be a list of token ids; give [{shortened(value)}]")
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str):
            raise ValueError(
                f"{name}={shortened(value)} must be a token id or a list of them; "
                f"tokenizer.convert_tokens_to_ids({each!r}) tells it"
            )
        if not hasattr(each, "__index__") or not -(2**63) <= index(each) < 2**63:
            raise ValueError(
                f"{name}={shortened(value)} must be a token id or a list of them: integers of 64 bits; "
                "see tokenizer.vocab_size"
            )
    return value


def _sequence_bias(name: str, value: Any) -> Any:
    # transformers refuses entries that are not pairs.
    pairs = value if isinstance(value, list | tuple) else []
    biases = [pair[1] for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
    for bias in value.values() if isinstance(value, dict) else biases:
        # Minus infinity forbids a sequence. Two infinities of opposite signs have no sum.
        if isinstance(bias, numbers.Real) and not float(bias) <= _MOST:
            raise ValueError(
                f"{name} has the bias {shortened(bias)}, which must be a number of at most "
                f"{_MOST:g}; this much forces a token, and -inf forbids it"
            )
    return value


def _length_penalty_decay(name: str, value: Any) -> Any:
    parts = list(value) if isinstance(value, list | tuple) else []
    fit = [isinstance(n, numbers.Real) and 0 <= float(n) <= _MOST for n in parts]
    if len(parts) != 2 or not all(fit):
        raise ValueError(
            f"{name}={shortened(value)} must be two numbers of at least 0: after how many new tokens the "
            "penalty begins, and the factor by which it grows, as (100, 1.01)"
        )
    return value


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not -(2**63) <= index(value) < 2**64:
        raise ValueError(
            f"{name}={value!r} must be an integer of at most 64 bits; give one from -2**63 to 2**64 - 1"
        )
    return index(value)


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, str) or value not in (True, False):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)


def _bad_words(name: str, value: Any) -> Any:
    # transformers checks what the sequences hold.
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise ValueError(f"{name}={shortened(value)} must be a list of lists of token ids, as [[5], [7, 8]]")
    return value


def _stop_strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, str | list | tuple):
        raise ValueError(f"{name}={shortened(value)} must be a string or a list of strings")
    strings = [value] if isinstance(value, str) else list(value)
    for each in strings:
        if not isinstance(each, str) or not each:
            raise ValueError(f"{name} holds {each!r}; give strings of at least one character")
    return strings


def _callables(name: str, value: Any) -> list[Any]:
    entries = list(value) if isinstance(value, list | tuple) else [value]
    for each in entries:
        if isinstance(each, type):
            raise ValueError(f"{name} holds the class {each.__name__}; give an object, {each.__name__}(...)")
        if not callable(each):
            raise ValueError(f"{name} holds {each!r}, which cannot be called; see transformers' {name}")
    return entries


def _function(name: str, value: Any) -> Any:
    if not callable(value):
        raise ValueError(f"{name}={shortened(value)} cannot be called; give a function")
    return value


_BELOW_1, _ABOVE_0 = math.nextafter(1.0, 0.0), math.ulp(0.0)
_CHECKS: dict[str, _AtLeast | _Within | Callable[[str, Any], Any]] = {
    "max_new_tokens": _AtLeast(1),
    "max_length": _AtLeast(1),
    "min_length": _AtLeast(0),
    "min_new_tokens": _AtLeast(0),
    "no_repeat_ngram_size": _AtLeast(0),
    "top_k": _AtLeast(0, "0 keeps all tokens"),
    "temperature": _temperature,
    "top_p": _Within(0.0, 1.0, "[0, 1]", "1 keeps all tokens"),
    "min_p": _Within(0.0, 1.0, "[0, 1]", "0 keeps all tokens"),
    "typical_p": _Within(_ABOVE_0, 1.0, "(0, 1]", "1 keeps all tokens"),
    "top_h": _Within(_ABOVE_0, 1.0, "(0, 1]", "leave it out to keep all tokens"),
    "epsilon_cutoff": _Within(0.0, _BELOW_1, "[0, 1)", "0 keeps all tokens"),
    "eta_cutoff": _Within(0.0, _BELOW_1, "[0, 1)", "0 keeps all tokens"),
    "frequency_penalty": _Within(-_MOST_SUBTRACTED, _MOST_SUBTRACTED, "[-100, 100]", "0 changes nothing"),
    "presence_penalty": _Within(-_MOST_SUBTRACTED, _MOST_SUBTRACTED, "[-100, 100]", "0 changes nothing"),
    "repetition_penalty": _Within(_LEAST, _MOST, f"[{_LEAST:g}, {_MOST:g}]", "1 changes nothing"),
    "length_penalty": _Within(-50.0, 50.0, "[-50, 50]", "1 is the default"),
    "max_time": _Within(0.0, math.inf, "[0, inf]", "leave it out for no limit"),
    "eos_token_id": _token_ids,
    "bos_token_id": _token_ids,
    "suppress_tokens": _token_ids,
    "begin_suppress_tokens": _token_ids,
    "forced_eos_token_id": _token_ids,
    "forced_bos_token_id": _token_ids,
    "pad_token_id": _token_ids,
    "bad_words_ids": _bad_words,
    "sequence_bias": _sequence_bias,
    "exponential_decay_length_penalty": _length_penalty_decay,
    "num_beams": _AtLeast(1, most=_MOST_TEXTS),
    "num_return_sequences": _AtLeast(1, most=_MOST_TEXTS),
    "stop_strings": _stop_strings,
    "logits_processor": _callables,
    "stopping_criteria": _callables,
    "seed": _seed,
    "prefix_allowed_tokens_fn": _function,
    "logprobs": _switch,
    "do_sample": _switch,
    "output_scores": _switch,
    "output_logits": _switch,
    "max_batch": _AtLeast(1),
    "reserve": _AtLeast(0),
    "length": _AtLeast(1, 'speculation="off" drafts nothing'),
}
