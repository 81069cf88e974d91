"""Options of transformers' ``generate``: which are carried out, and which are refused by name."""

import copy
import difflib
import inspect
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from triforce_tree.config import ADVANCED, SHOWN
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.option_checks import LOADING, unknown_option
from triforce_tree.requests.option_values import checked
from triforce_tree.runtime.token_ids import listed_ids

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
# Options of this package, which transformers does not have.
PENALTIES = ("frequency_penalty", "presence_penalty")
# Options that may be a list with a value for each prompt; None leaves the option out for a prompt.
PER_PROMPT = frozenset(
    """
    max_new_tokens min_new_tokens do_sample temperature top_k top_p min_p typical_p repetition_penalty
    frequency_penalty presence_penalty eos_token_id bad_words_ids sequence_bias
    logprobs output_logits output_scores
    """.split()  # noqa: SIM905 - a list would take a line for each name
)
# Options that only beam search reads.
OF_BEAMS = ("length_penalty", "early_stopping")
# Options that request several texts of a prompt. ``branching`` carries them out; they are refused elsewhere.
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

# Settings of a checkpoint that do not change the text: how transformers stores keys and values, compiles,
# drafts and searches beams, and what it returns beside the text.
_WITHOUT_EFFECT = (
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "prefill_chunk_size", "low_memory", "early_stopping", "length_penalty", "use_mtp", "speculation_type",
    "continuous_batching_config", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "output_attentions", "output_hidden_states",
)  # fmt: skip
REMEDY = "leave it out, or use the model's own generate()"
# Unknown keywords, and what to do instead.
_REMEDIES = {
    "assistant_model": "give load(target, draft) a draft model",
    "adapter_names": (
        "one adapter serves all sequences of a call: activate it by set_adapter of peft's model, and call "
        "once for each adapter"
    ),
    "messages": "give them first, as the prompt: generate(messages)",
    "max_tokens": "its name is max_new_tokens here",
    "max_length_tokens": "its name is max_new_tokens here",
    "stop": "its name is stop_strings here",
    "n": "its name is num_return_sequences here",
    "prompt": "give it first: generate(prompt)",
    **dict.fromkeys((*SHOWN, "advanced"), "give it to load(...), or to Engine.with_options"),
    **dict.fromkeys(LOADING, "give it to load(...)"),
    "tokenizer": "give it to load(..., tokenizer=...)",
    **{
        name: f"give it to load(..., advanced={{{name!r}: ...}}), or to Engine.with_options"
        for name in ADVANCED
    },
}
# Parameters of Engine.generate that are no options of GenerationConfig.
_OWN = ("seed", "streamer", "logprobs", "stopping_criteria", "logits_processor", "attention_mask", "progress")
# Keywords of transformers' generate that are no options of GenerationConfig; False has no effect.
_SWITCHES = frozenset({"synced_gpus", "trust_remote_code"})


def given_options(
    options: Mapping[str, Any],
    config: GenerationConfig | Mapping[str, Any] | None,
    checkpoint: GenerationConfig | None = None,
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Returns the options of a call in the form that transformers' ``generate`` takes.

    A temperature of 0 becomes greedy decoding, and any other temperature becomes sampling.

    Args:
        options: keywords. A keyword that is no option and whose value is None is dropped.
        config: a GenerationConfig, or a dict of options; ``options`` take precedence over both.
        checkpoint: the settings of the checkpoint, over which both take precedence; None if there are none.

    Returns:
        The GenerationConfig, or None if none was given; and the option keywords.

    Raises:
        ValueError: a keyword is not an option of GenerationConfig; or an option, also of the checkpoint, is
            not supported, or its value is invalid. The message names it.
    """
    if isinstance(config, Mapping):
        options, config = {**config, **options}, None
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(
            f"generation_config is of type {type(config).__name__}; give a GenerationConfig or a dict of its "
            "options"
        )
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | set(PENALTIES)
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None and name in SEVERAL:
            continue  # transformers compares their numbers
        if name in known:
            found[name] = supported(name, value)
        elif value is not None and not (value is False and name in _SWITCHES):
            similar = difflib.get_close_matches(name, [*known, *_OWN], 1, 0.8)
            near = f"did you mean {similar[0]}?" if similar else REMEDY
            raise ValueError(f"{name} is no option that triforce_tree supports; {_REMEDIES.get(name, near)}")
    for name, value in config.to_diff_dict().items() if config is not None else ():
        supported(name, value)
    if (temperature := found.get("temperature")) == 0:
        if found.get("do_sample"):
            raise ValueError("temperature=0 means greedy, but do_sample=True; choose one")
        del found["temperature"]
        found["do_sample"] = False
    elif temperature is not None:
        found.setdefault("do_sample", True)
    given = {**(vars(config) if config is not None else {}), **found}
    for name, value in checkpoint.to_diff_dict().items() if checkpoint is not None else ():
        # transformers checks lengths, which options of the caller may replace.
        if given.get(name) is None and name not in (*_WITHOUT_EFFECT, "max_length", "min_length"):
            supported(name, value, of_checkpoint=True)
    return config, found


def per_prompt(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Splits options into those of all prompts, and lists that have the value of each prompt."""
    lists = {name: list(value) for name, value in options.items() if _is_list(name, value)}
    return {name: value for name, value in options.items() if name not in lists}, lists


def _is_list(name: str, value: Any) -> bool:
    if name not in PER_PROMPT or not isinstance(value, list | tuple):
        return False
    if name == "eos_token_id":
        return any(each is None or isinstance(each, list | tuple) for each in value)
    if name == "bad_words_ids":
        return any(
            each is None or (isinstance(each, list) and each and isinstance(each[0], list)) for each in value
        )
    return name != "sequence_bias" or any(each is None or isinstance(each, dict) for each in value)


def texts_asked(kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the numbers of beams and of texts per prompt that a call requests; the defaults are 1.

    Raises:
        ValueError: a number is not an integer of at least 1.
    """
    config, found = kwargs.get("generation_config"), []
    for name in ("num_beams", "num_return_sequences"):
        value = kwargs.get(name)
        if value is None:
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        found.append(1 if value is None else checked(name, value))
    beams, texts = found
    return beams, texts


def supported(name: str, value: Any, of_checkpoint: bool = False) -> Any:
    """Returns the value of a GenerationConfig option that is carried out, or has no effect with this value.

    Args:
        of_checkpoint: whether it is a setting of the checkpoint, which the error then says.

    Raises:
        ValueError: the option is neither, or its value is invalid.
    """
    if (
        name in HONOURED
        or name in PENALTIES
        or name.startswith("_")
        or value in (None, False, _NEUTRAL.get(name))
    ):
        return checked(name, value)
    if of_checkpoint:
        raise ValueError(
            f"generation option {name}={value!r} in the checkpoint's generation_config is not supported "
            f"by triforce_tree; set model.generation_config.{name} = None, or remove it from "
            "generation_config.json"
        )
    checked(name, value)
    if name in OF_BEAMS:
        raise ValueError(f"{name}={value!r} is read with num_beams above 1 alone; leave it out")
    raise ValueError(f"generation option {name}={value!r} is not supported by triforce_tree; {REMEDY}")


def without_settings(model: Any) -> Any:
    """Returns the model, or a shallow copy of it, without settings that transformers' ``generate`` must not
    see.

    These are settings that have no effect here, and stop strings, for which transformers would require a
    tokenizer that it does not pass on.
    """
    own = model.generation_config
    dropped = [name for name in (*_WITHOUT_EFFECT, "stop_strings") if getattr(own, name, None) is not None]
    if not dropped:
        return model
    other = copy.copy(model)
    other.generation_config = copy.copy(own)
    for name in dropped:
        setattr(other.generation_config, name, None)
    return other


def check_prepared(config: GenerationConfig, processors: LogitsProcessorList, vocabulary: int) -> None:
    """Checks the options that transformers has prepared.

    Raises:
        ValueError: a token is not in the vocabulary, or a processor runs the model.
    """
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        for token in listed_ids(getattr(config, name, None)):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name}={token} is not in the model's vocabulary; give a token id below {vocabulary}"
                )
    for processor in processors:
        if isinstance(processor, SequenceBiasLogitsProcessor):
            outside = [token for words in processor.sequence_bias for token in words if token >= vocabulary]
            if outside:
                name = (
                    "bad_words_ids" if isinstance(processor, NoBadWordsLogitsProcessor) else "sequence_bias"
                )
                raise ValueError(
                    f"{name} has the token {outside[0]}, which is not in the model's vocabulary; give token "
                    f"ids below {vocabulary}"
                )
        if "ClassifierFreeGuidance" in type(processor).__name__:
            raise ValueError(
                f"{type(processor).__name__} runs the model itself, which is not supported by triforce_tree; "
                f"{REMEDY}"
            )


# Options that transformers' generate prepares for a model's own forward, and those that this package handles
# itself.
_PREPARED = ("position_ids", "cache_position", CACHE, "use_cache", "logits_to_keep", "num_logits_to_keep")


def refuse_model_inputs(inputs: dict[str, Any], input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Raises an error for model inputs other than token ids (embeddings, images), which would be ignored.

    Args:
        inputs: inputs that transformers' generate prepared for the model's forward.
        input_ids, attention_mask: int64 ``[B, W]``; the mask may be None without padding.

    Raises:
        ValueError: such an input was given; the message names it.
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
        # Families differ in the positions that padding gets.
        same = positions.shape[-1] == counted.shape[1] and (positions.to(counted) == counted) | (mask == 0)
        if same is False or not bool(same.all()):
            raise ValueError(
                "position_ids other than those of attention_mask are not supported by triforce_tree; leave "
                "them out"
            )


def check_keywords(
    given: Mapping[str, Any], own: Collection[str], of_load: Collection[str]
) -> dict[str, Any]:
    """Checks the keywords of ``generate`` before a model is loaded.

    Args:
        given: the keywords of the call.
        own: parameters of :meth:`Engine.generate`.
        of_load: options of ``load``. An unknown keyword with such a name gets a message that says so.

    Returns:
        The keywords that are options of GenerationConfig.

    Raises:
        ValueError: a keyword is unknown, or has an invalid value.
    """
    known = {**vars(GenerationConfig()), **dict.fromkeys(PENALTIES)}
    options, lists = per_prompt(
        {name: value for name, value in given.items() if name not in (*own, *SEVERAL)}
    )
    for name, values in lists.items():
        for value in values:
            checked(name, value)
    for name in options.keys() - known.keys():
        similar = difflib.get_close_matches(name, [*known, *own, *of_load], 1, 0.8)
        if similar and similar[0] in of_load:
            raise unknown_option(name, of_load)
        if not similar and name not in _REMEDIES:
            del options[name]  # a model's own input may be neutral for it
    checked("stop_strings", given.get("stop_strings"))
    if not isinstance(given.get("seed"), list | tuple):
        checked("seed", given.get("seed"))
    return given_options(options, given.get("generation_config"))[1]


# Parameters of transformers' generate that never reach a custom_generate callable.
_DROPPED = (
    "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask", "streamer", "synced_gpus",
)  # fmt: skip


def refuse_dropped(frame: FrameType | None) -> None:
    """Raises an error for arguments that the calling ``generate`` of transformers does not pass on.

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
