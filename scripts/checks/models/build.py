"""Tiny random models of any class of transformers, in fp32, with everything special about it left on."""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scripts.checks.models.classes import Family
from scripts.checks.models.overrides import BY_CONFIG, VARIANTS
from scripts.checks.models.shrink import PLAIN_TOKENS, Settings, merged, shrunk
from triforce_tree.models.supported import attention_of

DEFAULT = "default"
# Of ``generate``: ends, lengths and forced tokens.
_SPECIAL = re.compile("_token_ids?$|^max_length$|suppress_tokens$")
_FEATURES = (
    "sliding_window", "attention_chunk_size", "floor_scale", "index_topk", "kv_lora_rank",
    "original_max_position_embeddings", "num_kv_shared_layers", "num_local_experts", "num_experts",
    "n_routed_experts", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
_SEEDS, _LEAST_VARIED = 4, 4
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
    """Returns the feature sets that a class is tried with."""
    return [DEFAULT, *VARIANTS.get(family.name, {})]


def build(family: Family, variant: str = DEFAULT, seed: int = 0) -> PreTrainedModel:
    """Returns a random model of a class; the same seed gives the same weights.

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
    if implementation := attention_of(config):
        model.set_attn_implementation(implementation)
    _scatter(model, seed)
    # No token is special to ``generate``, which takes ends and lengths from here.
    kept: Any = model.generation_config
    kept.use_cache = True
    for name in [name for name in vars(kept) if _SPECIAL.search(name)]:
        setattr(kept, name, None)
    return model


def build_varied(family: Family, variant: str, prompt: list[int]) -> PreTrainedModel:
    """Returns a random model whose text does not repeat a few tokens, if one of the first seeds gives it."""
    for seed in range(_SEEDS):
        model = build(family, variant, seed)
        try:
            varied = len(set(new_tokens_of(model, prompt, 3 * _LEAST_VARIED))) >= _LEAST_VARIED
        except Exception:  # transformers' own generate fails: the trial says so
            break
        if varied:
            break
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
    """Returns random plain ids, the same for the same length."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(PLAIN_TOKENS, (length,), generator=generator).tolist()


def features_of(model: PreTrainedModel) -> str:
    """Returns the kinds of layers of a model, and the lengths and sizes that make it special."""
    config: Any = model.config.get_text_config(decoder=True)
    found = []
    kinds = set(getattr(config, "layer_types", None) or ())
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    found += [f"rope {name}" for name in sorted(ropes - {None, "default"})]
    for name in _FEATURES:
        value = getattr(config, name, None)
        if value and type(value) in (int, float):
            found.append(f"{name} {value:g}")
    return ", ".join([*sorted(kinds - {"full_attention"}), *found])


def new_tokens_of(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Returns the new tokens of greedy decoding by transformers."""
    ids: Tensor = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, use_cache=True
    )
    return out[0, len(prompt) :].tolist()
