"""Tiny random checkpoints with MTP layers, in the layouts in which they are published."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 2048, "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_nope_head_dim": 8,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1,
}  # fmt: skip
_FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
}  # fmt: skip

# The joining matrix and the norms of MTP layers numbered after the model's own layers, or below ``mtp.``.
NUMBERED = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
NAMED = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# name -> (configuration class, model class, settings)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT | _EXPERTS),
    "glm4-moe": (
        "Glm4MoeConfig", "Glm4MoeForCausalLM",
        _EXPERTS | {"num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _LATENT | _EXPERTS),
    "bailing-hybrid": (
        "BailingHybridConfig", "BailingHybridForCausalLM",
        {
            **_LATENT, **_EXPERTS, "num_local_experts": 8, "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"], "mtp_layer_types": ["full_attention"],
            "mtp_mlp_layer_types": ["sparse"],
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _HYBRID | _FEW_EXPERTS),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HYBRID),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _HYBRID | _FEW_EXPERTS),
    "mellum": (
        "MellumConfig", "MellumForCausalLM",
        {
            "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip


def mtp_checkpoint(
    folder: Path, family: str, layers: int = 1, extra: dict[str, Tensor] | None = None, **settings: Any
) -> PreTrainedModel:
    """Writes a random target with MTP layers, and returns the target as transformers loads it.

    Args:
        layers: the number of MTP layers.
        extra: further tensors, or others in the place of written ones.
        settings: fields of its configuration.
    """
    config_class, model_class, own = FAMILIES[family]
    random = torch.Generator().manual_seed(11)
    torch.manual_seed(0)
    named = family.startswith("qwen") or family == "mellum"
    count = {} if family.startswith("qwen") else {"num_nextn_predict_layers": layers}
    config = getattr(hf, config_class)(**{**_SIZES, "num_hidden_layers": 2, **own, **count, **settings})
    model = getattr(hf, model_class)(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    size = config.hidden_size
    last = {n.split("layers.1.")[1]: t for n, t in weights.items() if n.startswith("model.layers.1.")}

    def gains() -> Tensor:
        return last["input_layernorm.weight"] + 0.3 * torch.randn(size, generator=random)

    for layer in range(layers):
        block = {n: t + 0.2 * torch.randn(t.shape, generator=random) for n, t in last.items()}
        joined = torch.randn(size, 2 * size, generator=random) / size**0.5
        if named:
            weights |= {f"mtp.layers.{layer}.{name}": tensor for name, tensor in block.items()}
            weights |= {
                "mtp.fc.weight": joined, "mtp.norm.weight": gains(),
                "mtp.pre_fc_norm_embedding.weight": gains(), "mtp.pre_fc_norm_hidden.weight": gains(),
            }  # fmt: skip
            continue
        block |= {
            "eh_proj.weight": joined, "enorm.weight": gains(), "hnorm.weight": gains(),
            "shared_head.norm.weight": gains(),
            "embed_tokens.weight": model.get_input_embeddings().weight.detach().clone(),
            "shared_head.head.weight": weights["lm_head.weight"].clone(),
        }  # fmt: skip
        weights |= {f"model.layers.{2 + layer}.{name}": tensor for name, tensor in block.items()}
    weights |= extra or {}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(loaded, PreTrainedModel)
    return loaded


_STEP: dict[str, Any] = {
    **{name: value for name, value in _SIZES.items() if value is not None}, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "share_expert_dim": 16, "sliding_window": 24, "num_nextn_predict_layers": 3,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    "mlp_layer_types": ["sparse", *["dense"] * 4], "rope_theta": [10_000.0] * 5,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
}  # fmt: skip
_MROPE = {
    "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
}  # fmt: skip
# name -> (class without its ending, settings of text, of images, prefix of the last layer and of MTP layers)
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str]] = {
    "qwen3.5": (
        "Qwen3_5", {**_SIZES, **_HYBRID, "num_hidden_layers": 2, "rope_parameters": _MROPE},
        {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "num_position_embeddings": 16,
        },
        "model.language_model.layers.1.", "mtp.layers.{}.",
    ),
    "step-3.7": (
        "Step3p7", _STEP,
        {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
            "mlp_ratio": 2.0,
        },
        "model.layers.1.", "model.layers.{}.",
    ),
}  # fmt: skip


def multimodal_mtp_checkpoint(folder: Path, family: str) -> PreTrainedModel:
    """Writes a random target of images and text with MTP layers, three for Step-3.7, and returns it as
    transformers loads it.
    """
    name, text, vision, last, place = MULTIMODAL[family]
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    getattr(hf, f"{name}ForConditionalGeneration")(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    numbers, (joined, *norms), below = [2, 3, 4], NUMBERED, ""
    if family == "qwen3.5":
        numbers, (joined, *norms), below = [0], NAMED, "mtp."
    for number in numbers:
        prefix = place.format(number)
        block = {n.removeprefix(last): t for n, t in weights.items() if n.startswith(last)}
        weights |= {f"{prefix}{n}": t + 0.2 * torch.randn(t.shape) for n, t in block.items()}
        size = text["hidden_size"]
        weights[f"{below or prefix}{joined}.weight"] = torch.randn(size, 2 * size) / size**0.5
        weights |= {f"{below or prefix}{norm}.weight": torch.randn(size) / 3 for norm in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(loaded, PreTrainedModel)
    return loaded


def sharded(folder: Path) -> None:
    """Splits the weights of a checkpoint into two files with an index; MTP layers are in both."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    content = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
