"""Layers of the passes on a GPU that kernels compute completely, without torch.compile."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.kernels.compilations import compiled
from triforce_tree.kernels.ahead import compile_together
from triforce_tree.models.exact.device import ExactLinear
from triforce_tree.models.few_row import FewRowLinear, LowBitLinear, few_row_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.kernel_layers.shared_inputs import share_inputs
from triforce_tree.models.model_copy import decoder_layers
from triforce_tree.models.step_model import StepModel, low_bit_model, step_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FAMILIES: list[Any] = [LlamaConfig, Qwen2Config, Qwen3Config, Gemma2Config, Phi3Config]
SIZES = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def made(config: Any) -> HFModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES), dtype=torch.bfloat16).eval()
    return HFModel(model.to(CUDA))


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
    """Attends causally to the tokens of the forward."""
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(96, (2, tokens), device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    return ids, torch.arange(tokens, device=CUDA).expand(2, -1)


@pytest.mark.parametrize("config", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_logits(config: Any, tokens: int) -> None:
    hf = made(config)
    expected = StepModel(few_row_copy(hf.model))(*inputs(tokens), attend)
    torch._dynamo.utils.counters.clear()
    found = step_model(hf, compiled=True)(*inputs(tokens), attend)
    assert not torch._dynamo.utils.counters["stats"]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("config", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_one_layer_of_each_kind_compiles_the_kernels_of_all(config: Any, tokens: int) -> None:
    step = step_model(made(config), compiled=True)

    def run() -> None:
        step(*inputs(tokens), attend)

    compile_together(run, CUDA)
    with compiled() as names:
        run()
    assert not names
    assert len(decoder_layers(step.model)) == SIZES["num_hidden_layers"]


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits(bits: int) -> None:
    hf = made(LlamaConfig)
    found, plain = (low_bit_model(hf, bits, compiled, ())(*inputs(5), attend) for compiled in (True, False))
    torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02 * float(plain.abs().max()))


def test_other_layers_are_compiled() -> None:
    torch._dynamo.utils.counters.clear()
    step_model(made(CohereConfig), compiled=True)(*inputs(3), attend)
    assert torch._dynamo.utils.counters["stats"]


class Projections(nn.Module):
    def __init__(self, make: Any, bias: bool) -> None:
        super().__init__()
        for name, outs in (("q_proj", 256), ("k_proj", 64), ("v_proj", 64)):
            linear = nn.Linear(128, outs, bias=bias, device=CUDA, dtype=torch.bfloat16)
            setattr(self, name, make(linear.requires_grad_(False)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_layers_of_one_input(bits: int, bias: bool) -> None:
    module: Any = Projections(FewRowLinear if bits == 16 else lambda own: LowBitLinear(own, bits), bias)
    x, other = torch.randn(2, 3, 5, 128, device=CUDA, dtype=torch.bfloat16)
    many = torch.randn(1, 4000, 128, device=CUDA, dtype=torch.bfloat16)
    given = [(x, x, x), (x, other, x), (other, other, x), (many, many, many), (many, x, x), (x, x, x)]
    layers = module.q_proj, module.k_proj, module.v_proj
    expected = [[layer(own) for layer, own in zip(layers, each, strict=True)] for each in given]
    share_inputs(module)
    for each, wanted in zip(given, expected, strict=True):
        for layer, own, out in zip(layers, each, wanted, strict=True):
            torch.testing.assert_close(layer(own), out)


@pytest.mark.parametrize("bias", [False, True])
def test_exact_layers_of_one_input(bias: bool) -> None:
    """A row has the same bits beside any number of other rows."""
    module: Any = Projections(ExactLinear, bias)
    share_inputs(module)
    layers, x = (module.q_proj, module.k_proj, module.v_proj), torch.randn(150, 128, device=CUDA).bfloat16()
    single = [[layer(row) for layer in layers] for row in x.split(1)]
    for rows in (2, 16, 64, 65, 150):
        for layer, alone in zip(layers, zip(*single[:rows], strict=True), strict=True):
            assert torch.equal(layer(x[:rows]), torch.cat(alone))


def test_layers_with_hooks_are_called_alone() -> None:
    module: Any = Projections(FewRowLinear, False)
    called: list[str] = []
    module.k_proj.register_forward_pre_hook(lambda *_: called.append("k"))
    share_inputs(module)
    x = torch.randn(1, 1, 128, device=CUDA, dtype=torch.bfloat16)
    module.q_proj(x)
    assert not called
    expected = nn.functional.linear(x, module.k_proj.weight)
    torch.testing.assert_close(module.k_proj(x), expected, rtol=0.02, atol=0.02)
    assert called == ["k"]
