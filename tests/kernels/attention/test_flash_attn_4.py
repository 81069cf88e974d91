"""flash-attn 4 in prefill: which calls it serves, in which layout, and what happens where it fails.

On a CPU a stand-in computes by torch what the package's documentation says; on a GPU it is the package.
"""

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.attention import flash_attn_4, prefill
from triforce_tree.kernels.attention.reference import tree_attention
from triforce_tree.kernels.device import KNOWN, emulated


class StandIn:
    """``flash_attn.cute.flash_attn_func``, with what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], ...]] = []
        self.error: Exception | None = None
        self.factor = 1.0

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        causal: bool,
        softcap: float,
        learnable_sink: Tensor | None,
    ) -> tuple[Tensor, None]:
        """Attends over ``[B, T, H, D]``, the mask aligned to the last position."""
        self.calls.append((q.shape, k.stride(), v.stride()))
        if self.error is not None:
            raise self.error
        assert causal
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        how = {"softcap": softcap or None, "sinks": learnable_sink}
        out, _ = tree_attention(q, k, v, mask, scale=softmax_scale, **how)
        return self.factor * out.transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of the package, and what a test learns of it is forgotten."""
    monkeypatch.delenv(flash_attn_4.VARIABLE, raising=False)
    monkeypatch.setattr(flash_attn_4, "_failures", [])
    monkeypatch.setattr(flash_attn_4, "choices", {})
    flash_attn_4._function.cache_clear()
    yield
    flash_attn_4._function.cache_clear()


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in is installed, and takes small tensors of the host."""
    made, package = StandIn(), ModuleType("flash_attn.cute")
    package.flash_attn_func = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setattr(flash_attn_4, "_QUERIES", 4)
    monkeypatch.setattr(flash_attn_4, "_POSITIONS", 40)
    monkeypatch.setattr(flash_attn_4, "_suits", lambda *_: True)
    return made


def fast(monkeypatch: pytest.MonkeyPatch, own: float, other: float) -> None:
    """Says what the two ways take."""

    class Clock:
        def __init__(self, device: torch.device) -> None: ...
        def start(self) -> None: ...
        def mark(self, name: str) -> None: ...
        def synchronize(self) -> None: ...
        def seconds(self) -> dict[str, float]:
            return {"own": own, "other": other}

    monkeypatch.setattr(flash_attn_4, "StageClock", Clock)


def chunk(queries: int = 8, positions: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values in a cache whose slots go on: they are strided, and NaN follows them."""
    q = torch.randn(2, queries, 6, 16).transpose(1, 2)
    slots = torch.full((2, 2, 2, positions + 24, 16), torch.nan)
    slots[:, :, :, :positions] = torch.randn(2, 2, 2, positions, 16)
    return q, slots[0][:, :, :positions], slots[1][:, :, :positions]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_it_is_the_definition(
    softcap: float | None, sinks: bool, function: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras: dict[str, Any] = {"softcap": softcap, "sinks": torch.randn(6) if sinks else None}
    fast(monkeypatch, own=1.0, other=0.5)
    q, k, v = chunk()
    out = prefill.causal_attention(q, k, v, scale=0.3, **extras)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    exact, _ = tree_attention(q.double(), k.double(), v.double(), mask, scale=0.3, **extras)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    # Nothing was copied on the way.
    assert function.calls[-1] == (
        (2, 8, 6, 16), *(t.transpose(1, 2).stride() for t in (k, v))
    )  # fmt: skip


@pytest.mark.parametrize(("took", "used"), [(0.5, True), (0.96, True), (0.99, False), (2.0, False)])
def test_the_faster_way_is_chosen_once(
    took: float, used: bool, function: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch, own=1.0, other=took)
    q, k, v = chunk()
    first = prefill.causal_attention(q, k, v, scale=0.3)
    compared = len(function.calls)
    again = prefill.causal_attention(q, k, v, scale=0.3)
    assert torch.equal(first, again)
    assert list(flash_attn_4.choices.values()) == [used]
    assert compared == 1 + flash_attn_4._ROUNDS + used
    assert len(function.calls) == compared + used
    # Twice the positions are another kind.
    prefill.causal_attention(*chunk(positions=64), scale=0.3)
    assert len(flash_attn_4.choices) == 2


def test_other_calls_are_not_offered(function: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((8, 39), (3, 40)):
        prefill.causal_attention(*chunk(*shape), scale=0.3)
    prefill.causal_attention(*chunk(), scale=0.3, window=9)
    monkeypatch.setenv(flash_attn_4.VARIABLE, "0")
    prefill.causal_attention(*chunk(), scale=0.3)
    assert not function.calls


def test_it_can_be_asked_for(function: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flash_attn_4.VARIABLE, "1")
    prefill.causal_attention(*chunk(), scale=0.3)
    assert len(function.calls) == 1
    assert not flash_attn_4.choices
    monkeypatch.setenv(flash_attn_4.VARIABLE, "yes")
    with pytest.raises(ValueError, match="TRIFORCE_TREE_FLASH_ATTN='yes' is neither"):
        prefill.causal_attention(*chunk(), scale=0.3)


@pytest.mark.parametrize("failure", ["raises", "differs", "nan"])
def test_a_failure_is_told_once(failure: str, function: StandIn) -> None:
    function.error = RuntimeError("no such\ninstruction") if failure == "raises" else None
    function.factor = {"differs": 1.02, "nan": torch.nan}.get(failure, 1.0)
    q, k, v = chunk()
    told = "no such" if failure == "raises" else "another result"
    with pytest.warns(RuntimeWarning, match=f"goes on without it: .*{told}"):
        out = prefill.causal_attention(q, k, v, scale=0.3)
    assert torch.equal(out, prefill._causal(q, k, v, 0.3, None, None, None))
    assert told in str(flash_attn_4.unavailable())
    prefill.causal_attention(*chunk(positions=300), scale=0.3)
    assert len(function.calls) == 1


def test_without_the_package_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not flash_attn_4.offered(*chunk(8, 20_000))
    # `None` in sys.modules gives an ImportError of this name, as flash-attn 2 alone does.
    assert flash_attn_4.unavailable() == "it is not installed"


def test_a_package_that_lacks_its_own_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("import cutlass_that_is_missing\n")
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(RuntimeWarning, match="No module named 'cutlass_that_is_missing'"):
        assert not flash_attn_4.offered(*chunk())
    assert "cutlass_that_is_missing" in str(flash_attn_4.unavailable())
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("arch", "widths", "suits"),
    [
        ("sm_90", (128, 128), True), ("sm_90", (256, 256), True), ("sm_90", (192, 128), True),
        ("sm_90", (260, 128), False), ("sm_90", (100, 100), False), ("sm_100", (128, 128), True),
        ("sm_100", (256, 256), True), ("sm_100", (160, 160), False), ("sm_80", (128, 128), False),
    ],
)  # fmt: skip
def test_cards_and_widths(arch: str, widths: tuple[int, int], suits: bool) -> None:
    q, k, v = (
        SimpleNamespace(
            is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 8, width), device="cuda",
            stride=lambda at=None: (4096, 1024, 512, 1) if at is None else 1, data_ptr=lambda: 4096,
        )
        for width in (widths[0], *widths)
    )  # fmt: skip
    with emulated(KNOWN[arch]):
        assert flash_attn_4._suits(q, k, v) == suits  # type: ignore[arg-type]
        q.dtype = torch.float32
        assert not flash_attn_4._suits(q, k, v)  # type: ignore[arg-type]


def test_several_ranks_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would measure for itself, and what they compute in common must have the same bits."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with emulated(KNOWN["sm_90"]):
        assert not flash_attn_4._suits(*(SimpleNamespace(is_cuda=True) for _ in range(3)))  # type: ignore[arg-type]


def test_rows_that_begin_anywhere_would_be_copied() -> None:
    slots = torch.zeros(1, 2, 8, 24, dtype=torch.bfloat16)
    assert flash_attn_4._aligned(slots[..., :16])
    assert not flash_attn_4._aligned(slots[..., 1:17])
    assert not flash_attn_4._aligned(torch.zeros(1, 2, 8, 20, dtype=torch.bfloat16)[..., :16])
    assert not flash_attn_4._aligned(slots.mT)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of its compiler
@pytest.mark.parametrize("extras", [{}, {"softcap": 30.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 128), (8, 2, 128), (6, 2, 64), (4, 1, 256)])
def test_on_a_gpu(
    heads: int, kv_heads: int, dim: int, extras: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is at most twice that of plain torch in the same dtype."""
    if flash_attn_4.unavailable() is not None:
        pytest.skip("flash-attn 4 is not installed")
    q = torch.randn(1, 512, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    slots = torch.randn(2, 1, kv_heads, 20_100, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (t[:, :, :20_000] for t in slots)
    if not flash_attn_4.offered(q, k, v):
        pytest.skip("flash-attn 4 is used on Hopper and Blackwell only")
    how: dict[str, Any] = {"scale": dim**-0.5, **extras}
    if extras.get("sinks"):
        how["sinks"] = torch.randn(heads, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(512, 512, dtype=torch.bool, device="cuda").tril()
    exact, _ = tree_attention(q.float(), k.float(), v.float(), mask, **how)
    plain, _ = tree_attention(q, k, v, mask, **how)
    monkeypatch.setenv(flash_attn_4.VARIABLE, "1")
    out = prefill.causal_attention(q, k, v, **how)
    assert (out.float() - exact).norm() <= 2 * (plain.float() - exact).norm()
