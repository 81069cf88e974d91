"""Prefill attention in blocks: against the definition, where it is used, and the memory that it takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triforce_tree.kernels.attention import prefill
from triforce_tree.kernels.attention.reference import tree_attention

SHAPES = [(13, 31), (31, 31), (1, 20), (40, 300)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("extras", [False, True])
def test_blocks_are_the_definition(
    shape: tuple[int, int], window: int | None, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_QUERIES", 7)
    count, positions = shape
    q, k, v = torch.randn(2, 6, count, 24), torch.randn(2, 2, positions, 24), torch.randn(2, 2, positions, 10)
    how: dict[str, Any] = {"scale": 0.3}
    if extras:
        how |= {"softcap": 2.0, "sinks": torch.randn(6)}
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    first = None if window is None else (torch.arange(positions - count, positions) - window + 1).clamp(0)
    exact, _ = tree_attention(q.double(), k.double(), v.double(), mask, first=first, **how)
    # Blocks of 256 positions, the fewest.
    monkeypatch.setattr(prefill, "_SCORES", 1)
    out, _ = prefill.attention_in_blocks(q, k, v, window=window, **how)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


class _Sizes(TorchDispatchMode):
    """Sizes in bytes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.sizes.add(leaf.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (64, 320), (256, 256)], ids=str)
def test_wide_heads_go_in_blocks_on_a_gpu(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flash attention ends at 256 elements."""
    made, shapes = object(), [(1, 4, 9, dims[0]), (1, 2, 9, dims[0]), (1, 2, 9, dims[1])]
    monkeypatch.setattr(prefill, "attention_in_blocks", lambda *_, **__: (made, None))
    monkeypatch.setattr(prefill, "_of_equal_widths", lambda *_, **__: None)
    monkeypatch.setattr(prefill.F, "scaled_dot_product_attention", lambda *_, **__: None)
    how = {"is_cuda": True, "is_cpu": False, "dtype": torch.float32}
    q, k, v = (SimpleNamespace(shape=shape, **how) for shape in shapes)
    assert (prefill.causal_attention(q, k, v, scale=1.0) is made) == (max(dims) > 256)
    q.is_cuda = False
    assert prefill.causal_attention(q, k, v, scale=1.0) is not made


@pytest.mark.parametrize(("dim", "softcap"), [(512, None), (128, 30.0)])
def test_no_scores_of_a_chunk_over_all_positions(dim: int, softcap: float | None) -> None:
    """The shapes alone show it; all scores in fp32 would be 32 GiB."""
    shapes = (1, 16, 4096, dim), (1, 4, 131_072, dim), (1, 4, 131_072, dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    with _Sizes() as made:
        out, _ = prefill.attention_in_blocks(q, k, v, scale=0.1, softcap=softcap)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    # Scores of a block; keys and values themselves have been allocated before.
    own = [size for size in made.sizes if size != k.nbytes]
    assert max(own) == 4 * (1 << 26)
    assert 3 * max(own) > prefill.block_bytes(16, dim, dim, 2) > max(own)


@pytest.mark.parametrize("before", [1, 8, 9, 30, 64])
@pytest.mark.parametrize("queries", [3, 4, 6, 8, 11, 16])
def test_prefix_and_chunk_are_merged(before: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, int]] = set()

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = (q @ keys.mT * scale).masked_fill(~mask.tril() if causal else ~mask, -torch.inf)
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        shapes.add((q.shape[2], k.shape[2]))
        return attend(q, k, v, scale, causal)

    monkeypatch.setattr(prefill, "_BLOCK", 8)
    monkeypatch.setattr(prefill, "_cudnn", cudnn)
    monkeypatch.setattr(prefill, "_flash", attend)
    positions = before + queries
    q, k, v = (
        torch.randn(2, 4, queries, 16),
        torch.randn(2, 2, positions, 16),
        torch.randn(2, 2, positions, 16),
    )
    exact = prefill.causal_attention(q.double(), k.double(), v.double(), scale=0.3)
    out = prefill._prefix_and_chunk(q, k, v, 0.3)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    # cuDNN makes a plan for each of these.
    assert all(rows in (4, 8, queries) for rows, _ in shapes)
    assert all(size % 8 == 0 and (size // 8).bit_count() == 1 for rows, size in shapes if rows != size)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads, dim", [(4, 128), (2, 128), (2, 64), (1, 256)])
@pytest.mark.parametrize(
    "before, queries",
    [
        (4096, 4096), (13_000, 4096), (8192, 5000), (22_528, 2048), (9000, 1500), (8192, 3807), (0, 4096),
        (0, 2041), (0, 7),
    ],
)  # fmt: skip
def test_prefix_and_chunk_on_a_gpu(kv_heads: int, dim: int, before: int, queries: int) -> None:
    positions = before + queries
    q, k, v = (
        torch.randn(1, count, length, dim, device="cuda", dtype=torch.bfloat16)
        for count, length in ((4, queries), (kv_heads, positions), (kv_heads, positions))
    )
    if not prefill._cudnn_runs(q):
        pytest.skip("cuDNN's attention is used on Hopper and Blackwell only")
    out = prefill.causal_attention(q, k, v, scale=dim**-0.5)
    exact, _ = prefill.attention_in_blocks(q.float(), k.float(), v.float(), scale=dim**-0.5)
    assert (out.float() - exact).norm() <= 0.005 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before, queries, kv_heads", [(1, 7, 4), (150, 17, 2), (33, 70, 1)])
def test_prefix_and_chunk_on_a_cpu(
    before: int, queries: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask is made over all positions; the error is that of one call with such a mask."""
    positions = before + queries
    q = torch.randn(2, 4, queries, 24, dtype=dtype)
    # As in a cache: slots after the last position hold anything.
    k, v = (torch.full((2, kv_heads, positions + 9, 24), torch.nan, dtype=dtype) for _ in range(2))
    for slots in (k, v):
        slots[:, :, :positions] = torch.randn(2, kv_heads, positions, 24)
    k, v = k[:, :, :positions], v[:, :, :positions]
    exact = prefill.causal_attention(q.double(), k.double(), v.double(), scale=0.3)
    bias = prefill.causal_lower_right(queries, positions)
    masked = prefill.F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3, enable_gqa=True)
    monkeypatch.setattr(prefill.F, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("a mask"))
    out = prefill.causal_attention(q, k, v, scale=0.3)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= 2 * (masked.double() - exact).norm() + 1e-7 * exact.norm()
