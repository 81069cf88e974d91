"""The copy of a model for a GPU: which norms and linear layers it replaces, and by what."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.kernels import triton_ops
from tests.support.models.families import tiny
from triforce_tree.models.exact.device import (
    ExactLayerNorm,
    ExactLinear,
    ExactNorm,
    exact_linears_copy,
    use_exact_norms,
)
from triforce_tree.models.fused_linears import fuse_linears
from triforce_tree.models.model_copy import decoder_layers
from triforce_tree.models.step_model import StepModel


def exact_copy(model: PreTrainedModel) -> PreTrainedModel:
    clone = exact_linears_copy(model)
    use_exact_norms(clone)
    return clone


@pytest.mark.parametrize(
    "family, kind",
    [("llama-gqa", (0.0, False)), ("qwen3", (0.0, False)), ("gemma3", (1.0, True)), ("olmo2", (0.0, True))],
)
def test_norms_are_replaced_by_what_they_compute(family: str, kind: tuple[float, bool]) -> None:
    model = tiny(family).to(torch.bfloat16)
    # Weights of one hide where they multiply.
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            nn.init.normal_(weight, 0.7, 0.3)
        assert weight.dtype == torch.bfloat16, name
    clone = exact_copy(model)
    norms = [module for module in clone.modules() if "Norm" in type(module).__name__]
    assert norms
    assert {norm._kind for norm in norms if isinstance(norm, ExactNorm)} == {kind}
    assert all(isinstance(norm, ExactNorm) for norm in norms)
    x = torch.randn(1, 4, norms[0].weight.shape[0]).bfloat16()
    own = dict(model.named_modules())
    for name, norm in clone.named_modules():
        if isinstance(norm, ExactNorm) and norm.weight.shape[0] == x.shape[-1]:
            torch.testing.assert_close(norm(x), own[name](x), rtol=2**-7, atol=1e-6)
            assert norm.weight is own[name].weight


def test_layer_norms_linears_and_the_head() -> None:
    model = tiny("gpt-neox")
    before = {type(module) for module in model.modules()}
    clone = exact_copy(model)
    assert not [m for m in clone.modules() if type(m) in (nn.Linear, nn.LayerNorm)]
    assert {type(m) for m in clone.modules()} > {ExactLinear, ExactLayerNorm}
    assert isinstance(clone.get_output_embeddings(), ExactLinear)
    assert clone.get_output_embeddings().weight is model.get_output_embeddings().weight
    assert {type(module) for module in model.modules()} == before


def test_norms_of_another_function_are_left() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * nn.functional.layer_norm(x, (8,))

    model = tiny("llama-gqa")
    model.model.norm = Centred()
    assert isinstance(exact_copy(model).model.norm, Centred)


@pytest.mark.parametrize("tokens", [1, 5])
def test_compiled_layers_keep_the_operators(tokens: int) -> None:
    """One graph a layer, with the same launches for one token as for several."""
    triton_ops.require_triton()
    torch.compiler.reset()
    step = StepModel(exact_copy(tiny("llama-gqa").half()), exact=True)
    seen: list[Counter[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        names = [str(node.target) for node in fuse_linears(graph).graph.nodes if node.op == "call_function"]
        seen.append(Counter(name.split(".")[1] for name in names if name.startswith("triforce_tree.")))
        return graph.forward

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        return (q + (k + v).repeat_interleave(2, 1)).transpose(1, 2).contiguous()

    ids = torch.arange(tokens)[None]
    plain = step(ids, ids, attend)
    for layer in decoder_layers(step.model):
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
    assert torch.equal(step(ids, ids, attend), plain)
    expected = Counter(row_rms_norm=2, few_row_linears=2, few_row_linear=2, planned_attend=1)
    assert seen
    assert all(found == expected for found in seen), seen
