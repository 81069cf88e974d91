"""Linears of the same input fused into one launch: the pass over a traced graph, and the fused kernel."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from triforce_tree.models import few_row
from triforce_tree.models.few_row import FewRowLinear, LowBitLinear, low_bit_copy
from triforce_tree.models.fused_linears import fuse_linears, fused
from triforce_tree.models.model_copy import decoder_layers
from triforce_tree.models.step_model import StepModel

ROUNDING = {"rtol": 2e-3, "atol": 2e-3}


@pytest.fixture(autouse=True)
def _forget_compiled() -> None:
    """Every test compiles the same functions for different modules."""
    torch.compiler.reset()


class Layer(nn.Module):
    """Has the linears of a decoder layer: three of one input, two of another, and a single one."""

    def __init__(self, bits: int, bias: bool = True) -> None:
        super().__init__()

        def make(ins: int, outs: int, bias: bool = False) -> nn.Module:
            linear = nn.Linear(ins, outs, bias, dtype=torch.float16)
            return FewRowLinear(linear) if bits == 16 else LowBitLinear(linear, bits)

        self.q, self.k, self.v = make(136, 96, bias), make(136, 40, bias), make(136, 33, bias)
        self.gate, self.up, self.down = make(96, 72), make(96, 72), make(72, 136)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.q(x) * (1 + self.k(x).sum(-1, keepdim=True)).tanh() + self.v(x).mean(-1, keepdim=True)
        return x + self.down(nn.functional.silu(self.gate(mixed)) * self.up(mixed))


@pytest.fixture
def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")
    monkeypatch.setattr(few_row, "_fits", lambda x, most=0: True)


def operators(module: fx.GraphModule) -> Counter[str]:
    names = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return Counter(name.split(".")[1] for name in names if "few_row_linear" in name)


def compiled(layer: Callable[..., Any]) -> tuple[Callable[..., Any], list[Counter[str]]]:
    """The layer with the pass applied and run uncompiled, and the operators before and after the pass."""
    seen: list[Counter[str]] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        seen.append(operators(graph))
        seen.append(operators(fuse_linears(graph)))
        return graph.forward

    return torch.compile(layer, backend=backend, fullgraph=True, dynamic=False), seen


@pytest.mark.usefixtures("through_kernels", "poisoned_empty")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_linears_of_one_input_are_fused(bits: int, bias: bool) -> None:
    layer, x = Layer(bits, bias), torch.randn(1, 5, 136, dtype=torch.float16)
    fast, seen = compiled(layer)
    with torch.no_grad():
        made, exact = fast(x), layer(x)
    assert seen == [Counter(few_row_linear=6), Counter(few_row_linears=2, few_row_linear=1)]
    torch.testing.assert_close(made, exact, rtol=0, atol=0)
    assert not any(counters.any() for name, counters in layer.named_buffers() if "counters" in name)


@pytest.mark.slow
@pytest.mark.usefixtures("through_kernels")
def test_fusion_under_the_default_compiler() -> None:
    layer, x = Layer(8), torch.randn(2, 3, 136, dtype=torch.float16)
    with torch.no_grad():
        made = torch.compile(layer, backend=fused, fullgraph=True, dynamic=False)(x)
        torch.testing.assert_close(made, layer(x), **ROUNDING)


@pytest.mark.usefixtures("through_kernels")
def test_different_linears_are_not_fused() -> None:
    """They differ in bits, bias, or input."""
    layer, x = Layer(16), torch.randn(1, 4, 136, dtype=torch.float16)
    layer.k = LowBitLinear(nn.Linear(136, 40, dtype=torch.float16), 8)
    layer.v = FewRowLinear(nn.Linear(136, 33, bias=False, dtype=torch.float16))
    layer.up = FewRowLinear(nn.Linear(96, 72, dtype=torch.float16))
    fast, seen = compiled(layer)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x), rtol=0, atol=0)
    assert seen == [Counter(few_row_linear=6)] * 2


def test_graphs_without_the_kernel_are_unchanged() -> None:
    layer, x = Layer(16), torch.randn(1, 5, 136, dtype=torch.float16)
    fast, seen = compiled(layer)
    with torch.no_grad():
        assert torch.equal(fast(x), layer(x))
    assert seen == [Counter()] * 2


@pytest.mark.usefixtures("through_kernels")
def test_more_linears_than_one_launch_takes() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linears = [FewRowLinear(nn.Linear(64, 32, dtype=torch.float16)) for _ in range(5)]
            self.linears = nn.ModuleList(linears)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([linear(x) for linear in self.linears])

    layer, x = Wide(), torch.randn(4, 64, dtype=torch.float16)
    fast, seen = compiled(layer)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x), rtol=0, atol=0)
    assert seen[1] == Counter(few_row_linears=2)


@pytest.mark.usefixtures("through_kernels")
@pytest.mark.parametrize(
    "family, expected",
    [
        (LlamaConfig, Counter(few_row_linears=2, few_row_linear=2)),
        (Qwen2Config, Counter(few_row_linears=2, few_row_linear=2)),
        (Qwen3Config, Counter(few_row_linears=2, few_row_linear=2)),
        (Phi3Config, Counter(few_row_linear=4)),
    ],
    ids=["llama", "qwen2", "qwen3", "phi3"],
)
def test_decoder_layers(family: type[PreTrainedConfig], expected: Counter[str]) -> None:
    """One family has biases, one normed heads, and one linears that are fused already."""
    config = family(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    step = StepModel(low_bit_copy(AutoModelForCausalLM.from_config(config).half(), 8))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        grown = k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)
        return (q + grown).transpose(1, 2).contiguous()

    tokens, positions = torch.arange(5)[None], torch.arange(5)[None]
    plain = step(tokens, positions, attend)
    (layer,) = decoder_layers(step.model)
    layer.forward, seen = compiled(layer.forward)
    torch.testing.assert_close(step(tokens, positions, attend), plain, **ROUNDING)
    assert seen[1] == expected
