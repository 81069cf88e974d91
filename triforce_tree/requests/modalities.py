"""Inputs of multimodal models. Only text is supported, so inputs for images, video and sound must be
empty.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_OTHER = re.compile(
    "pixel|image|video|audio|patch|grid|second_per|input_features|input_values|feature_att|^mm_"
)
# 0 for text, others for the tokens that stand for an image. Models of text alone may have other types.
_TYPES = ("token_type_ids", "mm_token_type_ids")


def text_alone(given: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Returns a model's inputs without the empty inputs of other modalities that processors add for text.

    For text-only models all inputs are returned.

    Raises:
        ValueError: an input of another modality is not empty; the message names it.
    """
    config: Any = model.config
    if config.get_text_config(decoder=True) is config:
        return dict(given)
    kept = {}
    # The images are named rather than the types of their tokens.
    for name, value in sorted(given.items(), key=lambda item: item[0] in _TYPES):
        if name not in _TYPES and not _OTHER.search(name):
            kept[name] = value
        elif not _empty(name, value):
            what = f"{name} ({', '.join(value)})" if isinstance(value, Mapping) else name
            raise ValueError(
                f"{what} is not supported by triforce_tree, which continues text alone; leave it out, or use "
                "the model's own generate()"
            )
    return kept


def _empty(name: str, value: Any) -> bool:
    if name in _TYPES and value is not None:
        return not bool(torch.as_tensor(value).any())
    if isinstance(value, Mapping):
        return all(_empty("", part) for part in value.values())
    if isinstance(value, Tensor):
        return value.numel() == 0
    return value is None or (hasattr(value, "__len__") and len(value) == 0)
