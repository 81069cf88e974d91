"""Folders with random Medusa heads and EAGLE-3 heads for a target, in their published formats."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.drafters.heads.eagle import Eagle3
from triforce_tree.drafters.heads.medusa import Medusa


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def medusa_folder(
    folder: Path,
    target: PreTrainedModel,
    heads: int = 3,
    layers: int = 1,
    tied: bool = False,
    pickled: bool = False,
    prefix: str = "",
) -> Path:
    """Heads of ``layers`` residual blocks each; ``tied``: without a vocabulary of their own."""
    size, vocabulary, random = target.config.hidden_size, target.config.vocab_size, _generator(7)
    weights: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            weights[f"{prefix}{head}.{layer}.linear.weight"] = torch.randn(size, size, generator=random) / 2
            weights[f"{prefix}{head}.{layer}.linear.bias"] = torch.randn(size, generator=random)
        if not tied:
            last = torch.randn(vocabulary, size, generator=random) / size**0.5
            weights[f"{prefix}{head}.{layers}.weight"] = last
    folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "none"}
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        save_file(weights, folder / "medusa_lm_head.safetensors")
    return folder


def eagle_folder(
    folder: Path,
    target: PreTrainedModel,
    draft_vocabulary: int | None = None,
    pickled: bool = False,
    embeddings: bool = False,
    inputs: tuple[int, ...] = (1, 2, 2),
    **settings: Any,
) -> Path:
    """A head with two query heads to a KV head; without ``draft_vocabulary`` it has the target's own head."""
    size, vocabulary, random = target.config.hidden_size, target.config.vocab_size, _generator(8)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
        "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": vocabulary, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "hidden_act": "silu",
        "max_position_embeddings": 64, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*inputs]},
        **settings,
    }  # fmt: skip
    heads, kv_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * 2 / columns**0.5

    def gains() -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=random)

    middle = config["intermediate_size"]
    weights = {
        "fc.weight": matrix(size, 3 * size),
        "midlayer.self_attn.q_proj.weight": matrix(heads * head, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * head, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * head, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, heads * head),
        "midlayer.mlp.gate_proj.weight": matrix(middle, size),
        "midlayer.mlp.up_proj.weight": matrix(middle, size),
        "midlayer.mlp.down_proj.weight": matrix(size, middle),
        "midlayer.input_layernorm.weight": gains(),
        "midlayer.hidden_norm.weight": gains(),
        "midlayer.post_attention_layernorm.weight": gains(),
        "norm.weight": gains(),
    }
    if embeddings:
        weights["embed_tokens.weight"] = matrix(vocabulary, size)
    if draft_vocabulary is not None:
        config["draft_vocab_size"] = draft_vocabulary
        weights["lm_head.weight"] = matrix(draft_vocabulary, size)
        ids = torch.randperm(vocabulary, generator=random)[:draft_vocabulary].sort().values
        weights["d2t"] = ids - torch.arange(draft_vocabulary)
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).scatter_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def medusa(target: PreTrainedModel, tree: str, **how: Any) -> Medusa:
    """Random heads for a target; ``how``: of :func:`medusa_folder`."""
    with TemporaryDirectory() as folder:
        return Medusa(medusa_folder(Path(folder), target, **how), tree)


def eagle(target: PreTrainedModel, tree: str, sinks: int = 1, window: int = 6, **how: Any) -> Eagle3:
    """A random head for a target; ``how``: of :func:`eagle_folder`."""
    with TemporaryDirectory() as folder:
        return Eagle3(eagle_folder(Path(folder), target, **how), tree, sinks, window)
