"""What readers of published drafters share: checks of configurations, and of results against references."""

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from triforce_tree.drafters.registry import CONFIG, PARTS

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""
MOST_ERROR = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Relative differences that rounding explains."""
# Fields that change nothing in the computation, or only repeat what other fields or the tensors say.
_WITHOUT_EFFECT = frozenset([
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "draft_vocab_size",
    "dtype", "embed_requires_grad", "eos_token_id", "initializer_range", "max_window_layers", "model_type",
    "pad_token_id", "pretraining_tp", "speculators_config", "speculators_version", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache", "vocab_size",
])  # fmt: skip
# Upper limits of sizes, so that a wrong one is refused before anything of that size is made.
_MOST = {
    "hidden_size": 2**20, "intermediate_size": 2**24, "num_hidden_layers": 2**10,
    "num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16,
}  # fmt: skip
# Fields that may have some values only.
_FIXED: Mapping[str, Callable[[Any], bool]] = {
    "hidden_act": lambda value: value in ("silu", "swish"),
    "logit_scale": lambda value: value == 1,
    "partial_rotary_factor": lambda value: value == 1,
}


def flat(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``config.json`` and of its parts in one mapping, without empty ones.

    Raises:
        ValueError: two parts have different values of a field that has an effect.
    """
    found: dict[str, Any] = {}
    for part in (config, *(config.get(name) or {} for name in PARTS)):
        for name, value in part.items():
            if value is None or value == [] or name in PARTS:
                continue
            if name in found and name not in _WITHOUT_EFFECT and found[name] != value:
                raise ValueError(
                    f"{str(folder / CONFIG)!r} has {name}={found[name]!r} and {name}={value!r}; which one "
                    "holds is not known"
                )
            found[name] = value
    return found


def check_fields(
    folder: Path,
    fields: Mapping[str, Any],
    read: Collection[str],
    fixed: Mapping[str, Callable[[Any], bool]],
) -> None:
    """Raises ValueError if a field of ``config.json`` has a value that is not supported, or is unknown and
    may change what the drafter computes.

    Args:
        read: names of fields that are read elsewhere.
        fixed: whether a value is supported, by the name of a field.
    """
    supported = {**_FIXED, **fixed}
    for name, value in fields.items():
        if name in _WITHOUT_EFFECT or name in read or value is None:
            continue
        if name in supported:
            if not supported[name](value):
                raise ValueError(f"{name}={value!r} in {str(folder / CONFIG)!r} is not supported")
        elif value is not False:
            raise ValueError(
                f"{str(folder / CONFIG)!r} has the field {name}={value!r}, which is not known and may change "
                "what the drafter computes; remove the field if it has no effect"
            )


def layers_of(folder: Path, family: str, fields: Mapping[str, Any]) -> Any:
    """Returns the decoder layers of a drafter as a configuration of transformers.

    Raises:
        ValueError: values cannot be used, or frequencies of rotary embeddings are not finite or depend on the
            length of the sequence.
    """
    for name, most in _MOST.items():
        value = fields.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise ValueError(
                f"{name}={value!r} in {str(folder / CONFIG)!r} must be an integer from 1 to {most}"
            )
    if not _positive(epsilon := fields.get("rms_norm_eps", 1e-6)):
        raise ValueError(f"rms_norm_eps={epsilon!r} in {str(folder / CONFIG)!r} must be a positive number")
    try:
        layers: Any = CONFIG_MAPPING[family](**fields)
        rope = layers.rope_parameters["rope_type"]
    except Exception as error:  # third-party code may raise anything on values of unknown origin
        raise _unusable(folder, error) from error
    if rope not in ROPES:
        raise ValueError(
            f"rope_type={rope!r} in {str(folder)!r} is not supported; known are {', '.join(ROPES)}"
        )
    try:
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(layers)
        rotates = bool(rotary.inv_freq.isfinite().all()) and _positive(rotary.attention_scaling)
    except Exception as error:  # as above
        raise _unusable(folder, error) from error
    if not rotates:
        raise ValueError(
            f"rope_parameters={layers.rope_parameters} by {str(folder / CONFIG)!r} give no finite frequencies"
        )
    return layers


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _unusable(folder: Path, error: Exception) -> ValueError:
    why = " ".join(str(error).split())[:160]
    return ValueError(f"config.json in {str(folder)!r} cannot be used ({why})")


def check_equal(
    what: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype, reference: str = "the plain reference"
) -> None:
    """Compares what a drafter computes with a reference.

    Args:
        what: says which drafter computes what, for messages.

    Raises:
        RuntimeError: they differ by more than rounding in ``dtype`` explains.
    """
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not error <= MOST_ERROR[dtype]:
        raise RuntimeError(
            f"{what} that differ from those of {reference} by {error:.1%}; please report this with its "
            f"{CONFIG}"
        )
