"""Experts for few rows: against transformers' own, in copies that share everything but packed weights."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.kernels import triton_ops
from tests.support.models.families import CAPPED, tiny
from tests.support.models.model_sizes import extra_bytes
from triforce_tree.kernels.linear import experts as definition
from triforce_tree.kernels.linear import reference
from triforce_tree.models.experts import few_row
from triforce_tree.models.experts.few_row import FEW_ROW_EXPERTS, FEW_ROW_OR_GROUPED, LowBitExperts
from triforce_tree.models.experts.modules import distinct, expert_modules, fused_weights
from triforce_tree.models.few_row import few_row_copy, low_bit_copy

pytestmark = pytest.mark.usefixtures("poisoned_empty")

FAMILIES = ["mixtral", "qwen3-moe", "gpt-oss"]


def made(family: str) -> PreTrainedModel:
    model = CAPPED[family]() if family in CAPPED else tiny(family)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            nn.init.normal_(parameter)
    return model


def call(module: nn.Module, rows: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the output of a module of 4 experts for ``rows`` tokens of 2 experts each."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 32, generator=generator).to(dtype)
    ids = torch.rand(rows, 4, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(rows, 2, generator=generator).to(dtype)
    with torch.no_grad():
        return module(hidden, ids, weights)


@pytest.mark.parametrize("rows", [1, 7, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_implementation_computes_what_transformers_computes(family: str, rows: int) -> None:
    model = made(family)
    module = expert_modules(model)[0]
    expected = call(module, rows)
    for implementation in (FEW_ROW_EXPERTS, FEW_ROW_OR_GROUPED):
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(call(module, rows), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_through_the_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU path in Triton's interpreter."""
    triton_ops.require_triton()
    from triforce_tree.kernels.linear import experts_kernels

    model = made(family)
    module = expert_modules(model)[0]
    exact = call(module)
    model.half().set_experts_implementation(FEW_ROW_EXPERTS)
    launched: list[int] = []

    def kernel(*args: object) -> Tensor:
        launched.append(1)
        return experts_kernels.expert_linear(*args)

    for name, layer in (("fused", module), ("packed", LowBitExperts(copy.deepcopy(module), 8))):
        # Rounded once more than the kernel, in fp16.
        expected = exact if name == "fused" else call(layer, dtype=torch.float16).float()
        monkeypatch.setattr(few_row, "expert_linear", kernel)
        torch.testing.assert_close(call(layer, dtype=torch.float16).float(), expected, rtol=2e-2, atol=2e-2)
        monkeypatch.setattr(few_row, "expert_linear", definition.expert_linear)
    assert len(launched) == 4


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_compute_with_the_rounded_weights(family: str, bits: int) -> None:
    model = made(family)
    module = expert_modules(model)[0]
    plain = call(module)
    packed = LowBitExperts(module, bits)
    rounded = copy.deepcopy(module)
    for weight in fused_weights(rounded):
        stored = weight.data.transpose(1, 2) if module.is_transposed else weight.data
        each = [reference.dequantise(*reference.quantise(w, bits), bits, w.shape[1]) for w in stored]
        values = torch.stack(each)
        weight.data = values.transpose(1, 2) if module.is_transposed else values
    torch.testing.assert_close(call(packed), call(rounded), rtol=1e-4, atol=1e-5)
    error = (call(packed) - plain).norm() / plain.norm()
    assert 0 < error < {8: 0.02, 4: 0.3}[bits]


def test_low_bit_copies_replace_experts_and_share_the_rest() -> None:
    model = made("gpt-oss")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    read: list[Tensor] = []
    clone = low_bit_copy(model, 4, read.append)
    assert not expert_modules(clone)
    assert {id(w) for m in expert_modules(model) for w in fused_weights(m)} <= {id(w) for w in read}
    ours = dict(clone.named_parameters())
    assert ours["model.layers.0.mlp.experts.shell.down_proj_bias"] is (
        model.model.layers[0].mlp.experts.down_proj_bias
    )
    assert not any(name.endswith(("gate_up_proj", "down_proj")) for name in ours)
    packed = [m for m in clone.modules() if isinstance(m, LowBitExperts)]
    own = sum(buffer.nbytes for module in packed for buffer in module.buffers())
    assert 0 < own < extra_bytes(clone)
    # The user's model keeps its weights, and copies for 16 bits keep the modules.
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert len(expert_modules(few_row_copy(model))) == len(expert_modules(model)) == 2


@pytest.mark.parametrize("bits", [16, 8])
def test_compiled(bits: int) -> None:
    """One graph without breaks, with the same result."""
    model = made("qwen3-moe")
    model.set_experts_implementation(FEW_ROW_EXPERTS)
    block = (low_bit_copy(model, bits) if bits < 16 else few_row_copy(model)).model.layers[0].mlp
    x = torch.randn(1, 5, 32)
    with torch.no_grad():
        compiled = torch.compile(block, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, block(x))


def test_families_without_fused_experts_have_none() -> None:
    assert not expert_modules(tiny("llama-gqa"))
    assert not expert_modules(tiny("llama4"))
    assert distinct(4, 2, 1) == pytest.approx(2)
