"""The copy of a model for a GPU: which norms and linear layers it replaces, and by what."""

import pytest
import torch
from families import tiny
from torch import nn

from triforce_tree.models.exact.device import ExactLayerNorm, ExactLinear, ExactNorm, exact_copy


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
