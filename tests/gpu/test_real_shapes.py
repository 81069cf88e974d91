"""Models of real widths in bf16, with random weights or quantised, beside plain decoding on the device."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from scripts.inflate.pair import inflate_pair
from tests.support.models.pair_on_gpu import long_text
from triforce_tree import load
from triforce_tree.check.compare import compared
from triforce_tree.config import load_arguments

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPT = 4096
HOW: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
COMMON: dict[str, Any] = {
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
    "max_position_embeddings": 262_144,
}  # fmt: skip
# Few layers, among them one of full attention.
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma-3-12b": (Gemma3TextConfig, {
        "vocab_size": 262_208, "hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
    }),
    "qwen3-30b-a3b": (Qwen3MoeConfig, {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    }),
    # The configuration's own defaults are the shape of the 80B.
    "qwen3-next-80b-a3b": (Qwen3NextConfig, {"num_hidden_layers": 4}),
}  # fmt: skip
DRAFT: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 1024, "head_dim": 128,
}  # fmt: skip
ON_HOST: dict[str, dict[str, Any]] = {
    "nothing": {}, "cache": {"offload": True}, "weights": {"offload_weights": True, "device": "cuda"},
}  # fmt: skip


def random_model(config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return model


@pytest.mark.parametrize("on_host", ON_HOST)
@pytest.mark.parametrize("shape", SHAPES)
def test_text_of_random_weights(shape: str, on_host: str) -> None:
    kind, sizes = SHAPES[shape]
    config = kind(**COMMON | sizes)
    target = random_model(config, 0)
    draft = random_model(Qwen3Config(**COMMON | DRAFT | {"vocab_size": config.vocab_size}), 1)
    prompt = torch.randint(config.vocab_size, (PROMPT,)).tolist()
    whole = load(target, draft, levels=1)
    expected = whole.generate(prompt, **HOW)
    whole.close()
    engine = load(target, draft, **load_arguments({"budget": 1024, "recent": 128, **ON_HOST[on_host]}))
    for levels in (1, 2):
        own = engine.with_options(levels=levels)
        found = compared(own, prompt, own.generate(prompt, **HOW), expected, True)
        assert not found.failed, (levels, found.verdict())
        # The next program is planned when the graphs and buffers of this one are free.
        own.release()
    engine.close()


def _bitsandbytes(bits: int) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        bnb = pytest.importorskip("bitsandbytes")
        sizes = (linear.in_features, linear.out_features)
        weight, device = linear.weight.data, linear.weight.device
        if bits == 4:
            made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype, quant_type="nf4")
            made.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
        else:
            made = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
            made.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        quantised: nn.Module = made.to(device).eval()
        return quantised

    return make


def _torchao(name: str, **settings: Any) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(linear, getattr(torchao, name)(**settings))
        return linear

    return make


METHODS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "bnb4": _bitsandbytes(4),
    "bnb8": _bitsandbytes(8),
    "int8": _torchao("Int8WeightOnlyConfig"),
    "int4": _torchao("Int4WeightOnlyConfig", group_size=128),
    "float8": _torchao("Float8WeightOnlyConfig"),
    "float8-inputs": _torchao("Float8DynamicActivationFloat8WeightConfig"),
}


def linears(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                yield module, name, child


@pytest.mark.parametrize("method", METHODS)
def test_text_of_a_quantised_target(method: str) -> None:
    """The target is the embedded one, inflated to 8B: drafts are accepted as a trained model's are."""
    target, draft, tokenizer = inflate_pair("llama-3.1-8b", "cuda", torch.bfloat16)
    for module, name, linear in linears(target):
        setattr(module, name, METHODS[method](linear))
    target.is_quantized = True
    prompt = long_text()[:PROMPT]
    engine = load(target, draft, tokenizer=tokenizer, levels=3, kv_bits=8)
    out = engine.generate(prompt, **HOW)
    plain = engine.with_options(levels=1).generate(prompt, **HOW)
    found = compared(engine, prompt, out, plain, True)
    assert not found.failed, found.verdict()
    assert sum(level.accepted for level in out.levels or []) > 0
    engine.close()
