"""Refuses models that cannot be decoded with explicit KV caches, by their configuration and placement."""

from typing import Any

from torch import nn

_RECURRENT = {"linear_attention", "mamba", "mamba2", "recurrent", "conv"}


class UnsupportedModelError(ValueError):
    """The model cannot be decoded with explicit KV caches; the message has its class and the reason."""


def refuse_unsupported(model: nn.Module) -> None:
    """Check a transformers model before its first forward.

    Raises:
        UnsupportedModelError: it is an encoder-decoder, keeps state other than keys and values, restricts
            attention by a mask that attention functions do not receive, or is spread over devices.
    """
    config: Any = model.config
    text_config = config.get_text_config(decoder=True)
    reason = (
        _architecture(model, config, text_config)
        or _chunks(text_config)
        or _temperature(model, text_config)
        or _placement(model)
    )
    if reason:
        raise UnsupportedModelError(f"{type(model).__name__} {reason}")


def _architecture(model: nn.Module, config: Any, text_config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model; hierarchical decoding needs a causal LM"
    recurrent = sorted(set(getattr(text_config, "layer_types", None) or []) & _RECURRENT)
    named = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if not recurrent and "mamba" in named:
        recurrent = ["mamba"]
    if recurrent:
        return (
            f"keeps recurrent state ({', '.join(recurrent)} layers), which cannot be rolled back to a node "
            "of a token tree"
        )
    if getattr(text_config, "index_topk", None):
        return (
            f"attends to {text_config.index_topk} tokens that an indexer chooses (sparse attention); the "
            "indexer's keys need a cache of their own, which is not supported"
        )
    return None


def _chunks(text_config: Any) -> str | None:
    """Chunked attention exists in the mask only, which transformers does not make for our attention."""
    chunk = getattr(text_config, "attention_chunk_size", None)
    kinds = getattr(text_config, "layer_types", None)
    if chunk is None or (kinds and "chunked_attention" not in kinds):
        return None
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is not None and chunk >= limit:
        return None
    return (
        f"attends within chunks of {chunk} tokens (chunked_attention), which is not supported for its "
        f"{limit} positions; a configuration with max_position_embeddings<={chunk} has one chunk"
    )


def _temperature(model: nn.Module, text_config: Any) -> str | None:
    """Llama 4 takes the positions for this scale from the cache length, which is wrong for tree nodes."""
    scale = getattr(text_config, "floor_scale", None)
    limit = getattr(text_config, "max_position_embeddings", None)
    if scale is None or not getattr(text_config, "attn_temperature_tuning", False):
        return None
    if limit is not None and limit < scale:
        return None
    return (
        f"scales its queries from position {scale - 1} on (attn_temperature_tuning), which is not supported "
        f"for its {limit} positions; use max_position_embeddings<{scale}"
    )


def _placement(model: nn.Module) -> str | None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(weight.device) for weight in model.parameters()}
    if len(places) > 1 or "disk" in places:
        return (
            f"is spread over {', '.join(sorted(places))} (hf_device_map), but a level runs on one device; "
            "use triforce_tree.load, which gathers plain weights, or load it without device_map"
        )
    if "meta" in devices:
        return "has weights without data (meta tensors); load it with its weights, and without device_map"
    if len(devices) > 1:
        return f"has weights on {', '.join(sorted(devices))}, but a level runs on one device; move it to one"
    return None
