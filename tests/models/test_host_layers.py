"""Fused norms, MLPs and rotary embeddings: the same logits, and modules that compute otherwise left alone."""

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tests.support.models.look_alikes import DoubledNorm, made
from triforce_tree.kernels.cpu.fp32 import layers as fp32
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.host.layers import use_fused_layers
from triforce_tree.models.host.linears import use_few_row_linears
from triforce_tree.models.model_copy import shallow_copy

pytestmark = pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")


def fused(model: PreTrainedModel) -> tuple[PreTrainedModel, set[str]]:
    """A copy with fused layers, and the names of the modules of its first layer that are."""
    clone = shallow_copy(model)
    linears = use_few_row_linears(clone)
    use_fused_layers(clone, linears)
    changed = {n for n, m in clone.named_modules() if "forward" in vars(m) and m not in set(linears)}
    return clone, {name.split("layers.0.")[1] for name in changed if "layers.0." in name}


@pytest.mark.parametrize("tokens", [1, 5, 60])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}),
        (Qwen2Config, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}),
        (
            Qwen3Config,
            {"self_attn", "self_attn.q_norm", "self_attn.k_norm", "mlp"}
            | {"input_layernorm", "post_attention_layernorm"},
        ),
        # Its norms multiply by 1 + weight, and its activation is another one.
        (Gemma2Config, {"self_attn"}),
        # Neighbours are rotated instead of halves, and the norms subtract the mean.
        (CohereConfig, {"mlp"}),
    ],
)
def test_logits_equal_transformers(config: type, expected: set[str], tokens: int) -> None:
    model = made(config)
    clone, changed = fused(model)
    assert changed == expected
    ids = torch.randint(90, (2, tokens))
    with torch.no_grad():
        torch.testing.assert_close(clone(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_what_computes_otherwise_is_left_alone() -> None:
    model = made(LlamaConfig)
    layer = model.model.layers[0]
    layer.input_layernorm = DoubledNorm(64)
    layer.mlp.act_fn = nn.GELU()
    layer.post_attention_layernorm.variance_epsilon = 1e-3
    clone, changed = fused(model)
    assert changed == {"self_attn", "post_attention_layernorm"}
    ids = torch.randint(90, (1, 7))
    with torch.no_grad():
        torch.testing.assert_close(clone(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_weights_that_are_not_dense() -> None:
    model = made(LlamaConfig)
    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            linear.weight = nn.Parameter(linear.weight.detach().mT.contiguous().mT)
    clone, changed = fused(model)
    assert "mlp" in changed
    ids = torch.randint(90, (1, 7))
    with torch.no_grad():
        torch.testing.assert_close(clone(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_hooks_on_projections_are_kept() -> None:
    model = made(LlamaConfig)
    seen: list[Tensor] = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: seen.append(args[2]))
    clone, changed = fused(model)
    assert "mlp" not in changed
    with torch.no_grad():
        clone(torch.tensor([[1, 2]]))
    assert len(seen) == 1


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("size", [7, 96, 131])
def test_norm(size: int) -> None:
    x, weight = torch.randn(2, 3, size), torch.randn(size)
    exact = nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-2)
    plain = nn.functional.rms_norm(x, (size,), weight, 1e-2)
    out = fp32.rms_norm(x, weight, 1e-2)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("angles", [1, 2])
def test_rotary(angles: int) -> None:
    q, k = torch.randn(2, 5, 4, 24).transpose(1, 2), torch.randn(2, 5, 2, 24).transpose(1, 2)
    cos, sin = torch.randn(angles, 5, 24), torch.randn(angles, 5, 24)
    found = fp32.rotary(q, k, cos, sin)
    assert found is not None
    for x, out in zip((q, k), found, strict=True):
        first, second = x.chunk(2, -1)
        expected = x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
        torch.testing.assert_close(out, expected)
    assert fp32.rotary(q, k, cos[..., :12], sin[..., :12]) is None
