"""Folders with random block drafters for a target, in their published formats."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.drafters.blocks.drafter import BlockDrafter

LAYERS = 2


def block_folder(
    folder: Path,
    target: PreTrainedModel,
    inputs: tuple[int, ...] = (1, 0),
    block: int = 4,
    extra: dict[str, tuple[int, ...]] | None = None,
    dflash: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Writes a random drafter of two layers with two query heads to a KV head, as z-lab does.

    Args:
        extra: shapes of more tensors.
        dflash: more fields of ``dflash_config``.
        settings: more fields of ``config.json``.
    """
    size, vocabulary = target.config.hidden_size, target.config.vocab_size
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": size,
        "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocabulary, "rms_norm_eps": 1e-5,
        "rope_theta": 100.0, "hidden_act": "silu", "max_position_embeddings": 64, "attention_bias": False,
        "block_size": block, "num_target_layers": target.config.num_hidden_layers,
        "dflash_config": {"mask_token_id": vocabulary - 1, "target_layer_ids": [*inputs], **(dflash or {})},
        **settings,
    }  # fmt: skip
    return _written(folder, config, _weights(config, len(inputs), extra))


def muse_folder(
    folder: Path, target: PreTrainedModel, inputs: tuple[int, ...] = (1, 0), **settings: Any
) -> Path:
    """Writes a random drafter as transformers saves a ``MuseGlimmerAssistantModel``."""
    size = target.config.hidden_size
    config = {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
        "hidden_size": size, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "block_size": 4,
        "mask_token_id": target.config.vocab_size - 1, "target_layer_ids": [*inputs], **settings,
    }  # fmt: skip
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = _weights(config, len(inputs), None)
    return _written(folder, config, {names.get(name, name): tensor for name, tensor in weights.items()})


def _weights(
    config: dict[str, Any], inputs: int, extra: dict[str, tuple[int, ...]] | None
) -> dict[str, Tensor]:
    size, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, inputs * size), "hidden_norm.weight": (size,), "norm.weight": (size,)
    }  # fmt: skip
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (size,)), ("post_attention_layernorm", (size,)),
                ("self_attn.q_proj", (heads, size)), ("self_attn.k_proj", (kv_heads, size)),
                ("self_attn.v_proj", (kv_heads, size)), ("self_attn.o_proj", (size, heads)),
                ("self_attn.q_norm", (head,)), ("self_attn.k_norm", (head,)),
                ("mlp.gate_proj", (middle, size)), ("mlp.up_proj", (middle, size)),
                ("mlp.down_proj", (size, middle)),
            )
        }  # fmt: skip
        if config.get("attention_bias"):
            widths = {"q": heads, "k": kv_heads, "v": kv_heads, "o": size}
            shapes |= {f"layers.{i}.self_attn.{x}_proj.bias": (width,) for x, width in widths.items()}
    random = torch.Generator().manual_seed(9)
    weights = {}
    for name, shape in {**shapes, **(extra or {})}.items():
        drawn = torch.randn(shape, generator=random)
        weights[name] = 1 + 0.3 * drawn if "norm" in name else drawn * 2 / shape[-1] ** 0.5
    return weights


def _written(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def block(
    target: PreTrainedModel, tree: str, sinks: int | None = 1, window: int | None = 6, **how: Any
) -> BlockDrafter:
    """Returns a random drafter for a target; ``how``: of :func:`block_folder`."""
    with TemporaryDirectory() as folder:
        return BlockDrafter(block_folder(Path(folder), target, **how), tree, sinks, window)
