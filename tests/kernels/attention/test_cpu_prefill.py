"""Causal attention of the chunks of a prompt by the C kernel, beside double precision."""

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.attention.prefill import attention_in_blocks
from triforce_tree.kernels.cpu.fp32 import prefill

pytestmark = pytest.mark.usefixtures("each_instruction_set")


def chunk(
    queries: int, before: int, kv_heads: int, group: int, dims: tuple[int, int], batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random queries, and keys and values inside larger memory that holds NaN."""
    positions, (dim, value_dim) = before + queries, dims
    q = torch.randn(batch, queries, kv_heads * group, dim).transpose(1, 2)
    kv = torch.full((batch, kv_heads, positions + 7, dim + value_dim), torch.nan)
    k, v = kv[:, :, 3:-4, :dim], kv[:, :, 3:-4, dim:]
    k.normal_(), v.normal_()
    return q, k, v


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    out = prefill.causal_attention(q, k, v, scale, window)
    assert out is not None
    return out


@pytest.mark.parametrize(
    ("queries", "before", "kv_heads", "group", "dims", "batch"),
    [
        (16, 0, 1, 1, (16, 16), 1),
        (100, 0, 2, 3, (64, 64), 2),
        (65, 191, 3, 1, (128, 128), 1),
        (257, 1000, 1, 4, (80, 80), 1),
        (33, 95, 2, 2, (192, 128), 1),
        (300, 700, 2, 1, (33, 7), 1),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 50, 200, 5000])
def test_it_agrees_with_double_precision(
    queries: int,
    before: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    batch: int,
    window: int | None,
) -> None:
    torch.manual_seed(queries)
    q, k, v = chunk(queries, before, kv_heads, group, dims, batch)
    scale = dims[0] ** -0.5
    exact, _ = attention_in_blocks(q.double(), k.double(), v.double(), scale=scale, window=window)
    torch.testing.assert_close(attended(q, k, v, scale, window).double(), exact, rtol=1e-5, atol=3e-6)


def test_large_scores_and_growing_maxima() -> None:
    torch.manual_seed(0)
    q, k, v = chunk(70, 400, 1, 1, (32, 32))
    k *= torch.linspace(0.01, 40, k.shape[2])[:, None]
    exact, _ = attention_in_blocks(q.double(), k.double(), v.double(), scale=1.0)
    torch.testing.assert_close(attended(q, k, v, 1.0).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_query_does_not_depend_on_the_others(threads: int) -> None:
    """A prompt has the same bits in chunks of other sizes and with other numbers of threads."""
    torch.manual_seed(1)
    q, k, v = chunk(600, 0, 2, 2, (64, 64))
    whole, before = attended(q, k, v, 0.2), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, stop in ((0, 100), (100, 117), (117, 600)):
            part = attended(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], 0.2)
            assert torch.equal(part, whole[:, :, start:stop])
    finally:
        torch.set_num_threads(before)


def test_few_rows_and_other_dtypes_are_left_to_torch() -> None:
    q, k, v = chunk(15, 40, 2, 1, (64, 64))
    assert prefill.causal_attention(q, k, v, 1.0, None) is None
    q, k, v = (x.bfloat16() for x in chunk(64, 40, 2, 1, (64, 64)))
    assert prefill.causal_attention(q, k, v, 1.0, None) is None
