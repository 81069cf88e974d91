"""Implementations of attention in prefill, by name, and measurements of each alone on one chunk."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch

from scripts.benchmarks.common.results import Record
from scripts.benchmarks.common.timing import timed
from triforce_tree.kernels.attention import flash_attn_4
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.attention.prefill import attention_in_blocks, causal_attention
from triforce_tree.models.prefill.layers import PrefillLayers

FLASH_ATTN_4 = "flash-attn-4"
# Implementation of attention, and whether layers use our kernels, by name.
PATHS = {
    "engine": ("engine", True),
    "eager": ("engine", False),
    "cudnn": ("cudnn", True),
    FLASH_ATTN_4: (FLASH_ATTN_4, True),
    "flash": ("flash", True),
}
# Values of flash-attn 4's environment variable that fix the engine's choice.
_SETTINGS = {"cudnn": "0", FLASH_ATTN_4: "1", "flash": "0"}
# Number of timed calls of attention alone.
_CALLS = 10
# Number of last queries of a chunk that are compared with fp32.
_COMPARED = 64


@contextmanager
def way(path: str) -> Iterator[None]:
    """Makes prefill use the attention and the layers of this path within its context."""
    before, (attention, kernels) = torch.backends.cuda.cudnn_sdp_enabled(), PATHS[path]
    with ExitStack() as stack:
        if not kernels:
            stack.enter_context(mock.patch.object(PrefillLayers, "attach", autospec=True))
        if (setting := _SETTINGS.get(attention)) is not None:
            stack.enter_context(mock.patch.dict(os.environ, {flash_attn_4.VARIABLE: setting}))
        torch.backends.cuda.enable_cudnn_sdp(before and attention != "flash")
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)


def usable(paths: list[str]) -> list[str]:
    """Returns the paths that can be measured here, and prints why others are left out.

    Without flash-attn 4 the engine's attention is cuDNN's, so it is not measured twice.
    """
    if (why := flash_attn_4.unavailable()) is None:
        return paths
    kept = [path for path in paths if path != FLASH_ATTN_4 and (path != "cudnn" or "engine" not in paths)]
    if FLASH_ATTN_4 in paths:
        print(f"left out: flash-attn 4 ({why}); pip install 'triforce-tree[flash]' brings it", flush=True)
    return kept


def attention_alone(
    heads: Heads, queries: int, before: int, paths: list[str], device: torch.device, dtype: torch.dtype
) -> list[Record]:
    """Returns a row for each implementation in ``paths``: seconds, TFLOP/s and error of one call.

    Args:
        heads: heads of one layer.
        queries, before: numbers of positions of a chunk and before it.
    """
    options = {"dtype": dtype, "device": device}
    q = torch.randn(1, queries, heads.query, heads.dim, **options).transpose(1, 2)
    # As in a KV cache, there are slots after the last position.
    k, v = (
        torch.randn(1, heads.kv, before + queries + 64, width, **options)[:, :, : before + queries]
        for width in (heads.dim, heads.value_dim)
    )
    scale = heads.dim**-0.5
    last = q[:, :, -_COMPARED:]
    exact = attention_in_blocks(last.float(), k.float(), v.float(), scale=scale)
    pairs = queries * before + queries * (queries + 1) / 2
    flops = 2.0 * (heads.dim + heads.value_dim) * heads.query * pairs
    rows: list[Record] = []
    for path in paths:
        row: Record = {"heads": [heads.query, heads.kv, heads.dim], "queries": queries, "before": before}
        row["path"] = PATHS[path][0]
        if any(other["path"] == row["path"] for other in rows):
            continue
        call = partial(causal_attention, q, k, v, scale=scale)
        with way(path):
            out, row["first_seconds"] = timed(device, call)
            calls = [timed(device, call)[1] for _ in range(_CALLS)]
        row["seconds"] = sorted(calls)[_CALLS // 2]
        row["tflops"] = flops / row["seconds"] / 1e12
        row["error"] = ((out[:, :, -_COMPARED:].float() - exact).norm() / exact.norm()).item()
        rows.append(row)
    return rows
