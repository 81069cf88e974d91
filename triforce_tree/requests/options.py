"""Generation options of transformers that are carried out, and those that are refused."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as hf_stop

from triforce_tree.decoding.sequence import Ending, Stop
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.stop_strings import StopStrings
from triforce_tree.runtime.distributed import broadcast_flag

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

REMEDY = "leave it out, or use the model's own generate()"


def check_forced_tokens(config: GenerationConfig, vocabulary: int) -> None:
    """Raise ValueError for a forced token that is not in the vocabulary."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        given = getattr(config, name, None)
        for token in [] if given is None else torch.as_tensor(given).flatten().tolist():
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name}={token} is not in the model's vocabulary; give a token id below {vocabulary}"
                )


def is_supported(name: str, value: Any) -> bool:
    """Returns whether a GenerationConfig option is implemented, or has no effect with this value."""
    known = name in HONOURED or name.startswith("_")
    return known or value in (None, False, _NEUTRAL.get(name))


def supported(name: str, value: Any) -> Any:
    """Returns the value of a GenerationConfig option that is implemented, or has no effect with this value.

    Raises:
        ValueError: the option is neither, or its value is not a number although it must be one.
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
    """Raise an error for an option that would otherwise be ignored.

    Raises:
        ValueError: such an option was given; the message names it.
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
    """Raise an error for model inputs other than token ids (embeddings, images), which would be ignored.

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
        # Families differ in what padding gets.
        same = positions.shape[-1] == counted.shape[1] and (positions.to(counted) == counted) | (mask == 0)
        if same is False or not bool(same.all()):
            raise ValueError(
                "position_ids other than those of attention_mask are not supported by triforce_tree; leave "
                "them out"
            )


def ending_of(
    config: GenerationConfig,
    criteria: StoppingCriteriaList,
    prompt_tokens: int,
    device: torch.device,
    padding: Sequence[int] = (),
) -> Ending:
    """Returns an object that evaluates transformers' stopping criteria after every token of an accepted
    block.

    Args:
        prompt_tokens: width of the prompt, padding included, as ``max_length`` counts it.
        padding: pad tokens that criteria see before the tokens of the sequence.
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
