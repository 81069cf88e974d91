"""Runs a plan with the two Triton kernels of tree attention.

The launch is a torch operator with a fake implementation, so ``torch.compile`` keeps it in its graph. It does
not wait for the device, and the kernels read everything that varies from step to step (lengths, tree, page
table) from device buffers. So a captured CUDA graph stays valid as the context grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triforce_tree.kernels.attention.combine import combine_kernel
from triforce_tree.kernels.attention.configs import (
    EDGE,
    KernelConfig,
    config_for,
    key_parts,
    slices_for,
    smaller,
    value_columns,
)
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Heads, Plan, plan_trees
from triforce_tree.kernels.attention.tree_attention import tree_attention_kernel
from triforce_tree.kernels.device import describe
from triforce_tree.kernels.fitting import fitted, within
from triforce_tree.kernels.launching import dense, launched_early, warps
from triforce_tree.kernels.operators import fake, numbers, operator

# Most programs of ``combine_kernel`` that each merge a single head.
_PROGRAMS = 2048


class _Launched:
    """Attention whose kernels read all that varies from the buffers of its plans."""

    def begin(self) -> None:
        """Does nothing."""

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        """See ``backend.Attention``."""
        return self.states(q, kv, params, first)[0]

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``backend.Attention``."""
        raise NotImplementedError


@dataclass(frozen=True)
class TritonAttention(_Launched):
    """A plan with the tiles and the workspace of the kernels; see ``backend.Attention``.

    Attributes:
        plan: what the queries see.
        config: tile and launch configuration.
        slices: number of equal parts of the list of all (segment, KV head, tile), one for each program. It is
            DeFT-Flatten (arXiv 2404.00242, section 3.3), but a slice is a program's share, not 128 tokens.
        partial_out: fp32 ``[pieces, D_v]``, workspace for partial outputs.
        partial_lse: fp32 or fp64 ``[pieces]``, workspace for their log-sum-exps.
        bounds: int32 ``[segments * H_kv, 2]``, workspace for the first and last slice of each unit.
    """

    plan: Plan
    config: KernelConfig
    slices: int
    partial_out: Tensor
    partial_lse: Tensor
    bounds: Tensor

    def over(self, plan: Plan) -> "TritonAttention":
        """Returns this attention with another plan of the same sizes; both share tiles and workspace."""
        return replace(self, plan=plan)

    def states(
        self,
        q: Tensor,
        kv: KV,
        params: AttentionParams,
        first: FirstVisible | None = None,
        other: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``backend.Attention``.

        Args:
            other: what ``states`` has returned for the same queries and other positions; the result is that
                for both.

        Raises:
            ValueError: a tensor does not fit the plan, or the kernels do not support its layout.
        """
        plan, heads = self.plan, self.plan.heads
        check_queries(q, plan.queries, heads, self.partial_lse, params.scale)
        visible, low, high = first or (None, None, None)
        k_scale, v_scale = kv.scales or (None, None)
        other_out, other_lse = other or (None, None)
        return _run(
            q, kv.k, kv.v, plan.lengths, plan.segments, plan.mask, plan.owner_start, plan.owners, kv.table,
            visible, low, high, params.sinks, k_scale, v_scale, other_out, other_lse,
            self.partial_out, self.partial_lse, self.bounds,
            params.scale, params.softcap or 0.0, heads.kv, self.slices, plan.max_queries,
            numbers(self.config),
        )  # fmt: skip


@dataclass(frozen=True)
class PrefixAttention(_Launched):
    """Attention with a ``PrefixPlan``, whose second launch merges the parts of each query.

    Attributes:
        own: attention to the last positions of each sequence.
        shared: attention to the prefixes that sequences share.
    """

    own: TritonAttention
    shared: TritonAttention

    @property
    def plan(self) -> Plan:
        return self.own.plan

    def over(self, plan: Plan) -> "PrefixAttention":
        """Returns this attention with another plan of the last positions."""
        return replace(self, own=self.own.over(plan))

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``backend.Attention``; there are no windows."""
        assert first is None, "slots with shared prefixes have no windows"
        own = self.own.states(q, kv, params)
        return self.shared.states(q, kv, replace(params, sinks=None), other=own)


def prepare(
    plan: Plan,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    page: int = 0,
    config: KernelConfig | None = None,
    slices: int | None = None,
) -> TritonAttention:
    """Chooses tiles for a plan and allocates workspace.

    Args:
        dtype: dtype of queries, keys and values.
        kv_dtype: dtype of keys and values if it differs from ``dtype``: int8.
        page: KV slots of a page; 0 for keys and values without pages.
        config: tile shapes; None takes them from the table.
        slices: number of slices; None makes one for each program that the device runs at once.
    """
    heads, device = plan.heads, plan.device
    query_rows = plan.max_queries * heads.group
    config = config or config_for(query_rows, heads, dtype, device, kv_dtype, page)
    slices = slices or slices_for(query_rows, device, config)
    pieces = (plan.seen * heads.kv + slices * plan.max_queries) * heads.group
    exact, units = dtype == torch.float32, plan.lengths.shape[0] * heads.kv
    return TritonAttention(
        plan,
        config,
        slices,
        partial_out=torch.empty(pieces, heads.value_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(pieces, dtype=torch.float64 if exact else torch.float32, device=device),
        bounds=torch.empty(units, 2, dtype=torch.int32, device=device),
    )


def prepare_pieces(
    heads: Heads, queries: int, positions: int, most: int, *, device: torch.device | str, dtype: torch.dtype
) -> list[TritonAttention]:
    """Plans attention to 1, 2, ... ``most`` pieces of ``positions`` KV positions, each with its own queries.

    The result of a piece does not depend on the number of pieces, bit for bit. The number of slices of a
    piece divides its tiles, so that no slice spans two pieces, and every piece is divided like the first.

    Args:
        queries: number of queries of each piece.
        device, dtype: of queries, keys and values.

    Returns:
        attention to 1, 2, ... pieces. All share one workspace, so they must run on one stream.
    """
    config = replace(config_for(queries * heads.group, heads, dtype, device), align=0)
    # This is the number of tiles that ``schedule.spans`` computes.
    full, ragged = divmod(positions, config.block_n)
    tiles = heads.kv * max(1, full + -(-ragged // EDGE))
    limit = min(tiles, slices_for(queries * heads.group, device, config))
    cuts = next(cuts for cuts in range(limit, 0, -1) if tiles % cuts == 0)
    masks = [torch.ones(queries, 0, dtype=torch.bool, device="cpu")] * most
    plan = plan_trees(heads, masks, [positions] * most, device=device)
    made = prepare(plan, dtype, config=config, slices=most * cuts)
    return [
        replace(made, plan=plan.first(count, count * queries), slices=count * cuts)
        for count in range(1, most + 1)
    ]


def check_queries(q: Tensor, queries: int, heads: Heads, partial_lse: Tensor, scale: float) -> None:
    """Raises ValueError if queries do not fit a plan for ``queries`` of them, or the kernels cannot use the
    scale.
    """
    if q.shape != (queries, heads.query, heads.dim):
        raise ValueError(
            f"q has shape {tuple(q.shape)}, the plan is for {(queries, heads.query, heads.dim)}; make a new "
            "plan"
        )
    if (q.dtype == torch.float32) != (partial_lse.dtype == torch.float64):
        raise ValueError(f"q is {q.dtype}, the plan is for another dtype; plan with dtype={q.dtype}")
    if not scale > 0:
        raise ValueError(f"scale={scale} must be positive, because the kernel compares unscaled scores")


@operator("tree_attention", writes=("partial_out", "partial_lse", "bounds"))
def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    segments: Tensor,
    mask: Tensor,
    owner_start: Tensor,
    owners: Tensor,
    table: Tensor | None,
    first: Tensor | None,
    low: Tensor | None,
    high: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    other_out: Tensor | None,
    other_lse: Tensor | None,
    partial_out: Tensor,
    partial_lse: Tensor,
    bounds: Tensor,
    scale: float,
    softcap: float,
    kv_heads: int,
    slices: int,
    max_queries: int,
    config: Sequence[int],
) -> tuple[Tensor, Tensor]:
    exact = q.dtype == torch.float32
    (queries, q_heads, dim), value_dim = q.shape, partial_out.shape[1]
    group = q_heads // kv_heads
    q = dense(q)
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("the last dimension of k and v must be dense; call .contiguous() on them")
    if k.shape[1:4:2] != (kv_heads, dim):
        raise ValueError(f"k has shape {tuple(k.shape)}; heads and dim must be {kv_heads} and {dim}")
    if v.shape != (*k.shape[:3], value_dim):
        raise ValueError(f"v has shape {tuple(v.shape)}, and must have {(*k.shape[:3], value_dim)}")
    scale_strides = _scale_strides(k, v, k_scale, v_scale)
    page = 0 if table is None else k.shape[2]
    if table is not None and table.ndim == 2:
        table = table[:, None].expand(-1, kv_heads, -1)
    if table is not None and (table.dtype != torch.int32 or table.stride(2) != 1):
        raise ValueError("table must be int32 with a dense last dimension")
    count = lengths.shape[0]
    parts, block_v = key_parts(dim, value_dim, q.itemsize), value_columns(value_dim, q.itemsize)
    value_parts = -(-value_dim // block_v)
    device = describe(q.device)
    early = launched_early(q.device)
    out = torch.empty(queries, q_heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, q_heads, dtype=torch.float32, device=q.device)

    def attend(cfg: KernelConfig) -> KernelConfig:
        views = row_views(k, v, page, cfg.block_n, q.itemsize) if cfg.tma and device.tma else None
        blocks = -(-max_queries * group // cfg.block_m)
        limits = {"maxnreg": cfg.max_registers} if cfg.max_registers else {}
        made = tree_attention_kernel[(slices * blocks, value_parts)](
            q, k, v, k_scale, v_scale,
            *(views.tensors if views else (k, None, v)),
            partial_out, partial_lse, bounds, lengths, segments, mask.view(torch.int32),
            lengths if table is None else table,
            first, low, high,
            scale, softcap,
            q.stride(0), q.stride(1),
            *k.stride()[:3], *v.stride()[:3], *scale_strides,
            *((0, 0) if table is None else table.stride()[:2]),
            *(views.steps if views else (0, 0, 0)),
            2 * mask.shape[1], max_queries * group, slices, blocks, count,
            GROUP=group, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
            BLOCK_D=parts[0], BLOCK_REST=parts[1], BLOCK_V=block_v, VALUE_PARTS=value_parts,
            BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, EDGE=EDGE,
            # The number of segments is rounded up, so that several numbers share a compiled kernel.
            SINGLE=count == 1, BLOCK_SEGMENTS=max(8, triton.next_power_of_2(count)), PAGE=page,
            TMA=views is not None,
            WINDOW=first is not None, SOFTCAP=softcap > 0,
            # Triton 3.6 cannot convert int8 to operands of fp64 products.
            EXACT=exact, NARROW=exact and (not device.fp64_products or k_scale is not None),
            STAGES=cfg.stages, EDGE_STAGES=cfg.edge_stages, ALIGN=cfg.align,
            **early, **warps(cfg.warps, **limits),
        )  # fmt: skip
        within(made, device)
        return cfg

    cfg = fitted(KernelConfig(*cast(Any, config)), smaller, attend)
    # So many partial outputs are loaded at once that most outputs need one round, in 64 registers per thread.
    pieces = 2 + slices // max(1, min(slices, count * kv_heads))
    columns = max(16, triton.next_power_of_2(value_dim))
    chunk = min(64, 16_384 // columns, max(4, triton.next_power_of_2(pieces)))
    # Many programs, each with a chain of loads, take longer than few of them with several heads.
    together = 1
    while together < group and queries * q_heads > _PROGRAMS * together and chunk * columns * together < 2048:
        together *= 2
    options = warps(max(1, chunk * columns * together // (1024 if exact else 2048)))
    combine_kernel[(queries, kv_heads * -(-group // together))](
        out, lse, partial_out, partial_lse, bounds, lengths, segments, low, high,
        owner_start, owners, sinks, other_out, other_lse, max_queries * group, count, slices,
        GROUP=group, KV_HEADS=kv_heads, DIM=value_dim, BLOCK_D=columns, TOGETHER=together,
        SINGLE=count == 1, CHUNK=chunk,
        BLOCK_N=cfg.block_n, EDGE=EDGE, ALIGN=cfg.align, WINDOW=low is not None,
        SINKS=sinks is not None, OTHER=other_out is not None, EXACT=exact, **early, **options,
    )  # fmt: skip
    return out, lse


def _scale_strides(
    k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[int | None, int | None]:
    """Returns the strides of the first two dimensions of the scales, or None twice without scales."""
    if k_scale is None or v_scale is None:
        if k.dtype == torch.int8 or v.dtype == torch.int8:
            raise ValueError("keys and values in int8 need the scales of both; pass scales")
        return None, None
    # In pages of one slot, the stride between slots has no meaning.
    apart = k.shape[2] > 1 and k_scale.stride(2) != 1
    if k_scale.shape != (*k.shape[:3], 1) or k_scale.shape != v_scale.shape or apart:
        raise ValueError(
            f"scales {tuple(k_scale.shape)} and {tuple(v_scale.shape)} must be {(*k.shape[:3], 1)}, with a "
            "stride of 1 between slots"
        )
    if k_scale.stride() != v_scale.stride():
        raise ValueError("scales of keys and of values need the same strides; allocate them alike")
    return k_scale.stride(0), k_scale.stride(1)


@fake("tree_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[3])), q.new_empty(q.shape[:2], dtype=torch.float32)


class RowViews(NamedTuple):
    """K and V as matrices ``[rows, columns]`` for the bulk copy engine, in tiles of ``block_n`` rows.

    A matrix row holds one KV slot of one head or of all heads.

    Attributes:
        k, v: descriptors of the (first part of the) keys and of the values.
        k_rest: descriptor of the second part of the columns of keys; None if they have one part.
        steps: rows between sequences, rows between heads, and columns of K between heads. Columns of V are
            computed from them.
    """

    k: TensorDescriptor
    k_rest: TensorDescriptor | None
    v: TensorDescriptor
    steps: tuple[int, int, int]

    @property
    def tensors(self) -> tuple[TensorDescriptor, TensorDescriptor | None, TensorDescriptor]:
        return self.k, self.k_rest, self.v


class _Matrix(NamedTuple):
    """K or V as a matrix.

    Attributes:
        rows, columns: its size.
        stride: elements between rows.
        steps: rows between sequences, rows between heads, and whether heads are columns of a row.
    """

    rows: int
    columns: int
    stride: int
    steps: tuple[int, int, bool]

    def view(self, kv: Tensor, block: tuple[int, int]) -> TensorDescriptor:
        return TensorDescriptor(kv, [self.rows, self.columns], [self.stride, 1], list(block))


def row_views(k: Tensor, v: Tensor, page: int, block_n: int, element_bytes: int = 2) -> RowViews | None:
    """Returns matrix views of K ``[B, H_kv, S, D]`` and V ``[B, H_kv, S, D_v]``, or of their pages.

    The slots of a head must be equally spaced wherever a tile can reach. So heads are either columns (storage
    ``[S, H_kv, D]``) or a whole number of slot strides apart (``[H_kv, S, D]``).

    Returns:
        the views, or None if the layout does not allow them.
    """
    value_dim = v.shape[3]
    parts = key_parts(k.shape[3], value_dim, element_bytes)
    if sum(parts) != k.shape[3] or value_dim != value_columns(value_dim, element_bytes):
        return None
    keys, values = _matrix(k, page, block_n), _matrix(v, page, block_n)
    if keys is None or values is None or keys.steps != values.steps:
        return None
    first, rest = parts
    rows_per_batch, rows_per_head, as_columns = keys.steps
    return RowViews(
        keys.view(k, (block_n, first)),
        keys.view(k, (block_n, rest)) if rest else None,
        values.view(v, (block_n, value_dim)),
        (rows_per_batch, rows_per_head, k.shape[3] if as_columns else 0),
    )


def _matrix(kv: Tensor, page: int, block_n: int) -> _Matrix | None:
    batch, kv_heads, slots, dim = kv.shape
    block_stride, head_stride, row_stride, _ = kv.stride()
    if kv.dtype == torch.float32 or (page and (page % block_n or block_stride != page * row_stride)):
        return None
    if kv.data_ptr() % 16 or row_stride * kv.itemsize % 16 or row_stride < dim:
        return None
    if batch == 1:
        block_stride = 0
    if block_stride % row_stride:
        return None
    rows_per_batch = 0 if page else block_stride // row_stride
    span = (batch - 1) * (block_stride // row_stride) + slots
    as_columns = kv_heads == 1 or (head_stride == dim and row_stride >= kv_heads * dim)
    rows_per_head, columns = 0, kv_heads * dim
    if not as_columns:
        if head_stride % row_stride:
            return None
        rows_per_head, columns = head_stride // row_stride, dim
        span += (kv_heads - 1) * rows_per_head
    if not block_n <= span < 2**31:
        return None
    return _Matrix(span, columns, row_stride, (rows_per_batch, rows_per_head, as_columns))
