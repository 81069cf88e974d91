"""Copies of a model with other linear layers: shared tensors, results, and the unchanged original."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.support.models.model_sizes import extra_bytes
from triforce_tree.kernels.linear.configs import MOST_ROWS
from triforce_tree.models import few_row
from triforce_tree.models.few_row import (
    FewRowLinear,
    LowBitHead,
    LowBitLinear,
    few_row_copy,
    low_bit_copy,
    with_linears,
)


@pytest.fixture
def model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def logits(model: PreTrainedModel, rows: int = 9) -> torch.Tensor:
    ids = torch.arange(rows).remainder(64)[None]
    with torch.no_grad():
        return model(ids).logits


def test_the_copy_shares_every_tensor(model: PreTrainedModel) -> None:
    clone = few_row_copy(model)
    theirs = dict(model.named_parameters()) | dict(model.named_buffers())
    ours = dict(clone.named_parameters()) | dict(clone.named_buffers())
    assert all(ours[name] is tensor for name, tensor in theirs.items())
    assert {name.rpartition(".")[2] for name in ours.keys() - theirs.keys()} == {"counters"}
    assert clone.config is not model.config


def test_the_original_is_unchanged(model: PreTrainedModel) -> None:
    before, types = logits(model), [type(module) for module in model.modules()]
    for bits in (4, 8):
        low_bit_copy(model, bits)
    few_row_copy(model)
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(logits(model), before)


def test_only_linears_of_decoder_layers_are_replaced(model: PreTrainedModel) -> None:
    clone = low_bit_copy(model, 8)
    kinds = {name: type(module) for name, module in clone.named_modules()}
    assert kinds["lm_head"] is nn.Linear
    assert kinds["model.layers.1.mlp.down_proj"] is LowBitLinear
    assert sum(kind is LowBitLinear for kind in kinds.values()) == 14
    assert not any(kind is nn.Linear for name, kind in kinds.items() if "layers" in name)


def test_few_row_logits_are_equal(model: PreTrainedModel) -> None:
    assert torch.equal(logits(few_row_copy(model)), logits(model))


@pytest.mark.parametrize("bits, most", [(8, 0.03), (4, 0.4)])
def test_low_bit_logits_are_close(model: PreTrainedModel, bits: int, most: float) -> None:
    exact = logits(model)
    assert (logits(low_bit_copy(model, bits)) - exact).norm() < most * exact.norm()


def test_a_head_keeps_its_original_for_what_no_kernel_computes() -> None:
    head = nn.Linear(200, 70, dtype=torch.bfloat16)
    made, x = LowBitHead(head), torch.randn(2, MOST_ROWS, 200, dtype=torch.bfloat16)
    assert made.weight is head.weight
    assert torch.equal(made(x), head(x))


@pytest.mark.parametrize("rows", [1, MOST_ROWS + 1])
def test_one_layer(rows: int) -> None:
    linear = nn.Linear(200, 70, dtype=torch.bfloat16)
    x = torch.randn(1, rows, 200, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = linear(x)
        assert torch.equal(FewRowLinear(linear)(x), exact)
        for bits, most in ((8, 0.03), (4, 0.2)):
            made = LowBitLinear(linear, bits)(x)
            assert made.dtype == torch.bfloat16
            assert (made - exact).norm() < most * exact.norm()


def test_extra_bytes(model: PreTrainedModel) -> None:
    assert extra_bytes(model) == 0
    counters = sum(
        4 * -(-m.out_features // 32) for m in few_row_copy(model).modules() if hasattr(m, "counters")
    )
    assert extra_bytes(few_row_copy(model)) == counters
    clone = low_bit_copy(model, 8)
    words = sum(2 * m.words.numel() for m in clone.modules() if isinstance(m, LowBitLinear))
    assert words < extra_bytes(clone) < 1.1 * words


def test_tied_layers_are_replaced_once() -> None:
    class Tied(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self) -> None:
            super().__init__(LlamaConfig())
            layer = nn.Linear(8, 8)
            self.layers = nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)])

    clone = few_row_copy(Tied())
    assert clone.layers[0][0] is clone.layers[1][0]


def test_a_model_without_layers_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="has no nn"):
        with_linears(low_bit_copy(model, 8), FewRowLinear)


def test_compiled(model: PreTrainedModel) -> None:
    """One graph without breaks, with the same result."""
    for clone in (few_row_copy(model), low_bit_copy(model, 8)):
        mlp = clone.model.layers[0].mlp
        x = torch.randn(1, 5, 64)
        with torch.no_grad():
            made = torch.compile(mlp, backend="eager", fullgraph=True)(x)
            torch.testing.assert_close(made, mlp(x))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_through_the_kernel(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU path in Triton's interpreter: one compiled graph, equal up to the operator's rounding."""
    pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")
    linear = nn.Linear(200, 70, dtype=torch.float16)
    layer = FewRowLinear(linear) if bits == 16 else LowBitLinear(linear, bits)
    x = torch.randn(1, 5, 200, dtype=torch.float16)
    with torch.no_grad():
        exact = layer(x)
        monkeypatch.setattr(few_row, "_fits", lambda x, most=0: True)
        made = torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(made, exact, rtol=2e-3, atol=2e-3)
