"""Layers of a prefill by kernels: transformers' own bits, and modules that compute otherwise left alone."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.support.kernels import triton_ops
from tests.support.models.look_alikes import DoubledNorm, made
from triforce_tree.kernels.norm import reference as norms
from triforce_tree.kernels.pointwise import reference as pointwise
from triforce_tree.models.kernel_layers.modules import KernelLayers
from triforce_tree.models.model_copy import shallow_copy

LLAMA = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
BOTH_SIDES = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
HEADS = {"self_attn.q_norm", "self_attn.k_norm"}
CASES: list[tuple[Any, set[str]]] = [
    # The layer itself: the addition between its halves.
    (LlamaConfig, LLAMA | {""}),
    (Qwen2Config, LLAMA | {""}),
    (Qwen3Config, LLAMA | HEADS | {""}),
    (Gemma2Config, LLAMA | BOTH_SIDES | {""}),
    (Gemma3TextConfig, LLAMA | BOTH_SIDES | HEADS | {""}),
    # Gate and up in one weight.
    (Phi3Config, LLAMA | {""}),
    # Cosines in fp32, products rounded once.
    (Olmo2Config, {"self_attn", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"} | HEADS),
    # Neighbours are rotated instead of halves.
    (Glm4Config, LLAMA - {"self_attn"} | {"", "post_self_attn_layernorm", "post_mlp_layernorm"}),
    # A quarter of a head is rotated; the norms subtract the mean.
    (StableLmConfig, {"self_attn", "mlp"}),
    (CohereConfig, {"mlp"}),
]


def replaced(model: PreTrainedModel) -> tuple[PreTrainedModel, set[str]]:
    """A copy whose layers use our kernels, and the names of the modules of its first layer that do."""
    clone = shallow_copy(model)
    KernelLayers(model).attach(clone)
    changed = {name for name, module in clone.named_modules() if "forward" in vars(module)}
    return clone, {name.split("layers.0")[1].removeprefix(".") for name in changed if "layers.0" in name}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("config", "expected"), CASES)
def test_logits_have_the_bits_of_transformers(config: Any, expected: set[str], dtype: torch.dtype) -> None:
    model = made(config, dtype)
    clone, changed = replaced(model)
    assert changed == expected
    ids = torch.randint(90, (2, 37))
    with torch.no_grad():
        assert torch.equal(clone(ids).logits, model(ids).logits)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@triton_ops.runs_kernels
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("config", [LlamaConfig, Phi3Config])
def test_logits_of_the_kernels(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.norm.launch import add_rms_norm, row_rms_norm
    from triforce_tree.kernels.pointwise.launch import gated, rotary

    model = made(config, torch.float32).to(triton_ops.DEVICE)
    calls = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **keywords: (calls.append(name), function(*args, **keywords))[1]

    layers = "triforce_tree.models.kernel_layers.modules"
    for name, kernel, definition in (
        ("row_rms_norm", row_rms_norm, norms.row_rms_norm.definition),
        ("add_rms_norm", add_rms_norm, norms.add_rms_norm.definition),
        ("rotary", rotary, pointwise.rotary.definition),
        ("gated", gated, pointwise.gated.definition),
    ):
        run = counted(name, kernel)
        run.definition = definition
        monkeypatch.setattr(f"{layers}.{name}", run)
    clone, _ = replaced(model)
    ids = torch.randint(90, (2, 7), device=triton_ops.DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(clone(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert Counter(calls) == {"row_rms_norm": 3, "add_rms_norm": 2, "rotary": 2, "gated": 2}


class Shifted(nn.Module):
    """An activation that is none of ours."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x) + 1e-3


def test_what_computes_otherwise_is_left_alone() -> None:
    model = made(LlamaConfig, torch.float32)
    layer = model.model.layers[0]
    layer.input_layernorm = DoubledNorm(64)
    layer.mlp.act_fn = Shifted()
    layer.post_attention_layernorm.variance_epsilon = 1e-3
    clone, changed = replaced(model)
    assert changed == {"", "self_attn", "post_attention_layernorm"}
    ids = torch.randint(90, (1, 7))
    with torch.no_grad():
        assert torch.equal(clone(ids).logits, model(ids).logits)


def test_modules_exchanged_since_keep_their_forwards() -> None:
    model = made(LlamaConfig, torch.float32)
    layers = KernelLayers(model)
    seen: list[Tensor] = []
    model.model.layers[0].mlp.act_fn = Shifted()
    model.model.layers[0].input_layernorm = DoubledNorm(64)
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *args: seen.append(args[2]))
    clone = shallow_copy(model)
    layers.attach(clone)
    ids = torch.randint(90, (1, 7))
    with torch.no_grad():
        found = clone(ids).logits
        assert len(seen) == 1
        assert torch.equal(found, model(ids).logits)


def test_hooks_are_called_where_they_were() -> None:
    model = made(LlamaConfig, torch.float32)
    seen: list[str] = []
    for name, module in model.model.layers[0].named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    clone, _ = replaced(model)
    ids = torch.randint(90, (1, 7))
    with torch.no_grad():
        found = clone(ids).logits
        ours, seen[:] = list(seen), []
        assert torch.equal(found, model(ids).logits)
    assert ours == seen


class Parallel(LlamaDecoderLayer):
    """Attention and MLP beside each other."""

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **keywords)
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


def test_layers_of_another_structure_are_left_alone() -> None:
    model = made(LlamaConfig, torch.float32)
    model.model.layers[0] = Parallel(model.config, 0).eval()
    clone, changed = replaced(model)
    assert changed == LLAMA
    ids = torch.randint(90, (1, 7))
    with torch.no_grad():
        assert torch.equal(clone(ids).logits, model(ids).logits)


def test_norms_in_fp32_inside_a_narrower_model() -> None:
    model = made(LlamaConfig, torch.bfloat16)
    model.model.layers[0].post_attention_layernorm.float()
    model.model.layers[0].mlp.float()
    model.model.layers[1].float()
    model.model.norm.float()
    model.lm_head.float()
    clone, _ = replaced(model)
    ids = torch.randint(90, (1, 7))
    with torch.no_grad():
        assert torch.equal(clone(ids).logits, model(ids).logits)
