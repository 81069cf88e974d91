"""Random Medusa heads, EAGLE-3 heads and MTP layers for a target; heads in folders of published formats."""

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, modeling_layers

from triforce_tree.drafters.heads.eagle import Eagle3
from triforce_tree.drafters.heads.medusa import Medusa
from triforce_tree.drafters.heads.pairs import PairDrafter
from triforce_tree.drafters.registry import MASK_TOKENS, trained_drafter

MTP = hasattr(getattr(modeling_layers, "MtpModel", None), "get_weight_conversions")
"""Whether transformers reads the MTP layers of checkpoints."""


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
    speculators: bool = False,
    extra: dict[str, tuple[int, ...]] | None = None,
    **settings: Any,
) -> Path:
    """Writes a random head with two query heads to a KV head.

    Args:
        draft_vocabulary: its size; None for the target's own head and vocabulary.
        speculators: write the layout of vllm-project/speculators instead of SafeAILab's.
        extra: shapes of more tensors.
        settings: fields of ``config.json``; norms, and the state of a mask token, are written as they demand.
    """
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

    def layer(name: str, width: int) -> dict[str, Tensor]:
        middle = config["intermediate_size"]
        rows = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
        made = {f"{name}self_attn.{x}_proj.weight": matrix(count, width) for x, count in rows.items()}
        made |= {
            f"{name}self_attn.o_proj.weight": matrix(size, heads * head),
            f"{name}mlp.gate_proj.weight": matrix(middle, size),
            f"{name}mlp.up_proj.weight": matrix(middle, size),
            f"{name}mlp.down_proj.weight": matrix(size, middle),
            f"{name}input_layernorm.weight": gains(),
            f"{name}post_attention_layernorm.weight": gains(),
        }
        if config["model_type"] == "qwen3":
            for x in "qk":
                gain = 1 + 0.3 * torch.randn(head, generator=random)
                made[f"{name}self_attn.{x}_norm.weight"] = gain
        return made

    weights = {
        "fc.weight": matrix(size, len(inputs) * size), **layer("midlayer.", 2 * size),
        "midlayer.hidden_norm.weight": gains(), "norm.weight": gains(),
    }  # fmt: skip
    for number in range(1, config.get("num_hidden_layers", 1)):
        weights |= layer(f"layers.{number}.", size)
    if config.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": gains() for i in range(len(inputs))}
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = 1 + 0.3 * torch.randn(len(inputs) * size, generator=random)
    if any(name in config for name in MASK_TOKENS):
        weights["mask_hidden"] = torch.randn(1, *[1] * speculators, len(inputs) * size, generator=random)
    for name, shape in (extra or {}).items():
        weights[name] = torch.randn(*shape, generator=random)
    if embeddings:
        weights["embed_tokens.weight"] = matrix(vocabulary, size)
    if draft_vocabulary is not None:
        config["draft_vocab_size"] = draft_vocabulary
        weights["lm_head.weight"] = matrix(draft_vocabulary, size)
        ids = torch.randperm(vocabulary, generator=random)[:draft_vocabulary].sort().values
        weights["d2t"] = ids - torch.arange(draft_vocabulary)
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).scatter_(0, ids, True)
    if speculators:
        config, weights = _as_speculators(config, weights)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def _as_speculators(
    config: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    outer = (
        "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size", "para_num",
        "down_sample_ratio", "ptd_token_id",
    )  # fmt: skip
    layer = {
        name: value for name, value in config.items() if name not in (*outer, "architectures", "eagle_config")
    }
    inputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "peagle" if "ptd_token_id" in config else "eagle3",
        "speculators_version": "0.6.0", "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": {"num_hidden_layers": 1, **layer},
        "target_hidden_size": config["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": inputs, "embed_requires_grad": False,
        **{name: config[name] for name in outer if name in config},
    }  # fmt: skip
    return nested, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}


def medusa(target: PreTrainedModel, tree: str, **how: Any) -> Medusa:
    """Returns random heads for a target; ``how``: of :func:`medusa_folder`."""
    with TemporaryDirectory() as folder:
        return Medusa(medusa_folder(Path(folder), target, **how), tree)


def eagle(target: PreTrainedModel, tree: str, sinks: int = 1, window: int = 6, **how: Any) -> Eagle3:
    """Returns a random head for a target; ``how``: of :func:`eagle_folder`."""
    with TemporaryDirectory() as folder:
        head = eagle_folder(Path(folder), target, **how)
        drafter = trained_drafter(head, {"tree": tree, "sinks": sinks, "window": window})
    assert isinstance(drafter, Eagle3)
    return drafter


def mtp(target: PreTrainedModel, tree: str, layers: int = 1, sinks: int = 1, window: int = 6) -> PairDrafter:
    """Returns ``layers`` random MTP layers of a target's family. Skips the test without a class for them."""
    if not MTP:
        pytest.skip("this release of transformers reads no MTP layers")
    from triforce_tree.drafters.heads.mtp import MtpNetwork
    from triforce_tree.loading.mtp_checkpoint import empty_mtp_layers

    config: Any = copy.deepcopy(target.config)
    config.num_mtp_layers = layers
    model = empty_mtp_layers(target, config)
    random = _generator(9)
    for parameter in model.layers.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.data = 1 + 0.3 * noise if noise.dim() == 1 else noise / parameter.shape[1] ** 0.5
    return PairDrafter(
        "mtp", lambda to: MtpNetwork(model.to(to.device), to, "a test"), tree, sinks, window, ()
    )
