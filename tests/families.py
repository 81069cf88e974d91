"""Tiny random models of many transformers families, in fp32."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

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
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}

# name -> (configuration class, model class, own settings)
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
            # Some releases of transformers choose sdpa, and their own text then goes without the cap.
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
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def tiny(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a family; the same seed gives the same weights."""
    config_name, model_name, own = FAMILIES[family]
    return build(config_name, model_name, seed, **{**_COMMON, **own, **overrides})


def build(config_name: str, model_name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model of any transformers class."""
    config = getattr(hf, config_name)(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(hf, model_name)(config)
    return model.float().eval()


_FULL = {"layer_types": ["full_attention"] * 2}
# Softcapped scores, and sinks, without the windows that these families have elsewhere.
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
    """A copy whose weights are off by ``noise`` of their size: a draft that is often right."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += noise * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
    return other


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int, **kwargs: Any) -> list[int]:
    """The new tokens of transformers' own greedy decoding."""
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new_tokens, **kwargs)
    return out[0, len(prompt) :].tolist()


def prompt_of(length: int, vocab_size: int = VOCABULARY) -> list[int]:
    """Random token ids, the same for the same length."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
