"""The C attention kernel for the CPU against the definition in fp64, and cases where it cannot be built."""

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.cpu import cpu_attention
from triforce_tree.kernels.cpu.cpu_attention import CpuAttention, instructions, supports

pytestmark = pytest.mark.usefixtures("poisoned_empty")
BF16 = torch.bfloat16
needs_kernel = pytest.mark.skipif(
    not supports(128, BF16), reason="needs a processor with AVX2, and a C compiler"
)
# Half a unit in the last place, relative.
_ROUNDING = {BF16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(params=instructions() or ["none"])
def way(request: pytest.FixtureRequest) -> str:
    """Every instruction set that this processor has."""
    return request.param


@pytest.fixture(
    params=[(way, dtype) for dtype in _ROUNDING for way in instructions(dtype)] or [("none", BF16)],
    ids=lambda pair: f"{pair[0]} {str(pair[1]).removeprefix('torch.')}",
)
def typed(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Every instruction set with every dtype that it supports."""
    return request.param


@pytest.fixture
def fresh_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which kernels are built."""
    monkeypatch.delenv("TRIFORCE_TREE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    cpu_attention._library.cache_clear()
    cpu_attention._usable.cache_clear()


def random_kv(
    count: int, heads: int, dim: int, value_dim: int = 0, dtype: torch.dtype = BF16
) -> list[Tensor]:
    """Keys and values ``[n, H, D]`` of rows as in a host store."""
    shape = Heads(heads, heads, dim, value_dim)
    return list(shape.split(torch.randn(count, shape.row).to(dtype)))


def definition(
    q: Tensor, k: Tensor, v: Tensor, scale: float, way: str = "AMX"
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and log-sum-exps in fp64, and the largest rounding error allowed for each output."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().transpose(0, 1).repeat_interleave(group, dim=0) for t in (k, v))  # [H_q, n, D]
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    probs = scores.softmax(-1)
    # Outputs are rounded, and so are probabilities where products are in bf16.
    rounded = probs @ values.abs() if way in ("AMX", "AVX-512 BF16") else 0.0
    allowed = _ROUNDING[q.dtype] * (rounded + (probs @ values).abs())
    return (probs @ values).transpose(0, 1), scores.logsumexp(-1).T, allowed.transpose(0, 1)


@needs_kernel
@pytest.mark.parametrize("dims", [(32, 32), (96, 96), (128, 128), (256, 256), (192, 128), (32, 96)], ids=str)
@pytest.mark.parametrize("queries", [1, 16, 97])
@pytest.mark.parametrize("count", [1, 31, 2321])
def test_states_are_those_of_the_definition(
    dims: tuple[int, int], queries: int, count: int, typed: tuple[str, torch.dtype]
) -> None:
    for size, group in ((1.0, 1), (4.0, 1), (1.0, 3)):
        holds(dims, queries, count, typed, 0.11, size, group)


@needs_kernel
@pytest.mark.parametrize("dims", [(512, 512), (320, 512)], ids=str)
def test_states_of_wide_heads(dims: tuple[int, int], typed: tuple[str, torch.dtype]) -> None:
    holds(dims, 17, 600, typed, dims[0] ** -0.5, 4.0, 3)


def holds(
    dims: tuple[int, int],
    queries: int,
    count: int,
    typed: tuple[str, torch.dtype],
    scale: float,
    size: float,
    group: int,
) -> None:
    """Compares with the definition for queries of standard deviation ``size``."""
    (way, dtype), heads = typed, 3
    q = (size * torch.randn(queries, heads * group, dims[0])).to(dtype)
    kv = random_kv(count, heads, *dims, dtype)
    out, lse = CpuAttention(1, way=way, dtype=dtype)(q, *kv, scale)
    expected, expected_lse, allowed = definition(q, *kv, scale, way)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert ((out - expected).abs() <= allowed + 2e-5).all()
    assert float((lse - expected_lse).abs().max()) < 3e-5


@needs_kernel
def test_scores_of_any_size_give_finite_states(way: str) -> None:
    """Scores in an order whose running maximum varies by far more than fp32's exponent range."""
    k, v = random_kv(600, 2, 64)
    k *= torch.linspace(-90, 90, 600)[:, None, None].sin().to(BF16) * 30
    q = (20 * torch.randn(7, 2, 64)).to(BF16)
    out, lse = CpuAttention(1, way=way)(q, k, v)
    expected, expected_lse, allowed = definition(q, k, v, 64**-0.5, way)
    assert ((out - expected).abs() <= allowed + 1e-3).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


@needs_kernel
@pytest.mark.parametrize("queries", [1, 70])
def test_maxima_that_rise_little_by_little_do_not_drift(queries: int, way: str) -> None:
    """Scores rise by less than a factor of 2 per block: outputs are rescaled rarely, and then by much."""
    heads, count, dim = 2, 6000, 64
    q = torch.ones(queries, heads, dim).to(BF16)
    k, v = random_kv(count, heads, dim)
    k[:] = torch.linspace(0, 1, count)[:, None, None].to(BF16)
    for scale in (0.1, 1.0):
        out, lse = CpuAttention(1, way=way)(q, k, v, scale)
        expected, expected_lse, allowed = definition(q, k, v, scale, way)
        assert ((out - expected).abs() <= allowed + 2e-5).all()
        assert float((lse - expected_lse).abs().max()) < 3e-5


@needs_kernel
def test_results_do_not_depend_on_the_number_of_threads(way: str) -> None:
    q, kv = torch.randn(20, 6, 128).to(BF16), random_kv(5000, 6, 128)
    (first, first_lse), *others = (CpuAttention(threads, way=way)(q, *kv) for threads in (1, 2, 5))
    for out, lse in others:
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


@needs_kernel
def test_workspace_is_reused_by_smaller_calls() -> None:
    attend = CpuAttention(1)
    for count, queries in ((3000, 30), (40, 3), (2500, 17)):
        q, kv = torch.randn(queries, 2, 64).to(BF16), random_kv(count, 2, 64)
        out, _ = attend(q, *kv)
        expected, _, allowed = definition(q, *kv, 64**-0.5)
        assert ((out - expected).abs() <= allowed + 2e-5).all()


@needs_kernel
def test_no_kv_gives_zeros_and_minus_infinity(way: str) -> None:
    out, lse = CpuAttention(1, way=way)(torch.ones(3, 4, 64, dtype=BF16), *random_kv(0, 2, 64))
    assert not out.any()
    assert (lse == -torch.inf).all()


@needs_kernel
def test_growing_kv_rarely_allocates_a_new_workspace() -> None:
    """Workspaces are kept until the calls have run, so each call must not allocate its own."""
    attend = CpuAttention(1, 1000)
    q, (k, v) = torch.zeros(1, 2, 32, dtype=BF16), random_kv(6000, 2, 32)
    out, lse = torch.empty_like(q), torch.empty(1, 2)
    for count in range(1, 6000, 50):
        attend.call(q, k[:count], v[:count], 0.1, out, lse)
    assert len({work.data_ptr() for _, work in attend._pending}) <= 5


@needs_kernel
def test_prepared_calls_run_later_on_another_thread(way: str) -> None:
    """Some of them need a larger workspace than those before."""
    attend, made = CpuAttention(1, 3, way=way), []
    for count, queries in ((40, 3), (3000, 30), (70, 17)):
        q, kv = torch.randn(queries, 4, 64).to(BF16), random_kv(count, 2, 64)
        out, lse = torch.empty_like(q), torch.empty(queries, 4)
        made.append((attend.call(q, *kv, 0.1, out, lse), q, kv, out, lse))
    with ThreadPoolExecutor(1) as thread:
        for call, *_ in made:
            thread.submit(CFUNCTYPE(None, c_void_p)(call.function), call.argument).result()
    for _, q, kv, out, lse in made:
        expected, expected_lse, allowed = definition(q, *kv, 0.1, way)
        assert ((out - expected).abs() <= allowed + 2e-5).all()
        assert float((lse - expected_lse).abs().max()) < 3e-5


@needs_kernel
@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((3, 2, 48), (9, 2, 48), (9, 2, 48), "D_v a multiple of 32 up to 512"),
        ((3, 2, 544), (9, 2, 544), (9, 2, 544), "D_v a multiple of 32 up to 512"),
        ((3, 2, 64), (9, 2, 64), (9, 2, 48), "D_v a multiple of 32 up to 512"),
        ((3, 4, 64), (9, 3, 64), (9, 3, 64), r"q \[3, 4, 64\], k \[9, 3, 64\]"),
        ((3, 4, 64), (9, 4, 32), (9, 4, 64), "must be"),
        ((3, 4, 64), (9, 4, 64), (8, 4, 64), "must be"),
        ((0, 2, 64), (9, 2, 64), (9, 2, 64), "T of at least 1"),
    ],
)
def test_other_shapes_raise(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuAttention(1)(*(torch.ones(shape, dtype=BF16) for shape in (q, k, v)))


@needs_kernel
def test_other_dtypes_and_strides_raise() -> None:
    q, (k, v) = torch.ones(3, 2, 64, dtype=BF16), random_kv(9, 2, 64)
    apart = v.repeat(1, 2, 1)[:, ::2]
    for other in ((q.half(), k, v), (q, k.float(), v), (q, k, apart), (q, k, v.contiguous())):
        with pytest.raises(ValueError, match=r"must be torch\.bfloat16, lse fp32, and all of them dense"):
            CpuAttention(1)(*other)


def test_other_dtypes_and_head_dims_are_not_supported() -> None:
    assert not supports(128, torch.float32)
    assert not supports(80, BF16)
    assert not supports(544, BF16)
    with pytest.raises(OSError, match=r"for torch\.float32 needs another dtype"):
        CpuAttention(1, dtype=torch.float32)


def test_instruction_sets_follow_from_cpu_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    old = frozenset({"sse4_2", "avx2", "fma", "f16c"})
    wide = old | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    monkeypatch.setattr(cpu_attention, "vendor", lambda: "AuthenticAMD")
    for flags, expected in (
        (wide | {"avx512_bf16", "amx_tile", "amx_bf16"}, ("AMX", "AVX-512 BF16", "AVX-512", "AVX2")),
        (wide | {"avx512_bf16", "amx_tile"}, ("AVX-512 BF16", "AVX-512", "AVX2")),
        (wide, ("AVX-512", "AVX2")),
        (old, ("AVX2",)),
        (old - {"fma"}, ()),
    ):
        monkeypatch.setattr(cpu_attention, "_flags", lambda flags=flags: flags)
        assert instructions() == expected
        assert instructions(torch.float16) == tuple(way for way in expected if way in ("AVX-512", "AVX2"))
        assert instructions(torch.float32) == ()
    _forget()
    assert not supports(128, BF16)
    with pytest.raises(OSError, match=r"bfloat16 needs AMX or .* or AVX2, and .* none of them"):
        CpuAttention(1)


def test_intels_bf16_dot_products_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    by_dtype = cpu_attention._INSTRUCTIONS.values()
    every = {flag for by_name in by_dtype for needed in by_name.values() for flag in needed}
    monkeypatch.setattr(cpu_attention, "_flags", lambda: frozenset(every))
    monkeypatch.setattr(cpu_attention, "vendor", lambda: "GenuineIntel")
    assert instructions() == ("AMX", "AVX-512", "AVX2", "AVX-512 BF16")
    assert instructions(torch.float16) == ("AVX-512", "AVX2")


@needs_kernel
def test_it_is_built_once(fresh_build: Path) -> None:
    assert supports(128, BF16)
    [built] = (fresh_build / "triforce-tree" / "kernels").iterdir()
    first = built.stat().st_mtime_ns
    _forget()
    assert supports(128, BF16)
    assert built.stat().st_mtime_ns == first


@pytest.mark.skipif(len(instructions()) < 2, reason="needs a processor with two of the instruction sets")
def test_instructions_that_the_compiler_lacks_fall_back_to_the_next(
    fresh_build: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, *_ = instructions()
    old = fresh_build / "old-cc"
    unknown = {"AMX": "-mamx-bf16", "AVX-512 BF16": "-mavx512bf16", "AVX-512": "-mavx512f"}[first]
    old.write_text(f'#!/bin/sh\ncase "$*" in *{unknown}*) echo what? >&2; exit 4;; esac\nexec cc "$@"\n')
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(old))
    q, kv = torch.randn(3, 2, 64).to(BF16), random_kv(50, 2, 64)
    with caplog.at_level(logging.WARNING):
        out, _ = CpuAttention(1)(q, *kv)
        CpuAttention(1)
    assert torch.equal(out, CpuAttention(1, way=second)(q, *kv)[0])
    [record] = caplog.records
    assert f"falls back to {second}: the kernel cannot be compiled" in record.getMessage()
    assert "exited with 4: what?" in record.getMessage()
    with pytest.raises(OSError, match="exited with 4"):
        CpuAttention(1, way=first)


def test_without_a_working_compiler_it_warns_once(
    fresh_build: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_attention, "_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    broken = fresh_build / "broken-cc"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    for compiler, message in ((str(broken), "exited with 3: no such option"), ("", "needs a C compiler")):
        monkeypatch.setenv("CC", compiler)
        if not compiler:
            monkeypatch.setenv("PATH", os.devnull)
        caplog.clear()
        _forget()
        with caplog.at_level(logging.WARNING):
            assert not supports(128, BF16)
            assert not supports(64, BF16)
        assert message in caplog.text
        assert len(caplog.records) == 1
        with pytest.raises(OSError, match=message):
            CpuAttention(1)
    assert not list((fresh_build / "triforce-tree" / "kernels").iterdir())
