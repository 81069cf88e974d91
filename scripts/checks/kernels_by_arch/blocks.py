"""Launches of attention by blocks of queries, as ``variants`` has them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch

from triforce_tree.kernels.attention.blocks import launch
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.plan import Heads

_CPU = torch.device("cpu")
# Slots of a page: whole tiles, and gathered positions alone.
_PAGES = (64, 16)


def launches(widths: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Returns names and calls for keys and values of these widths."""
    for dtype, (dim, value_dim), queries in product((torch.bfloat16, torch.float32), widths, (4, 64)):
        for page in _PAGES if dtype == torch.bfloat16 else _PAGES[:1]:
            label = str(dtype).removeprefix("torch.")
            name = f"blocks of {queries} x 4 rows, {label}, head_dim {dim} and {value_dim}, pages of {page}"
            yield name, partial(_attend, dtype, Heads(8, 2, dim, value_dim), queries, page)


def _attend(dtype: torch.dtype, heads: Heads, queries: int, page: int) -> None:
    plan = BlockPlan(heads, queries, 8, 8 * queries, 0, 16, page, device=_CPU, dtype=dtype)
    q = torch.zeros(queries, heads.query, heads.dim, dtype=dtype)
    k, v = (
        torch.zeros(2, 16, page, dim, dtype=dtype).transpose(0, 1) for dim in (heads.dim, heads.value_dim)
    )
    softcap, sinks = (5.0, torch.zeros(heads.query)) if queries == 4 else (None, None)
    launch.run(q, k, v, plan, scale=0.1, softcap=softcap, sinks=sinks)
