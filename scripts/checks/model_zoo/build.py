"""Tiny random models of any class of transformers, in fp32, with everything special about it left on."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scripts.checks.model_zoo.classes import Family
from scripts.checks.model_zoo.overrides import BY_CONFIG, VARIANTS
from scripts.checks.model_zoo.shrink import PLAIN_TOKENS, Settings, merged, shrunk

DEFAULT = "default"
_MOST_PARAMETERS = 3_000_000
# Standard deviation of a layer's output for inputs of norm 1: random models then do not repeat one token.
_GAIN = 1.2


def settings_of(family: Family, variant: str = DEFAULT) -> Settings:
    """Keywords of the tiny configuration of a class."""
    config = family.config_class
    own = BY_CONFIG.get(config.__name__, {})
    found = merged(
        shrunk(config(**own.get("__base__", {}))), {k: v for k, v in own.items() if k != "__base__"}
    )
    return found if variant == DEFAULT else merged(found, VARIANTS[family.name][variant])


def variants_of(family: Family) -> list[str]:
    """The feature sets that a class is tried with."""
    return [DEFAULT, *VARIANTS.get(family.name, {})]


def build(family: Family, variant: str = DEFAULT, seed: int = 0) -> PreTrainedModel:
    """A random model of a class; the same seed gives the same weights.

    Raises:
        ValueError: the model is not tiny.
    """
    config = family.config_class(**settings_of(family, variant))
    with torch.device("meta"):
        size = sum(weight.numel() for weight in family.model_class(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are not tiny; at most {_MOST_PARAMETERS:,} are")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = family.model_class(config).float().eval()
    _scatter(model, seed)
    # No token is special to ``generate``, which takes ends and lengths from here.
    kept: Any = model.generation_config
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "max_length", "suppress_tokens",
                 "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"):  # fmt: skip
        if hasattr(kept, name):
            setattr(kept, name, None)
    return model


@torch.no_grad()
def _scatter(model: PreTrainedModel, seed: int) -> None:
    """Random weights by whose size every layer changes the output, and of whose logits no two are near."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim >= 2:
            weight.copy_(noise * (_GAIN / math.sqrt(min(weight.shape[-2:]))))
        else:
            weight.add_(0.1 * noise)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        # Placeholders of images have logit 0, so they are never the best token.
        head.weight[PLAIN_TOKENS:] = 0
        if head.bias is not None:
            head.bias[PLAIN_TOKENS:] = -1


def prompt_of(length: int) -> list[int]:
    """Random plain ids, the same for the same length."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(PLAIN_TOKENS, (length,), generator=generator).tolist()


def features_of(model: PreTrainedModel) -> str:
    """What of it depends on length, or needs more than keys and values: its windows, chunks and so on."""
    config: Any = model.config.get_text_config(decoder=True)
    found = []
    kinds = set(getattr(config, "layer_types", None) or ())
    for name in ("sliding_window", "attention_chunk_size", "floor_scale", "index_topk", "kv_lora_rank"):
        if getattr(config, name, None):
            found.append(f"{name} {getattr(config, name)}")
    return ", ".join([*sorted(kinds), *found])


def new_tokens_of(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The new tokens of greedy decoding by transformers."""
    ids: Tensor = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, use_cache=True
    )
    return out[0, len(prompt) :].tolist()
