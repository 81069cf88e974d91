"""A Llama with more positions than it was trained on, by YaRN (arXiv 2309.00071), as transformers has it."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel

# Positions that the embedded target was trained on.
TRAINED = 131_072


def use_yarn(model: PreTrainedModel, factor: float, original: int, **parameters: float | bool) -> None:
    """Gives a Llama ``factor * original`` positions, in place; a factor of 1 is plain rope.

    Args:
        original: positions whose rotations YaRN takes to be trained.
        parameters: further ones of transformers' ``rope_parameters``: ``attention_factor``, ``beta_fast``,
            ``beta_slow``, ``truncate``.
    """
    config: Any = model.config
    rope: dict[str, Any] = {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": "default"}
    if factor > 1:
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= yarn | parameters
    config.rope_parameters, config.max_position_embeddings = rope, int(factor * original)
    decoder: Any = model.get_decoder()
    with torch.device(model.device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=config)


def factor_for(tokens: int, original: int) -> int:
    """Returns the least whole factor by which ``original`` positions hold so many tokens."""
    return max(1, math.ceil(tokens / original))
