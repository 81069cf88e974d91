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
        dflash: more fields of ``dflash_config``; with ``selector_rank`` it becomes DFlash2.
        settings: more fields of ``config.json``.
    """
    vocabulary = target.config.vocab_size
    inner = {"mask_token_id": vocabulary - 1, "target_layer_ids": [*inputs], **(dflash or {})}
    kind = "DFlash2DraftModel" if "selector_rank" in inner else "DFlashDraftModel"
    config = {**_config(target, kind, block), "dflash_config": inner, **settings}
    return _written(folder, config, _weights({**config, **inner}, len(inputs), extra))


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
"""Fields of ``dflash_config``."""


def spark_folder(
    folder: Path,
    target: PreTrainedModel,
    inputs: tuple[int, ...] = (1, 0),
    block: int = 3,
    kind: str | None = "vanilla",
    own: bool = True,
    **settings: Any,
) -> Path:
    """Writes a random drafter as DeepSpec does.

    Args:
        kind: of the Markov head; None for a DFlash drafter of DeepSpec.
        own: whether embeddings and head are the drafter's own; else they are copies of the target's.
    """
    vocabulary = target.config.vocab_size
    config = {
        **_config(target, "Qwen3DSparkModel", block), "mask_token_id": vocabulary - 1,
        "target_layer_ids": [*inputs], "num_anchors": 512, "markov_rank": 6 if kind else 0,
        "enable_confidence_head": bool(kind), "confidence_head_with_markov": True,
        "layer_types": ["full_attention"] * LAYERS, **settings,
    }  # fmt: skip
    if kind:
        config["markov_head_type"] = kind
    weights = _weights({**config, "drafted": vocabulary}, len(inputs), None)
    if not own:
        weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        weights["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return _written(folder, config, weights)


def speculators_folder(
    folder: Path,
    target: PreTrainedModel,
    inputs: tuple[int, ...] = (1, 2),
    block: int = 4,
    drafted: int = 40,
    kind: str | None = None,
    layers: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Writes a random drafter with a draft vocabulary as vllm-project/speculators does.

    Args:
        inputs: the layers whose inputs are read.
        drafted: size of the draft vocabulary.
        kind: of the Markov head of DSpark; None for DFlash.
        layers: more fields of ``transformer_layer_config``.
    """
    name, vocabulary = "dspark" if kind else "dflash", target.config.vocab_size
    nested = {**_config(target, "Qwen3ForCausalLM", block), **(layers or {})}
    del nested["block_size"], nested["num_target_layers"]
    config = {
        "architectures": ["DSparkSpeculator" if kind else "DFlashSpeculator"], "block_size": block,
        "speculators_model_type": name, "speculators_version": "0.6.0", "draft_vocab_size": drafted,
        "speculators_config": {"algorithm": name}, "aux_hidden_state_layer_ids": [*inputs],
        "mask_token_id": vocabulary - 1, "sample_from_anchor": bool(kind), "sliding_window_non_causal": False,
        "transformer_layer_config": nested, **settings,
    }  # fmt: skip
    if kind:
        config |= {"markov_rank": 6, "markov_head_type": kind, "enable_confidence_head": False}
    weights = _weights({**nested, **config, "drafted": drafted}, len(inputs), None)
    ids = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(3))[:drafted].sort().values
    weights["d2t"] = ids - torch.arange(drafted)
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).scatter_(0, ids, True)
    return _written(folder, config, weights)


def muse_folder(
    folder: Path, target: PreTrainedModel, inputs: tuple[int, ...] = (1, 0), **settings: Any
) -> Path:
    """Writes a random drafter as transformers saves a ``MuseGlimmerAssistantModel``."""
    config = {
        **_config(target, "MuseGlimmerAssistantModel", 4), "model_type": "muse_glimmer_assistant",
        "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "mask_token_id": target.config.vocab_size - 1, "target_layer_ids": [*inputs], **settings,
    }  # fmt: skip
    del config["rope_theta"], config["num_target_layers"], config["attention_bias"]
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = _weights(config, len(inputs), None)
    return _written(folder, config, {names.get(name, name): tensor for name, tensor in weights.items()})


def _config(target: PreTrainedModel, architecture: str, block: int) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": "qwen3", "hidden_size": target.config.hidden_size,
        "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": target.config.vocab_size, "rms_norm_eps": 1e-5,
        "rope_theta": 100.0, "hidden_act": "silu", "max_position_embeddings": 64, "attention_bias": False,
        "block_size": block, "num_target_layers": target.config.num_hidden_layers,
    }  # fmt: skip


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
        for part in ("attention_conv", "mlp_conv") if (taps := config.get("conv_kernel_size")) else ():
            groups = size // config["conv_group_size"]
            shapes[f"layers.{i}.{part}.base_kernel"] = (2, taps, size)
            shapes[f"layers.{i}.{part}.kernel_projection.weight"] = (2 * taps * groups, size)
    vocabulary = config["vocab_size"]
    if (drafted := config.get("drafted")) is not None:
        shapes |= {"embed_tokens.weight": (vocabulary, size), "lm_head.weight": (drafted, size)}
    if rank := config.get("selector_rank"):
        shapes |= {
            "candidate_selector.predecessor_codebook": (vocabulary, rank),
            "candidate_selector.successor_codebook": (vocabulary, rank),
            "candidate_selector.hidden_projection.weight": (rank, size),
        }
    if rank := config.get("markov_rank"):
        parts: dict[str, tuple[int, ...]] = {
            "markov_w1.weight": (vocabulary, rank), "markov_w2.weight": (drafted or vocabulary, rank)
        }  # fmt: skip
        if config["markov_head_type"] == "gated":
            parts |= {"gate_proj.weight": (rank, size + rank), "gate_proj.bias": (rank,)}
        elif config["markov_head_type"] == "rnn":
            parts |= {"joint_proj.weight": (3 * rank, 2 * rank + size), "joint_proj.bias": (3 * rank,)}
        shapes |= {f"markov_head.{name}": shape for name, shape in parts.items()}
        if config.get("enable_confidence_head"):
            shapes |= {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
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
    target: PreTrainedModel,
    tree: str,
    sinks: int | None = 1,
    window: int | None = 6,
    folder: Any = block_folder,
    **how: Any,
) -> BlockDrafter:
    """Returns a random drafter for a target; ``how``: of ``folder``, one of the functions above."""
    with TemporaryDirectory() as path:
        return BlockDrafter(folder(Path(path), target, **how), tree, sinks, window)
