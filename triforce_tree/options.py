"""What transformers prepared for us: logits processors, stopping criteria, and options we refuse."""

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as hf_stop

from triforce_tree.decoder import Ending, Stop
from triforce_tree.parallel import agreed
from triforce_tree.sampling import TokenLaw

# Options of GenerationConfig that this package carries out. Everything else that differs from its
# default is refused by name: an option that is silently ignored is worse than one that is missing.
HONOURED = frozenset(
    """
    max_new_tokens max_length min_length min_new_tokens max_time stop_strings
    do_sample temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff top_h
    repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty
    renormalize_logits remove_invalid_values
    pad_token_id bos_token_id eos_token_id return_dict_in_generate use_cache
    transformers_version
    """.split()  # noqa: SIM905 - a name a line would fill the page
)
# What transformers fills in for options nobody set; these values ask for nothing.
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
# Processors that keep state of their own from call to call, or run a model: they need one call a token.
_REFUSED_PROCESSORS = ("SynthIDTextWatermarkLogitsProcessor", "ClassifierFreeGuidance")


def refuse_unsupported(config: GenerationConfig, processors: LogitsProcessorList) -> None:
    """Raise for every option that would otherwise be ignored.

    Raises:
        ValueError: naming the option.
    """
    for name, value in config.to_diff_dict().items():
        if name in HONOURED or name.startswith("_"):
            continue
        if value not in (None, False, _NEUTRAL.get(name)):
            raise ValueError(
                f"generation option {name}={value!r} is not supported by triforce_tree; leave it out, "
                "or use the model's own generate()"
            )
    if config.use_cache is False:
        raise ValueError("use_cache=False is not supported by triforce_tree: caches are its business")
    for processor in processors:
        if any(name in type(processor).__name__ for name in _REFUSED_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps state between tokens, so it cannot judge the nodes "
                "of a token tree"
            )


# What transformers' generate prepares for a model's own forward: caches and positions are our business.
_PREPARED = frozenset(
    {
        "position_ids",
        "cache_position",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "num_logits_to_keep",
    }
)


def refuse_model_inputs(inputs: dict[str, Any]) -> None:
    """Raise for what the model would take beside token ids (embeddings, images), rather than drop it.

    Raises:
        ValueError: naming the input.
    """
    for name, value in inputs.items():
        if value is not None and name not in _PREPARED:
            raise ValueError(
                f"{name} is not supported by triforce_tree, which continues token ids alone; leave it "
                "out, or use the model's own generate()"
            )


def check_sampling_options(kwargs: dict[str, Any]) -> None:
    """Read ``temperature=0`` as greedy, any other temperature as a wish to sample.

    Raises:
        ValueError: temperature is negative, NaN or infinite.
    """
    temperature = kwargs.get("temperature")
    if temperature is None:
        return
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be a finite number of at least 0; 0 means greedy")
    if temperature == 0:
        if kwargs.get("do_sample"):
            raise ValueError("temperature=0 means greedy, but do_sample=True; choose one")
        del kwargs["temperature"]
        kwargs["do_sample"] = False
    else:
        kwargs.setdefault("do_sample", True)


def law_of(config: GenerationConfig, processors: LogitsProcessorList) -> TokenLaw:
    return TokenLaw(processors, greedy=not config.do_sample)


def ending_of(
    config: GenerationConfig, criteria: StoppingCriteriaList, prompt_tokens: int, device: torch.device
) -> Ending:
    """transformers' stopping criteria, asked after every single token of an accepted block."""
    eos = getattr(config, "_eos_token_tensor", None)
    stop_tokens = frozenset(eos.flatten().tolist()) if eos is not None else frozenset()
    known = (hf_stop.MaxLengthCriteria, hf_stop.EosTokenCriteria)
    others = StoppingCriteriaList(c for c in criteria if not isinstance(c, known))
    stop = _asking(others, device) if others else None
    return Ending(config.max_length - prompt_tokens, stop_tokens, stop)


def _asking(criteria: StoppingCriteriaList, device: torch.device) -> Stop:
    held = torch.empty(1, 0, dtype=torch.int64, device=device)

    def stop(tokens: list[int]) -> bool:
        nonlocal held
        fresh = torch.tensor([tokens[held.shape[1] :]], dtype=torch.int64, device=device)
        held = torch.cat([held, fresh], 1)
        return agreed(bool(criteria(held, None).all()))

    return stop
