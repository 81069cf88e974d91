"""The launches of bit-exact mode for ``variants``: calls on CPU tensors that are never run."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch

from triforce_tree.kernels.attention.exact import launch
from triforce_tree.kernels.attention.exact.attention import ExactAttention
from triforce_tree.kernels.attention.plan import KV, AttentionParams
from triforce_tree.kernels.linear.launch import pinned_linear
from triforce_tree.kernels.norm.launch import row_rms_norm

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LINEARS = ((4096, 4096), (6144, 4096), (22_016, 4096), (4096, 11_008), (128_256, 4096))


def variants(widths: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Returns names and calls; attention with keys and values of these widths, by tiles for any number of
    queries.
    """
    for dtype, (dim, value_dim), kind in product(_NAMES, widths, ("dense", "window")):
        if dtype == torch.bfloat16 or (dim, kind) == (128, "dense"):
            name = f"exact {kind}, {_NAMES[dtype]}, head_dim {dim} and {value_dim}"
            yield name, partial(_attend, kind == "window", dtype, dim, value_dim)
    for outs, ins in _LINEARS:
        yield f"pinned linear, bf16, {outs} x {ins}", partial(_multiply, outs, ins)
    for columns, late in product((128, 4096), (False, True)):
        yield f"row norm, bf16, {columns} columns, late {late}", partial(_normalise, columns, late)


def _attend(windowed: bool, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    slots = (16, 2, 128) if windowed else (1, 2, 1024)
    request = ExactAttention(
        q=torch.zeros(16, 8, dim, dtype=dtype),
        kv=KV(
            torch.zeros(*slots, dim, dtype=dtype),
            torch.zeros(*slots, value_dim, dtype=dtype),
            torch.zeros(1, 8, dtype=torch.int32) if windowed else None,
        ),
        params=AttentionParams(0.1, 512, 5.0, torch.zeros(8, dtype=dtype))
        if windowed
        else AttentionParams(0.1),
        lengths=torch.zeros(1, dtype=torch.int32),
        mask=torch.zeros(1, 16, 1, dtype=torch.int64),
    )
    launch.attention(request)


def _multiply(outs: int, ins: int) -> None:
    x, weight = torch.zeros(16, ins, dtype=torch.bfloat16), torch.zeros(outs, ins, dtype=torch.bfloat16)
    pinned_linear(x, weight, None, torch.zeros(-(-outs // 32), dtype=torch.int32))


def _normalise(columns: int, late: bool) -> None:
    weight = torch.zeros(columns, dtype=torch.bfloat16)
    row_rms_norm(torch.zeros(16, columns, dtype=torch.bfloat16), weight, 1e-6, 0.0, late)
