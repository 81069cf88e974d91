"""Settings of a checkpoint's ``generation_config``, which apply where the caller gives none."""

import copy
from collections.abc import Collection
from typing import Any

from transformers import GenerationConfig

from triforce_tree.requests.options import is_supported

# How transformers stores keys and values, compiles, drafts and searches beams, and what it returns beside the
# text: none of it changes the text here.
_WITHOUT_EFFECT = (
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "prefill_chunk_size",
    "low_memory",
    "early_stopping",
    "length_penalty",
    "use_mtp",
    "speculation_type",
    "continuous_batching_config",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "output_attentions",
    "output_hidden_states",
)


def refuse_unsupported_settings(own: GenerationConfig, given: Collection[str]) -> None:
    """Raise an error for settings of a checkpoint that would otherwise be ignored.

    Args:
        own: the checkpoint's settings.
        given: names of options that the caller gave; they are checked elsewhere.

    Raises:
        ValueError: a setting is not supported; the message names it.
    """
    for name, value in own.to_diff_dict().items():
        if name not in given and name not in _WITHOUT_EFFECT and not is_supported(name, value):
            raise ValueError(
                f"generation option {name}={value!r} in the checkpoint's generation_config is not supported "
                f"by triforce_tree; set model.generation_config.{name} = None, or remove it from "
                "generation_config.json"
            )


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
