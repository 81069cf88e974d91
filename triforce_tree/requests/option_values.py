"""Types and limits of generation options. Nothing here imports torch, so bad values are refused at once."""

import math
import numbers
from operator import index
from typing import Any, NamedTuple

from triforce_tree.option_checks import shortened

# Options whose values are whole numbers, and the least of each.
_WHOLE = {
    "max_new_tokens": 1, "max_length": 1, "min_length": 0, "min_new_tokens": 0, "top_k": 0,
    "no_repeat_ngram_size": 0,
}  # fmt: skip
# Fp32 holds logits divided or multiplied by these; and divided by temperatures up to the second.
_LEAST, _MOST, _HOTTEST = 1e-30, 1e30, 1e38


class _Range(NamedTuple):
    """An interval of numbers that an option may take, from ``least`` to ``most``. Its string is used in
    messages.
    """

    least: float
    most: float
    interval: str
    remedy: str


_BELOW_1, _ABOVE_0 = math.nextafter(1.0, 0.0), math.ulp(0.0)
_REAL = {
    "temperature": _Range(0.0, _HOTTEST, "", ""),
    "top_p": _Range(0.0, 1.0, "[0, 1]", "1 keeps all tokens"),
    "min_p": _Range(0.0, 1.0, "[0, 1]", "0 keeps all tokens"),
    "typical_p": _Range(_ABOVE_0, 1.0, "(0, 1]", "1 keeps all tokens"),
    "top_h": _Range(_ABOVE_0, 1.0, "(0, 1]", "leave it out to keep all tokens"),
    "epsilon_cutoff": _Range(0.0, _BELOW_1, "[0, 1)", "0 keeps all tokens"),
    "eta_cutoff": _Range(0.0, _BELOW_1, "[0, 1)", "0 keeps all tokens"),
    "repetition_penalty": _Range(_LEAST, _MOST, f"[{_LEAST:g}, {_MOST:g}]", "1 changes nothing"),
    "length_penalty": _Range(-50.0, 50.0, "[-50, 50]", "1 is the default"),
    "max_time": _Range(0.0, math.inf, "[0, inf]", "leave it out for no limit"),
}
_TOKENS = {
    "eos_token_id", "pad_token_id", "bos_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
_ONE_TOKEN = {"pad_token_id", "forced_bos_token_id"}


def checked(name: str, value: Any) -> Any:
    """Returns the value of an option, converted to an integer where the option takes one.

    Raises:
        ValueError: the value is of another type, or out of range.
    """
    if value is None:
        return None
    if name in _WHOLE:
        if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) > 0:
            raise ValueError(f"{name}={shortened(value)} must be an integer, not {type(value).__name__}")
        if index(value) < _WHOLE[name]:
            raise ValueError(
                f"{name}={shortened(value)} must be at least {_WHOLE[name]}; "
                + ("0 keeps all tokens" if name == "top_k" else "leave it out for the default")
            )
        return index(value)
    if name in _REAL:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{name}={shortened(value)} must be a number, not {type(value).__name__}")
        _check_range(name, value)
    elif name in _TOKENS:
        _check_token_ids(name, value)
    elif name == "sequence_bias":
        for bias in value.values() if isinstance(value, dict) else _second(value):
            # Minus infinity forbids a sequence; two infinities of unlike signs are no number.
            if isinstance(bias, numbers.Real) and not float(bias) <= _MOST:
                raise ValueError(
                    f"sequence_bias has the bias {shortened(bias)}, which must be a number of at most "
                    f"{_MOST:g}; this much forces a token, and -inf forbids it"
                )
    elif name == "exponential_decay_length_penalty":
        parts = list(value) if isinstance(value, list | tuple) else []
        fit = [isinstance(n, numbers.Real) and 0 <= float(n) <= _MOST for n in parts]
        if len(parts) != 2 or not all(fit):
            raise ValueError(
                f"{name}={shortened(value)} must be two numbers of at least 0: after how many new tokens the "
                "penalty begins, and the factor by which it grows, as (100, 1.01)"
            )
    return value


def _check_range(name: str, value: Any) -> None:
    least, most, interval, remedy = _REAL[name]
    if name == "temperature":
        if not 0 <= value < math.inf:
            raise ValueError(
                f"{name}={shortened(value)} must be a finite number of at least 0; 0 means greedy"
            )
        if 0 < value < _LEAST:
            raise ValueError(f"{name}={shortened(value)} is below {_LEAST:g}; use 0, which means greedy")
        if value > most:
            raise ValueError(f"{name}={shortened(value)} is above {most:g}; from 1e6 on all draw about alike")
    elif not least <= value <= most:
        raise ValueError(f"{name}={shortened(value)} must lie in {interval}; {remedy}")


def _check_token_ids(name: str, value: Any) -> None:
    if getattr(value, "ndim", 0) > 0:  # a tensor or an array, which has integers of 64 bits at most
        return
    if name in _ONE_TOKEN and isinstance(value, list | tuple):
        raise ValueError(f"{name}={shortened(value)} must be a single token id; give one of them")
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


def _second(pairs: Any) -> list[Any]:
    """Returns the second entry of each pair in a list. Entries that are not pairs are left for transformers
    to refuse.
    """
    listed = pairs if isinstance(pairs, list | tuple) else []
    return [pair[1] for pair in listed if isinstance(pair, list | tuple) and len(pair) == 2]


def check_sampling_options(kwargs: dict[str, Any]) -> None:
    """Turn ``temperature=0`` into greedy decoding, and any other temperature into sampling.

    Raises:
        ValueError: one of the options that the command line has is out of range; or temperature is 0, and
            ``do_sample`` is True.
    """
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "temperature"):
        checked(name, kwargs.get(name))
    temperature = kwargs.get("temperature")
    if temperature is None:
        return
    if temperature == 0:
        if kwargs.get("do_sample"):
            raise ValueError("temperature=0 means greedy, but do_sample=True; choose one")
        del kwargs["temperature"]
        kwargs["do_sample"] = False
    else:
        kwargs.setdefault("do_sample", True)
