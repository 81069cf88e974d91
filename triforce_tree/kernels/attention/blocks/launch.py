"""Runs a plan of blocks of queries with two Triton kernels.

The launch is a torch operator with a fake implementation, and does not wait for the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import triton
from torch import Tensor

from triforce_tree.kernels.attention.blocks.kernel import block_attention_kernel, block_combine_kernel
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.configs import KernelConfig, key_parts, value_columns
from triforce_tree.kernels.attention.launch import check_queries, row_views
from triforce_tree.kernels.device import describe
from triforce_tree.kernels.fitting import fitted, within
from triforce_tree.kernels.launching import dense, launched_early, warps
from triforce_tree.kernels.operators import fake, numbers, operator

# With at least this many query rows of all heads, a program merges several rows.
_MANY_ROWS, _ROWS = 8192, 8


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of all queries of a plan in one layer.

    Args:
        q: ``[queries, H_q, D]``; the last dimension is dense.
        k: pages ``[pages, H_kv, page, D]``; any strides with the last dimension dense.
        v: pages ``[pages, H_kv, page, D_v]``.
        plan: what the queries see.
        scale: positive factor on the raw scores.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[H_q]`` logits of a virtual key whose value is zero.

    Returns:
        out ``[queries, H_q, D_v]`` in q's dtype and log-sum-exps (natural logarithm), fp32
        ``[queries, H_q]``; (0, -inf) for a query that sees no position.

    Raises:
        ValueError: a tensor does not fit the plan.
    """
    heads = plan.heads
    check_queries(q, plan.queries, heads, plan.partial_lse, scale)
    if k.shape[1:] != (heads.kv, plan.page, heads.dim) or v.shape != (*k.shape[:3], heads.value_dim):
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they must be pages "
            f"[pages, {heads.kv}, {plan.page}, D] with D = {heads.dim} and {heads.value_dim}"
        )
    return _run(
        q, k, v, *plan.schedule, plan.partial_out, plan.partial_lse, sinks, scale, softcap or 0.0,
        plan.slices, numbers(plan.config),
    )  # fmt: skip


@operator("block_attention", writes=("partial_out", "partial_lse"))
def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shares: Tensor,
    begins: Tensor,
    columns: Tensor,
    bounds: Tensor,
    whole: Tensor,
    gathered: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    slices: int,
    config: Sequence[int],
) -> tuple[Tensor, Tensor]:
    exact, kv_heads, page = q.dtype == torch.float32, k.shape[1], k.shape[2]
    (queries, q_heads, dim), value_dim = q.shape, v.shape[3]
    group, blocks = q_heads // kv_heads, bounds.shape[0]
    q = dense(q)
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("the last dimension of k and v must be dense; call .contiguous() on them")
    parts, block_v = key_parts(dim, value_dim, q.itemsize), value_columns(value_dim, q.itemsize)
    value_parts = -(-value_dim // block_v)
    device = describe(q.device)
    early = launched_early(q.device)
    out = torch.empty(queries, q_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, q_heads, dtype=torch.float32, device=q.device)

    def attend(cfg: KernelConfig) -> None:
        views = row_views(k, v, page, cfg.block_n, q.itemsize) if cfg.tma and device.tma else None
        made = block_attention_kernel[(slices, value_parts)](
            q, k, v, *(views.tensors if views else (k, None, v)),
            partial_out, partial_lse, shares, begins, columns, whole, gathered,
            scale, softcap,
            q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3],
            *(views.steps[1:] if views else (0, 0)),
            queries * group, blocks,
            GROUP=group, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
            BLOCK_D=parts[0], BLOCK_REST=parts[1], BLOCK_V=block_v, VALUE_PARTS=value_parts,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, PAGE=page, TMA=views is not None,
            SOFTCAP=softcap > 0, EXACT=exact, STAGES=cfg.stages, GATHER_STAGES=cfg.edge_stages,
            **early, **warps(cfg.warps),
        )  # fmt: skip
        within(made, device)

    cfg = KernelConfig(*cast(Any, config))
    # The plan is for these tiles, so only the number of stages may be reduced to fit shared memory.
    fitted(cfg, _fewer_stages, attend)
    rows = _ROWS if queries * q_heads >= _MANY_ROWS else 1
    # So many partial outputs are loaded at once that most outputs need one round.
    pieces = triton.next_power_of_2(2 + slices // max(1, min(slices, blocks * kv_heads)))
    width = max(16, triton.next_power_of_2(value_dim))
    chunk = max(1, min(64, 16_384 // width, pieces) // rows)
    options = warps(max(1, rows * chunk * width // (1024 if exact else 2048)))
    block_combine_kernel[(-(-queries * group // rows), kv_heads)](
        out, lse, partial_out, partial_lse, bounds, sinks, queries * group,
        GROUP=group, KV_HEADS=kv_heads, DIM=value_dim, BLOCK_D=width, BLOCK_M=cfg.block_m,
        ROWS=rows, CHUNK=chunk, SINKS=sinks is not None, EXACT=exact, **early, **options,
    )  # fmt: skip
    return out, lse


def _fewer_stages(config: KernelConfig) -> KernelConfig | None:
    return replace(config, stages=config.stages - 1) if config.stages > 1 else None


@fake("block_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[3])), q.new_empty(q.shape[:2], dtype=torch.float32)
