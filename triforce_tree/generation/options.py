"""Generation options of transformers: those that are carried out, and those that are refused."""

import math
import numbers
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as hf_stop

from triforce_tree.decoding.stop_criteria import Ending, Stop
from triforce_tree.generation.stop_strings import StopStrings
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.runtime.distributed import broadcast_flag
from triforce_tree.verify.sampling import ProbsFromLogits

# Options of GenerationConfig that this package carries out. Any other that differs from its default is
# refused by name, not ignored.
HONOURED = frozenset(
    """
    max_new_tokens max_length min_length min_new_tokens max_time stop_strings
    do_sample temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff top_h
    repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty
    renormalize_logits remove_invalid_values watermarking_config
    pad_token_id bos_token_id eos_token_id return_dict_in_generate output_logits output_scores use_cache
    transformers_version
    """.split()  # noqa: SIM905 - a list would take a line for each name
)
# Options that ask for several texts of a prompt, and those that they alone read: ``branching`` carries them
# out, and they are refused elsewhere.
OF_BEAMS = ("length_penalty", "early_stopping")
SEVERAL = ("num_beams", "num_return_sequences", *OF_BEAMS)
# Defaults that transformers fills in; with these values the options have no effect.
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}

# Options whose values are whole numbers, and the least of each.
_WHOLE = {
    "max_new_tokens": 1, "max_length": 1, "min_length": 0, "min_new_tokens": 0, "top_k": 0,
    "no_repeat_ngram_size": 0,
}  # fmt: skip
# Fp32 holds logits divided or multiplied by these; and divided by temperatures up to the second.
_LEAST, _MOST, _HOTTEST = 1e-30, 1e30, 1e38
REMEDY = "leave it out, or use the model's own generate()"


class _Range(NamedTuple):
    """The numbers from ``least`` to ``most`` that an option may be, as an interval in words."""

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


def _shown(value: Any) -> str:
    """A value in an error, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def checked(name: str, value: Any) -> Any:
    """The value of an option, as an integer where it takes one.

    Raises:
        ValueError: the value is of another type, or out of range.
    """
    if value is None:
        return None
    if name in _WHOLE:
        if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) > 0:
            raise ValueError(f"{name}={_shown(value)} must be an integer, not {type(value).__name__}")
        if index(value) < _WHOLE[name]:
            raise ValueError(
                f"{name}={_shown(value)} must be at least {_WHOLE[name]}; "
                + ("0 keeps all tokens" if name == "top_k" else "leave it out for the default")
            )
        return index(value)
    if name in _REAL:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{name}={_shown(value)} must be a number, not {type(value).__name__}")
        _check_range(name, value)
    elif name in _TOKENS:
        _check_token_ids(name, value)
    elif name == "sequence_bias":
        for bias in value.values() if isinstance(value, dict) else _second(value):
            # Minus infinity forbids a sequence; two infinities of unlike signs are no number.
            if isinstance(bias, numbers.Real) and not float(bias) <= _MOST:
                raise ValueError(
                    f"sequence_bias has the bias {_shown(bias)}, which must be a number of at most "
                    f"{_MOST:g}; this much forces a token, and -inf forbids it"
                )
    elif name == "exponential_decay_length_penalty":
        parts = list(value) if isinstance(value, list | tuple) else []
        fit = [isinstance(n, numbers.Real) and 0 <= float(n) <= _MOST for n in parts]
        if len(parts) != 2 or not all(fit):
            raise ValueError(
                f"{name}={_shown(value)} must be two numbers of at least 0: after how many new tokens the "
                "penalty begins, and the factor by which it grows, as (100, 1.01)"
            )
    return value


def _check_range(name: str, value: Any) -> None:
    least, most, interval, remedy = _REAL[name]
    if name == "temperature":
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={_shown(value)} must be a finite number of at least 0; 0 means greedy")
        if 0 < value < _LEAST:
            raise ValueError(f"{name}={_shown(value)} is below {_LEAST:g}; use 0, which means greedy")
        if value > most:
            raise ValueError(f"{name}={_shown(value)} is above {most:g}; from 1e6 on all draw about alike")
    elif not least <= value <= most:
        raise ValueError(f"{name}={_shown(value)} must lie in {interval}; {remedy}")


def _check_token_ids(name: str, value: Any) -> None:
    if getattr(value, "ndim", 0) > 0:  # a tensor or an array, which has integers of 64 bits at most
        return
    if name in _ONE_TOKEN and isinstance(value, list | tuple):
        raise ValueError(f"{name}={_shown(value)} must be a single token id; give one of them")
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str):
            raise ValueError(
                f"{name}={_shown(value)} must be a token id or a list of them; "
                f"tokenizer.convert_tokens_to_ids({each!r}) tells it"
            )
        if not hasattr(each, "__index__") or not -(2**63) <= index(each) < 2**63:
            raise ValueError(
                f"{name}={_shown(value)} must be a token id or a list of them: integers of 64 bits; "
                "see tokenizer.vocab_size"
            )


def _second(pairs: Any) -> list[Any]:
    """The second of each pair in a list; what is no pair is left to transformers to refuse."""
    listed = pairs if isinstance(pairs, list | tuple) else []
    return [pair[1] for pair in listed if isinstance(pair, list | tuple) and len(pair) == 2]


def check_forced_tokens(config: GenerationConfig, vocabulary: int) -> None:
    """Raise ValueError for a forced token that is not in a vocabulary of so many tokens."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        given = getattr(config, name, None)
        for token in [] if given is None else torch.as_tensor(given).flatten().tolist():
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name}={token} is not in the model's vocabulary; give a token id below {vocabulary}"
                )


def is_supported(name: str, value: Any) -> bool:
    """Whether a GenerationConfig option is carried out, or has no effect with this value."""
    known = name in HONOURED or name.startswith("_")
    return known or value in (None, False, _NEUTRAL.get(name))


def supported(name: str, value: Any) -> Any:
    """The value of a GenerationConfig option that is carried out, or has no effect with this value.

    Raises:
        ValueError: it is neither, or no number where one is needed.
    """
    value = checked(name, value)
    if name in HONOURED or name.startswith("_"):
        return value
    if not is_supported(name, value):
        if name in OF_BEAMS:
            raise ValueError(f"{name}={value!r} is read with num_beams above 1 alone; leave it out")
        raise ValueError(f"generation option {name}={value!r} is not supported by triforce_tree; {REMEDY}")
    return value


def refuse_unsupported(config: GenerationConfig, processors: LogitsProcessorList) -> None:
    """Raise for every option that would otherwise be ignored.

    Raises:
        ValueError: naming the option.
    """
    for name, value in config.to_diff_dict().items():
        supported(name, value)
    for processor in processors:
        if "ClassifierFreeGuidance" in type(processor).__name__:
            raise ValueError(
                f"{type(processor).__name__} runs the model itself, which is not supported by triforce_tree; "
                f"{REMEDY}"
            )


# What transformers' generate prepares for a model's own forward, and what this package does by itself.
_PREPARED = frozenset(
    {
        "position_ids",
        "cache_position",
        CACHE,
        "use_cache",
        "logits_to_keep",
        "num_logits_to_keep",
    }
)


def refuse_model_inputs(inputs: dict[str, Any], input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Raise for model inputs other than token ids (embeddings, images), which would be ignored.

    Args:
        inputs: prepared by transformers' generate for the model's forward.
        input_ids, attention_mask: int64 ``[B, W]``; the mask may be None without padding.

    Raises:
        ValueError: naming the input.
    """
    for name, value in inputs.items():
        # Multimodal classes get an empty dict where there are no images.
        asks = value is not None and not (isinstance(value, dict) and not value)
        if asks and name not in _PREPARED:
            raise ValueError(
                f"{name} is not supported by triforce_tree, which continues token ids alone; leave it "
                "out, or use the model's own generate()"
            )
    cache = inputs.get(CACHE)
    # transformers itself passes an empty one.
    if cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0):
        raise ValueError(
            f"{CACHE} holds tokens, and triforce_tree has KV caches of its own; leave it out and give "
            "the whole text as input_ids"
        )
    positions = inputs.get("position_ids")
    if positions is not None:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        counted = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        # Families differ in what padding gets.
        same = positions.shape[-1] == counted.shape[1] and (positions.to(counted) == counted) | (mask == 0)
        if same is False or not bool(same.all()):
            raise ValueError(
                "position_ids other than those of attention_mask are not supported by triforce_tree; leave "
                "them out"
            )


def check_sampling_options(kwargs: dict[str, Any]) -> None:
    """Turn ``temperature=0`` into greedy decoding, and any other temperature into sampling.

    Raises:
        ValueError: temperature is 0, and ``do_sample`` is True.
    """
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


def probs_from_options(
    config: GenerationConfig, processors: LogitsProcessorList, padding: Sequence[int] = ()
) -> ProbsFromLogits:
    """Logits to distributions as in transformers; processors see ``padding`` before the tokens."""
    return ProbsFromLogits(processors, greedy=not config.do_sample, padding=padding)


def ending_of(
    config: GenerationConfig,
    criteria: StoppingCriteriaList,
    prompt_tokens: int,
    device: torch.device,
    padding: Sequence[int] = (),
) -> Ending:
    """transformers' stopping criteria, evaluated after every token of an accepted block.

    Args:
        prompt_tokens: width of the prompt, padding included, as ``max_length`` counts it.
        padding: comes before the tokens in what criteria see.
    """
    # A criterion of the user replaces transformers' own of the same class.
    lengths = [c.max_length for c in criteria if type(c) is hf_stop.MaxLengthCriteria]
    ends = [c.eos_token_id for c in criteria if type(c) is hf_stop.EosTokenCriteria]
    stop_tokens = frozenset(token for tensor in ends for token in tensor.flatten().tolist())
    known = (hf_stop.MaxLengthCriteria, hf_stop.EosTokenCriteria, StopStrings)
    others = StoppingCriteriaList(c for c in criteria if type(c) not in known)
    start = prompt_tokens - len(padding)
    stops = [c.of_one(start, stop_tokens) for c in criteria if type(c) is StopStrings]
    if others:
        stops.append(_asking(others, device, padding))
    most = min([*lengths] or [config.max_length]) - prompt_tokens
    return Ending(most, stop_tokens, _any(stops) if stops else None)


def _any(stops: Sequence[Stop]) -> Stop:
    def stop(tokens: list[int]) -> bool:
        # Each is asked for every token: ranks wait for each other in some.
        found = [each(tokens) for each in stops]
        return any(found)

    return stop


def _asking(criteria: StoppingCriteriaList, device: torch.device, padding: Sequence[int]) -> Stop:
    held = torch.tensor([list(padding)], dtype=torch.int64, device=device)

    def stop(tokens: list[int]) -> bool:
        nonlocal held
        # Asked after each token; a pass that is repeated (memory ran out) has asked about its own before.
        known = min(held.shape[1] - len(padding), len(tokens) - 1)
        fresh = torch.tensor([tokens[known:]], dtype=torch.int64, device=device)
        held = torch.cat([held[:, : len(padding) + known], fresh], 1)
        return broadcast_flag(bool(criteria(held, None).all()))

    return stop
