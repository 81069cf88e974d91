"""Decoder layers in two calls: transformers' logits, and layers that compute otherwise left alone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, Glm4MoeConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.support.models.look_alikes import made
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.cpu.cpu_attention import fp32_instructions
from triforce_tree.kernels.cpu.fp32 import library as fp32_library
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.host.linears import Int8Linear
from triforce_tree.models.step_model import StepModel, low_bit_model, step_model

pytestmark = pytest.mark.skipif(
    fp32_library.library() is None, reason="needs a processor with AVX2, and a C compiler"
)


def fused_layers(step: StepModel) -> int:
    return sum("forward" in vars(layer) for layer in step.model.model.layers)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=params.scale, enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("way", ["AVX-512", "AVX2"])
@pytest.mark.parametrize(
    ("config", "more", "layers"),
    [
        (LlamaConfig, {}, 2),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}, 2),
        (Qwen2Config, {}, 2),
        (Qwen3Config, {}, 0),  # norms of queries and keys
        # half of each head is rotated, so that the layers' own forwards run
        (Glm4MoeConfig, {"first_k_dense_replace": 2}, 2),
        (CohereConfig, {}, 0),  # attention and MLP side by side
    ],
)
def test_logits_equal_transformers(config, more, layers, way, monkeypatch) -> None:
    if way not in fp32_instructions():
        pytest.skip(f"this processor has no {way}")
    own = fp32_library.library(way)
    if own is None:
        pytest.skip(f"this processor has no {way}")
    monkeypatch.setattr(fp32_library, "library", lambda: own)
    model = made(config, **more)
    step = step_model(HFModel(model), compiled=False)
    assert fused_layers(step) == layers
    for batch, tokens in ((1, 1), (2, 5), (3, 16), (2, 40)):
        ids, positions = torch.randint(90, (batch, tokens)), torch.arange(tokens).expand(batch, -1)
        with torch.no_grad():
            expected = model(ids).logits
        torch.testing.assert_close(step(ids, positions, causal), expected, rtol=1e-4, atol=1e-5)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_8_bits(tied: bool) -> None:
    """All linear layers and the head have them; fused layers compute what the same weights give in fp32."""
    model = made(LlamaConfig, tie_word_embeddings=tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = low_bit_model(HFModel(model), 8, False, ())
    assert fused_layers(step) == 2
    rounded = copy.deepcopy(model)
    rounded.config.tie_word_embeddings = False
    rounded.lm_head = nn.Linear(64, 90, bias=False)
    for name, module in step.model.named_modules():
        if isinstance(module, Int8Linear):
            rounded.get_submodule(name).weight = nn.Parameter(module.weight)
    for batch, tokens in ((1, 1), (2, 5), (2, 40)):
        ids, positions = torch.randint(90, (batch, tokens)), torch.arange(tokens).expand(batch, -1)
        with torch.no_grad():
            expected, original = rounded(ids).logits, model(ids).logits
        found = step(ids, positions, causal)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert 0 < (found - original).norm() < 0.1 * original.norm()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.lm_head) is nn.Linear


def test_positions_of_each_sequence() -> None:
    model = made(LlamaConfig)
    step = step_model(HFModel(model), compiled=False)
    ids, positions = torch.randint(90, (2, 4)), torch.tensor([[3, 4, 5, 6], [20, 21, 22, 23]])
    found = step(ids, positions, causal)
    for row in range(2):
        with torch.no_grad():
            expected = model(ids[row : row + 1], position_ids=positions[row : row + 1]).logits
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-4, atol=1e-5)


def test_layers_that_compute_otherwise_are_left_alone() -> None:
    model = made(LlamaConfig)
    first, second = model.model.layers
    seen: list[Tensor] = []
    first.self_attn.o_proj.register_forward_hook(lambda *args: seen.append(args[2]))
    second.mlp.act_fn = nn.GELU()
    step = step_model(HFModel(model), compiled=False)
    assert fused_layers(step) == 0
    seen.clear()
    step(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), causal)
    assert len(seen) == 1


class ClippedAttention(LlamaAttention):
    """Attention that limits what it reads, which inputs of usual size do not show."""

    def forward(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Any:
        return super().forward(hidden_states.clamp(-100, 100), *args, **keywords)


def test_limits_that_usual_inputs_do_not_reach_are_noticed() -> None:
    model = made(LlamaConfig)
    model.model.layers[1].self_attn.__class__ = ClippedAttention
    step = step_model(HFModel(model), compiled=False)
    assert ["forward" in vars(layer) for layer in step.model.model.layers] == [True, False]


def test_changed_weights_are_read() -> None:
    model = made(LlamaConfig)
    step = step_model(HFModel(model), compiled=False)
    ids, positions = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
    before = step(ids, positions, causal)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
        model.model.layers[1].post_attention_layernorm.weight.mul_(1.5)
        expected = model(ids).logits
    found = step(ids, positions, causal)
    assert not torch.allclose(found, before, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
