"""Keyword arguments of ``generate``, ours and transformers', that are not options of GenerationConfig."""

import difflib
import inspect
from collections.abc import Collection, Mapping
from operator import index
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from triforce_tree.config import ADVANCED, SHOWN
from triforce_tree.option_checks import unknown_option
from triforce_tree.requests.option_values import check_sampling_options
from triforce_tree.requests.options import REMEDY, SEVERAL, supported

_REMEDIES = {
    "assistant_model": "give load(target, draft) a draft model",
    "messages": "give them first, as the prompt: generate(messages)",
    "tokenizer": "give it to load(..., tokenizer=...)",
    "max_tokens": "its name is max_new_tokens here",
    "max_length_tokens": "its name is max_new_tokens here",
    "stop": "its name is stop_strings here",
    "n": "its name is num_return_sequences here",
    "prompt": "give it first: generate(prompt)",
    **dict.fromkeys(
        (*SHOWN, "advanced", "target", "draft", "drafter", "device", "dtype"),
        "give it to load(...), or to Engine.with_options",
    ),
    **{
        name: f"give it to load(..., advanced={{{name!r}: ...}}), or to Engine.with_options"
        for name in ADVANCED
    },
}
# Arguments of Engine.generate that are no options of GenerationConfig.
_OWN = ("seed", "streamer", "logprobs", "stopping_criteria", "logits_processor", "attention_mask", "progress")
# Keywords of transformers' generate that are no options of GenerationConfig; False has no effect.
_SWITCHES = frozenset({"synced_gpus", "trust_remote_code"})

# Texts of one prompt.
_MOST_TEXTS = 65_536


def generation_options(
    options: Mapping[str, Any], config: GenerationConfig | Mapping[str, Any] | None
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Returns a configuration and option keywords, in the form that transformers' ``generate`` takes.

    Args:
        options: keywords. A keyword whose value is None is dropped.
        config: a GenerationConfig, or a dict of options; ``options`` take precedence over the dict.

    Returns:
        The GenerationConfig, or None if none was given; and the option keywords.

    Raises:
        ValueError: a keyword is not an option of GenerationConfig, or its value is invalid.
    """
    if isinstance(config, Mapping):
        options, config = {**config, **options}, None
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(
            f"generation_config is of type {type(config).__name__}; give a GenerationConfig or a dict of its "
            "options"
        )
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    kept: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            kept[name] = supported(name, value)
        elif value is not None and not (value is False and name in _SWITCHES):
            similar = difflib.get_close_matches(name, [*known, *_OWN], 1, 0.8)
            near = f"did you mean {similar[0]}?" if similar else REMEDY
            hint = _REMEDIES.get(name, near)
            raise ValueError(f"{name} is no option that triforce_tree supports; {hint}")
    if config is not None:
        for name, value in config.to_diff_dict().items():
            supported(name, value)
    check_sampling_options(kept)
    return config, kept


def check_keywords(
    given: Mapping[str, Any], own: Collection[str], of_load: Collection[str]
) -> dict[str, Any]:
    """Check the keywords of ``generate`` before a model is loaded.

    Args:
        given: the keywords of the call.
        own: parameters of :meth:`Engine.generate`.
        of_load: options of ``load``. An unknown keyword with such a name gets a message that says so.

    Returns:
        The keywords that are options of GenerationConfig.

    Raises:
        ValueError: a keyword is unknown, or has an invalid value.
    """
    known = vars(GenerationConfig())
    options = {name: value for name, value in given.items() if name not in (*own, *SEVERAL)}
    for name in options.keys() - known.keys():
        similar = difflib.get_close_matches(name, [*known, *own, *of_load], 1, 0.8)
        if similar and similar[0] in of_load:
            raise unknown_option(name, of_load)
        if not similar and name not in _REMEDIES:
            del options[name]  # a model's own input may be neutral for it
    checked_stop_strings(given.get("stop_strings"))
    if not isinstance(given.get("seed"), list | tuple):
        checked_seed(given.get("seed"))
    return generation_options(options, given.get("generation_config"))[1]


def number_asked(name: str, kwargs: Mapping[str, Any]) -> int:
    """Returns the value of ``num_beams`` or ``num_return_sequences`` in the arguments of a call; the default
    is 1.

    Raises:
        ValueError: the value is not an integer from 1 to ``_MOST_TEXTS``.
    """
    config = kwargs.get("generation_config")
    value = kwargs.get(name)
    if value is None and config is not None:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TEXTS:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1, and at most {_MOST_TEXTS}")
    return value


# Parameters of transformers' generate that never reach a custom_generate callable.
_DROPPED = (
    "assistant_model",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "streamer",
    "synced_gpus",
)


def refuse_dropped(frame: FrameType | None) -> None:
    """Raise an error for arguments that the calling ``generate`` of transformers does not pass on.

    Args:
        frame: a stack frame inside that call.

    Raises:
        ValueError: such an argument was given; the message names it.
    """
    own = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not own:
        frame = frame.f_back
    given = frame.f_locals if frame is not None else {}
    for name in _DROPPED:
        if given.get(name) is not None and given[name] is not False:
            remedy = f"give it to custom_generate({name}=...)" if name == "streamer" else "leave it out"
            raise ValueError(f"{name} does not reach triforce_tree through transformers' generate; {remedy}")


def checked_stop_strings(strings: Any) -> list[str]:
    """Returns the stop strings as a list.

    Raises:
        ValueError: a stop string is empty or is not a string.
    """
    found = [strings] if isinstance(strings, str) else list(strings or [])
    for each in found:
        if not isinstance(each, str) or not each:
            raise ValueError(f"stop_strings holds {each!r}; give strings of at least one character")
    return found


def as_list(name: str, given: Any) -> list[Any]:
    """Returns the entries of a LogitsProcessorList, a StoppingCriteriaList or a list, or a single object, as
    a list.

    Raises:
        ValueError: an entry cannot be called.
    """
    entries = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for entry in entries:
        if not callable(entry):
            raise ValueError(f"{name} holds {entry!r}, which cannot be called; see transformers' {name}")
    return entries


def pad_token(*sources: Mapping[str, Any]) -> int:
    """Returns the first pad token of the sources or, if they have none, their first EOS token, as
    transformers does.
    """
    for name in ("pad_token_id", "eos_token_id"):
        for source in sources:
            if (value := source.get(name)) is not None and len(ids := torch.as_tensor(value).flatten()):
                return int(ids[0])
    return 0


def inferred_padding(*sources: Mapping[str, Any]) -> int | None:
    """Returns the pad token if it is not an EOS token. Without an attention mask, transformers treats this
    token as padding.
    """
    found = {
        name: next((v for s in sources if (v := s.get(name)) is not None), None)
        for name in ("pad_token_id", "eos_token_id")
    }
    pad, ends = found["pad_token_id"], found["eos_token_id"]
    if pad is None or (ends is not None and int(pad) in torch.as_tensor(ends).flatten().tolist()):
        return None
    return int(pad)


def checked_seed(seed: Any) -> int | None:
    """Returns a seed that torch's generators accept, or None.

    Raises:
        ValueError: the seed is not an integer of 64 bits.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not -(2**63) <= index(seed) < 2**64:
        raise ValueError(
            f"seed={seed!r} must be an integer of at most 64 bits; give one from -2**63 to 2**64 - 1"
        )
    return index(seed)


def checked_seeds(seed: Any, count: int) -> tuple[int | None, list[int | None] | None]:
    """Returns (seed, None) for one seed, or (None, seeds) for a list with one seed for each of ``count``
    sequences.

    Raises:
        ValueError: the value is something else, or the list has another length.
    """
    if not isinstance(seed, (list, tuple)):
        return checked_seed(seed), None
    if len(seed) != count:
        raise ValueError(f"seed has {len(seed)} entries for {count} sequences; give one for each, or one int")
    return None, [checked_seed(each) for each in seed]


def checked_count(name: str, value: Any) -> int | None:
    """Returns an integer of at least 1, or None.

    Raises:
        ValueError: the value is something else.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} must be a whole number from 1 on, or None")
    return value


def checked_switch(name: str, value: Any) -> bool:
    """Returns a boolean option; None means False.

    Raises:
        ValueError: the value is something else, such as a number.
    """
    if not isinstance(value, bool | None):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)
