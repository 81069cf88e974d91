"""Refuses models that cannot be decoded with explicit KV caches, by their configuration and placement."""

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from triforce_tree.models.adapters import undecodable
from triforce_tree.models.indexers import indexers
from triforce_tree.models.recurrent.mixers import mixers, unknown_mixers

_SOFTCAP = "attn_logit_softcapping"
_PREPARES = "prepare_inputs_for_generation"
# Methods of transformers' own loop, which decoding here passes by, and the packages whose versions of them do
# nothing that text alone needs.
_OF_LOOP = {
    "_sample": "transformers.generation.",
    "_prefill": "transformers.",
    "_update_model_kwargs_for_generation": "transformers.",
}
_RECURRENT = {"linear_attention", "mamba", "mamba2", "recurrent", "conv"}


class UnsupportedModelError(ValueError):
    """The model cannot be decoded with explicit KV caches; the message names its class and the reason."""


def refuse_unsupported(model: nn.Module) -> None:
    """Checks a transformers model before its first forward.

    Raises:
        UnsupportedModelError: it is an encoder-decoder, keeps state other than keys and values, or is spread
            over devices.
    """
    config: Any = model.config
    text_config = config.get_text_config(decoder=True)
    reason = _architecture(model, config, text_config) or _placement(model)
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__} {reason}")
    refuse_adapters(model)


def refuse_adapters(model: nn.Module) -> None:
    """Raises UnsupportedModelError if a model has an adapter of peft that cannot be decoded."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if reason := undecodable(vars(config)):
            raise UnsupportedModelError(f"the adapter {name!r} of {type(model).__name__} {reason}")


def max_positions(text_config: Any) -> int | None:
    """Returns the number of positions of a model, by its configuration, or None if the configuration names
    none.

    Decoders of speech models without their encoder name it ``max_target_positions``. With YaRN the number is
    ``factor`` times the original one, even if the configuration still has the number before the extension.
    """
    for name in ("max_position_embeddings", "max_target_positions"):
        if (positions := getattr(text_config, name, None)) is not None:
            return max(int(positions), _extended(text_config))
    return None


def _extended(text_config: Any) -> int:
    """Returns the number of positions by YaRN's parameters; 0 for other rotary embeddings."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn" or rope.get("factor") is None:
        return 0
    return int(rope["factor"] * rope.get("original_max_position_embeddings", 0))


def attention_of(config: Any) -> str | None:
    """Returns the attention implementation that transformers must use for a checkpoint, or None for its
    default.

    Torch's attention does not cap scores, and some versions of transformers choose it for such checkpoints
    too.
    """
    return "eager" if getattr(config.get_text_config(decoder=True), _SOFTCAP, None) else None


def _architecture(model: nn.Module, config: Any, text_config: Any) -> str | None:
    if isinstance(model, PreTrainedModel) and not model.can_generate():
        return (
            "computes no logits of next tokens (it has no generate()); load it by AutoModelForCausalLM, or "
            "give its folder"
        )
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model; hierarchical decoding needs a causal LM"
    prepares: Any = vars(model).get(_PREPARES)
    if prepares is not None and getattr(prepares, "__func__", None) is not getattr(
        type(model), _PREPARES, None
    ):
        return (
            f"has a {_PREPARES} of its own, by which adapters of peft add to the prompt, and which "
            "decoding here would pass by; use the model's own generate()"
        )
    if _changes_tokens(model):
        return (
            f"changes what its forward gets in a {_PREPARES} of its own, which decoding here would pass by; "
            "do so in its forward, or use the model's own generate()"
        )
    for name, home in _OF_LOOP.items():
        if not getattr(getattr(model, name, None), "__module__", home).startswith(home):
            return (
                f"has its own {name}, which decoding here would pass by; do the same in its forward, or use "
                "the model's own generate()"
            )
    if unknown := sorted(unknown_mixers(model)):
        return (
            f"keeps recurrent state in a way that is not known here ({', '.join(unknown)}), so it cannot be "
            "carried from pass to pass"
        )
    recurrent = sorted(set(getattr(text_config, "layer_types", None) or []) & _RECURRENT)
    if recurrent and not mixers(model):
        return (
            f"keeps recurrent state ({', '.join(recurrent)} layers), but none of its modules is of a known "
            "kind (Mamba, Mamba-2, gated delta rule, Kimi delta attention, short convolution)"
        )
    if getattr(text_config, "index_topk", None) and not indexers(model):
        return (
            f"attends to {text_config.index_topk} tokens that an indexer chooses (sparse attention), in a "
            "way that is not known here: blocks or compressed keys instead of single tokens"
        )
    return None


def _changes_tokens(model: Any) -> bool:
    """Returns whether code that is not of transformers gives a model's forward other tokens than those of
    the text, or embeddings in their place.
    """
    prepares: Any = getattr(type(model), _PREPARES, None)
    if prepares is None or prepares.__module__.startswith("transformers."):
        return False
    ids = torch.tensor([[0, 1]], device=model.device)
    try:
        inputs = prepares(model, ids.clone(), attention_mask=torch.ones_like(ids))
        return inputs.get("inputs_embeds") is not None or not torch.equal(inputs["input_ids"], ids)
    except Exception:  # it needs other arguments, which are those of a release of transformers
        return False


def _placement(model: nn.Module) -> str | None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(weight.device) for weight in model.parameters()}
    offloaded = "meta" in devices and any("_hf_hook" in vars(module) for module in model.modules())
    if len(places) > 1 or "disk" in places or offloaded:
        where = (
            f"spread over {', '.join(sorted(places))} (hf_device_map)"
            if places
            else "offloaded by accelerate"
        )
        return (
            f"is {where}, but a level runs on one device; use triforce_tree.load, which gathers plain "
            "weights, or load it without device_map"
        )
    if "meta" in devices:
        return "has weights without data (meta tensors); load it with its weights"
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        return f"has buffers without data ({empty[0]} is a meta tensor); load it by from_pretrained"
    if len(devices) > 1:
        return f"has weights on {', '.join(sorted(devices))}, but a level runs on one device; move it to one"
    return None


def likely_cause(model: Any, attention: Iterable[nn.Module]) -> str:
    """Returns why a model's own forward may differ from ours, if there is an evident reason; else an empty
    string.

    Args:
        model: a model of transformers.
        attention: modules that called our attention function.
    """
    if hasattr(model, "_original_forward"):
        return (
            "accelerate runs its forward in autocast (mixed_precision); give "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    if any("quantized.dynamic" in type(module).__module__ for module in model.modules()):
        return (
            "torch's dynamic quantisation scales the inputs of a layer by all tokens of a forward, so that a "
            "token's logits depend on the others; give the model before quantize_dynamic"
        )
    if any(getattr(module, "is_causal", True) is False for module in attention):
        return "it attends in both directions, as an encoder does"
    if attention_of(config := model.config) and config._attn_implementation == "sdpa":
        return (
            f"torch's attention ignores {_SOFTCAP} in this version of transformers; load the model with "
            "attn_implementation='eager'"
        )
    parts = (model, model.base_model, model.get_decoder())
    if not any("position_ids" in inspect.signature(part.forward).parameters for part in parts):
        return "it counts positions by the length of transformers' cache, and takes no position_ids"
    return ""


def refuse_without_attention(name: str) -> NoReturn:
    """Raises UnsupportedModelError, because all layers of a model are recurrent."""
    raise UnsupportedModelError(
        f"{name} has recurrent layers alone; hierarchical decoding needs layers with attention"
    )
