"""Tiny random models of many transformers families, in fp32."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

VOCABULARY = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Large enough that random models do not repeat one token.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}

# name -> (configuration class, model class, settings)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-gqa": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-mqa": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-yarn": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _YARN}),
    "llama3-rope": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            # Some releases of transformers choose sdpa, which ignores the softcap.
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}

# Short and long frequencies, for up to 64 tokens and beyond; a head of 8 has four, half rotated two.
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
}
_HALF = {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1], "long_factor": [2.0, 6.0]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Families whose rotary frequencies depend on the sequence length.
FAMILIES_BY_LENGTH: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi3-longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"sliding_window": 4096, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi4-mini": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "sliding_window": None,
            "rope_parameters": {**_LONGROPE, **_HALF},
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-longrope": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": _LONGROPE}),
    "phimoe": (
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {
            "sliding_window": None,
            "rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
            **_EXPERTS,
        },
    ),
    "llama-dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
        },
    ),
}

_HEAD = {"head_dim": 8}
_WINDOW = {"sliding_window": 40}
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_MINISTRAL_3 = {
    **_YARN,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Families with windows of 40 tokens, or with a length beyond which something else changes.
FAMILIES_BEYOND: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ministral": ("MinistralConfig", "MinistralForCausalLM", _HEAD | _WINDOW),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", _HEAD | {"rope_parameters": _MINISTRAL_3}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _WINDOW),
    "command-r7b": ("Cohere2Config", "Cohere2ForCausalLM", _HEAD | _WINDOW),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _HEAD | _WINDOW),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen2.5-yarn": ("Qwen2Config", "Qwen2ForCausalLM", {"rope_parameters": _YARN}),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_HEAD, **_WINDOW, **_EXPERTS, "intermediate_size": 32},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **_HEAD,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "attention_chunk_size": 40,
            "floor_scale": 30,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_HEAD,
            **_WINDOW,
            **_PER_LAYER,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
    ),
}


def tiny(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Returns a random model of a family; the same seed gives the same weights."""
    config_name, model_name, own = {**FAMILIES, **FAMILIES_BY_LENGTH, **FAMILIES_BEYOND}[family]
    return build(config_name, model_name, seed, **{**_COMMON, **own, **overrides})


def small(config_name: str, model_name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Returns a random model of any transformers class, of the same small sizes as the families."""
    return build(config_name, model_name, seed, **{**_COMMON, **settings})


def build(config_name: str, model_name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Returns a random model of any transformers class, with only the settings given."""
    config = getattr(hf, config_name)(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(hf, model_name)(config)
    return model.float().eval()


_FULL = {"layer_types": ["full_attention"] * 2}
# Softcapped scores, and attention sinks, without the windows that these families usually have.
CAPPED: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma2": lambda: tiny("gemma2", **_FULL),
    "gpt-oss": lambda: build(
        "GptOssConfig",
        "GptOssForCausalLM",
        **{**_COMMON, **_FULL, "intermediate_size": 32, "head_dim": 8},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}


def perturbed(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """Returns a copy with noise of relative size ``noise`` on its weights: a draft that is often accepted."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            drawn = torch.randn(weight.shape, generator=generator).to(weight.device)
            weight += noise * weight.abs().mean() * drawn
    return other


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int, **kwargs: Any) -> list[int]:
    """Returns the new tokens of greedy decoding by transformers."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, do_sample=False, max_new_tokens=new_tokens, **kwargs)
    return out[0, len(prompt) :].tolist()


def _rounded(x: Tensor) -> Tensor:
    """Each vector to multiples of a 127th of its largest magnitude."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / step) * step


def _over_rounded(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Any:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, q, _rounded(k), _rounded(v), mask, **how)


def with_rounded_kv(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' own model, which attends to keys and values in 8 bits."""
    AttentionInterface.register("rounded_kv", _over_rounded)
    AttentionMaskInterface.register("rounded_kv", eager_mask)
    made = copy.deepcopy(model)
    made.set_attn_implementation("rounded_kv")
    return made


def prompt_of(length: int, vocab_size: int = VOCABULARY) -> list[int]:
    """Returns random token ids, the same for the same length."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


# Relative to the logits' standard deviation, in fp32: sums over more terms, in another order.
INFLATED_TOLERANCE = 1e-4


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].float()


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().max() / exact.std())


# Settings with which a short prompt uses all three levels.
SMALL_SETTINGS = {
    "gamma": 3,
    "tree": "best-first:3,2,1",
    "budget": 24,
    "chunk": 4,
    "recent": 8,
    "sinks": 2,
    "window": 6,
    "prefill_chunk": 16,
    # Fixed, as the policy would turn drafting off on a small model.
    "rounds": 2,
}


def without_tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings for prompt lookup, whose trees are its own."""
    return {name: value for name, value in settings.items() if name != "tree"}
