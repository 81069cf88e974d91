"""Few rows by the C kernel or oneDNN: torch's result, other libraries' layers unchanged."""

import pytest
import torch
from torch import Tensor, nn

from triforce_tree.kernels.cpu import onednn
from triforce_tree.kernels.cpu.fp32 import linear as fp32
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.host import linears as host_linear
from triforce_tree.models.host import matrices
from triforce_tree.models.host.gguf_linears import GgufLinear
from triforce_tree.models.host.linears import use_few_row_linears


@pytest.fixture(params=["C kernel", "oneDNN"])
def few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "oneDNN":
        monkeypatch.setattr(host_linear, "library", lambda: None)
    elif library() is None:
        pytest.skip("needs a processor with AVX2, and a C compiler")


@pytest.fixture(params=[True, False], ids=["many by oneDNN", "many by torch"])
def many_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "multiplies_many_rows", lambda: request.param)


needs_onednn = pytest.mark.skipif(not host_linear.ONEDNN, reason="this torch has no oneDNN")


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def forwards(model: nn.Module) -> dict[str, object]:
    """The instance attributes ``forward`` that replace their class's, by module name."""
    return {name: vars(m)["forward"] for name, m in model.named_modules() if "forward" in vars(m)}


@needs_onednn
@pytest.mark.usefixtures("few_rows", "many_rows")
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 64, 65, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_the_result_equals_torchs(rows: int, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(48, 96, bias=bias), nn.SiLU(), nn.Linear(96, 40, bias=bias))
    x = torch.randn(1, rows, 48)
    with torch.no_grad():
        expected = model(x)
        use_few_row_linears(model)
        assert forwards(model).keys() == {"0", "2"}
        out = model(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("many_rows")
@pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
@pytest.mark.parametrize("rows", [255, 256, 300])
def test_many_rows_by_blocks_of_a_file(rows: int) -> None:
    blocks = fp32.BLOCKS["Q8_0"]
    codes = torch.randint(256, (40, 2, 32), dtype=torch.uint8)
    scales = torch.rand(40, 2, 1).half().view(torch.uint8)
    packed = torch.cat([scales, codes], 2).flatten(1)
    bias = torch.randn(40)
    layer = GgufLinear(nn.Parameter(packed, requires_grad=False), blocks, nn.Parameter(bias))
    x = torch.randn(2, rows, 64) if rows == 300 else torch.randn(rows, 64)
    with torch.no_grad():
        expected = nn.functional.linear(x, fp32.unpacked(packed, blocks), bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-2)


@needs_onednn
def test_layers_of_other_libraries_are_unchanged() -> None:
    hooked = nn.Linear(8, 8)
    own = lambda x: x + 1  # noqa: E731 - what accelerate's hooks look like
    hooked.forward = own
    model = nn.Sequential(nn.Linear(8, 8), hooked, Doubled(8, 8), nn.Linear(8, 8).bfloat16())
    assert use_few_row_linears(model) == [model[0]]
    assert forwards(model).keys() == {"0", "1"}
    assert hooked.forward is own


def test_without_kernels_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_linear, "ONEDNN", False)
    monkeypatch.setattr(host_linear, "library", lambda: None)
    model = nn.Sequential(nn.Linear(8, 8))
    use_few_row_linears(model)
    assert not forwards(model)


@pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
@pytest.mark.parametrize("change", ["in place", "exchanged"])
def test_changed_weights_are_used(change: str) -> None:
    """The kernel reads a copy in 16 bits, where one has the same values."""
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    x = torch.randn(1, 3, 32)
    use_few_row_linears(model)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.bfloat16())
        torch.testing.assert_close(model(x), x @ model[0].weight.mT)
        new = torch.randn(48, 32)
        if change == "in place":
            model[0].weight.copy_(new)
        else:
            model[0].weight = nn.Parameter(new)
        torch.testing.assert_close(model(x), x @ new.mT)


@pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
def test_memory_limits_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 32).bfloat16().float()
    for share, dtype in ((0.25, torch.bfloat16), (0.0, torch.float32)):
        model = nn.Sequential(nn.Linear(32, 48, bias=False))
        model[0].weight = nn.Parameter(weight)
        monkeypatch.setattr(matrices, "_MOST_MEMORY", share)
        matrices._narrowed.clear()
        use_few_row_linears(model)
        assert matrices.matrix_of(model[0]).weight.dtype == dtype
