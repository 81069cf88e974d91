"""What readers of published drafters share: checks of configurations, and of results against references."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from triforce_tree.drafters.registry import CONFIG

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""
MOST_ERROR = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Relative differences that rounding explains."""
WITHOUT_EFFECT = frozenset([
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "draft_vocab_size",
    "dtype", "embed_requires_grad", "eos_token_id", "initializer_range", "max_window_layers", "model_type",
    "pad_token_id", "pretraining_tp", "speculators_config", "speculators_version", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache", "vocab_size",
])  # fmt: skip
"""Fields that change nothing in the computation, or only repeat what other fields or the tensors say."""
# Fields that may have some values only.
_FIXED: Mapping[str, Callable[[Any], bool]] = {
    "hidden_act": lambda value: value in ("silu", "swish"),
    "logit_scale": lambda value: value == 1,
    "partial_rotary_factor": lambda value: value == 1,
}


def check_field(
    folder: Path, name: str, value: object, known: Collection[str], fixed: Mapping[str, Callable[[Any], bool]]
) -> None:
    """Raises ValueError if a field of ``config.json`` has a value that is not supported, or is unknown and
    may change what the drafter computes.

    Args:
        known: names of fields that are read elsewhere, or have no effect.
        fixed: whether a value is supported, by the name of a field.
    """
    if name in known or value is None:
        return
    if (allowed := {**_FIXED, **fixed}.get(name)) is not None:
        if not allowed(value):
            raise ValueError(f"{name}={value!r} in {str(folder / CONFIG)!r} is not supported")
    elif value is not False:
        raise ValueError(
            f"{str(folder / CONFIG)!r} has the field {name}={value!r}, which is not known and may change "
            "what the drafter computes; remove the field if it has no effect"
        )


def layers_of(folder: Path, family: str, fields: Mapping[str, Any]) -> Any:
    """Returns the decoder layers of a drafter as a configuration of transformers.

    Raises:
        ValueError: values cannot be used, or frequencies of rotary embeddings depend on the length of the
            sequence.
    """
    try:
        layers: Any = CONFIG_MAPPING[family](**fields)
        rope = layers.rope_parameters["rope_type"]
    except Exception as error:  # third-party code may raise anything on values of unknown origin
        why = " ".join(str(error).split())[:160]
        raise ValueError(f"config.json in {str(folder)!r} cannot be used ({why})") from error
    if rope not in ROPES:
        raise ValueError(
            f"rope_type={rope!r} in {str(folder)!r} is not supported; known are {', '.join(ROPES)}"
        )
    return layers


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
