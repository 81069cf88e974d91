"""Other implementations of tree attention on a GPU, each with its fastest options.

Each peer computes the same function on the same KV, and its result is compared with ours before it is timed.
If a peer is not installed, cannot run a cell or gives another result, the reason is reported instead of a
time.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.attention.problems import KV, Cell, random_kv, tree_mask
from scripts.benchmarks.common.timing import median_us
from triforce_tree.kernels.attention.backend import backend
from triforce_tree.kernels.attention.plan import KV as Stored
from triforce_tree.kernels.attention.plan import AttentionParams, plan_trees

PAGE = 64
# Smallest page of flash-attn.
_FLASH_PAGE = 256
Calls = list[Callable[[], Tensor]]
# Given a cell, its queries and copies of its KV, a peer returns a call for each copy, which returns the
# output.
Peer = Callable[[Cell, Tensor, KV], Calls]


def dense_mask(cell: Cell, device: torch.device | str = "cuda") -> Tensor:
    """Returns the mask of prefix and tree, bool ``[T, L + T]``."""
    mask = torch.ones(cell.size, cell.rows, dtype=torch.bool, device=device)
    mask[:, cell.length :] = tree_mask(cell.size, device)
    return mask


def sdpa(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """Makes calls of torch's SDPA with a dense mask, which most tree decoders use."""
    mask, grouped = dense_mask(cell, q.device)[None, None], cell.query_heads != cell.kv_heads
    packed = q.view(cell.batch, cell.size, cell.query_heads, cell.dim).transpose(1, 2)

    def call(k: Tensor, v: Tensor) -> Tensor:
        made = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, enable_gqa=grouped)
        return made.transpose(1, 2).reshape(q.shape)

    return [partial(call, k, v) for k, v in kv]


def flex(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """Makes calls of FlexAttention with max-autotune and a mask on only the last blocks."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    _one_sequence(cell)
    mask, length, size, block = tree_mask(cell.size), cell.length, cell.size, 128

    def visible(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        inside = (column - length).clamp(0, size - 1)
        return (column < length) | mask[row.clamp(0, size - 1), inside]

    full, every, rows = length // block, -(-cell.rows // block), -(-size // block)
    columns = torch.arange(every, dtype=torch.int32, device="cuda")
    order = columns.roll(-full).expand(1, 1, rows, every).contiguous()
    counts = torch.full((1, 1, rows), every - full, dtype=torch.int32, device="cuda")
    blocks = BlockMask.from_kv_blocks(
        counts, order, torch.full_like(counts, full), columns.expand(1, 1, rows, every).contiguous(),
        BLOCK_SIZE=(block, block), mask_mod=visible, seq_lengths=(size, cell.rows),
    )  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=False)
    packed = q.transpose(0, 1)[None].contiguous()
    options: dict[str, Any] = {
        "block_mask": blocks,
        "enable_gqa": cell.query_heads != cell.kv_heads,
        "kernel_options": {"BLOCK_M": min(64, max(16, size * cell.heads.group))} if size < 128 else None,
    }

    def call(k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(packed, k, v, **options)[0].transpose(0, 1)
        return out

    return [partial(call, k, v) for k, v in kv]


def _one_sequence(cell: Cell) -> None:
    if cell.batch > 1:
        raise NotImplementedError("one sequence only")


def _paged(cell: Cell, kv: KV, page: int = PAGE) -> KV:
    """Copies ``[B, H_kv, S, D]`` into pages ``[pages, page, H_kv, D]``, with each sequence padded."""
    pages = -(-cell.rows // page)

    def one(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, pages * page - cell.rows)).transpose(1, 2)
        return padded.reshape(cell.batch * pages, page, cell.kv_heads, cell.dim).contiguous()

    return [(one(k), one(v)) for k, v in kv]


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _space(filled: bool = False) -> Tensor:
    """Returns the workspace of FlashInfer."""
    return (torch.zeros if filled else torch.empty)(256 * 2**20, dtype=torch.uint8, device="cuda")


def _wrapper(
    cell: Cell, rows: int, first_page: int = 0, mask: Tensor | None = None, decode: bool = False
) -> Any:
    """Returns FlashInfer's wrapper, planned for ``rows`` KV positions from page ``first_page`` on."""
    import flashinfer

    _one_sequence(cell)
    pages = -(-rows // PAGE)
    used = torch.arange(first_page, first_page + pages, dtype=torch.int32, device="cuda")
    table = (_ints(0, pages), used, _ints(rows - (pages - 1) * PAGE))
    heads = (cell.query_heads, cell.kv_heads, cell.dim, PAGE)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if decode:
        made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_space(), "NHD", use_tensor_cores=True)
        made.plan(*table, *heads, **dtypes)
    else:
        made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_space(), "NHD", backend="fa2")
        flat = None if mask is None else mask.flatten()
        made.plan(_ints(0, cell.size), *table, *heads, custom_mask=flat, **dtypes)
    return made


def _runs(wrapper: Any, cell: Cell, q: Tensor, kv: KV) -> Calls:
    return [partial(wrapper.run, q, pages) for pages in _paged(cell, kv)]


def flashinfer_full_mask(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """Makes calls of FlashInfer fa2 on pages, with one custom mask over all positions."""
    return _runs(_wrapper(cell, cell.rows, mask=dense_mask(cell)), cell, q, kv)


def flashinfer_decode(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """Makes calls of FlashInfer's decode kernel, for one query."""
    if cell.size > 1:
        raise NotImplementedError("one query only")
    return _runs(_wrapper(cell, cell.rows, decode=True), cell, q, kv)


def flashinfer_cascade(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """Makes calls of FlashInfer fa2 on the prefix, and on the tree with a mask, and merges both in place."""
    import flashinfer

    if cell.length % PAGE:
        raise NotImplementedError("the tree must begin on a page")
    prefix = _wrapper(cell, cell.length)
    tree = _wrapper(cell, cell.size, cell.length // PAGE, tree_mask(cell.size))

    def call(pages: tuple[Tensor, Tensor]) -> Tensor:
        out, lse = prefix.run(q, pages, return_lse=True)
        other, other_lse = tree.run(q, pages, return_lse=True)
        flashinfer.merge_state_in_place(out, lse, other, other_lse)
        merged: Tensor = out
        return merged

    return [partial(call, pages) for pages in _paged(cell, kv)]


def flashinfer_xqa(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """Makes calls of FlashInfer XQA with a bit mask of the tree; it is compiled for each tree size."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    paged = _paged(cell, kv)
    halves = 2 * -(-cell.size // 32)
    bits = torch.zeros(cell.size, halves * 16, dtype=torch.int32, device="cuda")
    bits[:, : cell.size] = tree_mask(cell.size).int()
    packed = (bits.view(cell.size, halves, 16) << torch.arange(16, device="cuda")).sum(-1)
    mask = packed.int().to(torch.int16).view(torch.uint16)[None].expand(cell.batch, -1, -1).contiguous()
    tables = torch.arange(paged[0][0].shape[0], dtype=torch.int32, device="cuda").view(cell.batch, -1)
    lengths = torch.full((cell.batch,), cell.rows, dtype=torch.int32, device="cuda").view(torch.uint32)
    space = _space(filled=True)

    def call(pages: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = xqa_batch_decode_with_kv_cache(
            q, pages, space, tables, lengths, cell.rows, bmm1_scale=cell.dim**-0.5, bmm2_scale=1.0,
            kv_layout="NHD", q_len_per_req=cell.size, mask=mask if cell.size > 1 else None,
        )  # fmt: skip
        return out

    return [partial(call, pages) for pages in paged]


def flash_attention(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """Makes calls of flash-attn's decoding kernel on pages, for one query, because it has no tree mask."""
    from flash_attn import flash_attn_with_kvcache

    if cell.size > 1:
        raise NotImplementedError("one query only: it takes no mask of a tree")
    lengths = torch.full((cell.batch,), cell.rows, dtype=torch.int32, device=q.device)
    table = torch.arange(cell.batch * -(-cell.rows // _FLASH_PAGE), dtype=torch.int32, device=q.device)
    table = table.view(cell.batch, -1)

    def call(k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q[:, None], k, v, cache_seqlens=lengths, block_table=table, softmax_scale=cell.dim**-0.5
        )
        return out[:, 0]

    return [partial(call, k, v) for k, v in _paged(cell, kv, _FLASH_PAGE)]


PEERS: dict[str, Peer] = {
    "SDPA dense mask": sdpa,
    "FlexAttention": flex,
    "FlashInfer fa2 full mask": flashinfer_full_mask,
    "FlashInfer fa2 cascade": flashinfer_cascade,
    "FlashInfer decode": flashinfer_decode,
    "FlashInfer XQA": flashinfer_xqa,
    "flash-attn": flash_attention,
}


def peers(cell: Cell, kv: KV, names: Sequence[str]) -> dict[str, float | str]:
    """Returns the microseconds of each peer on this cell, or why it has no time."""
    q = torch.randn(cell.batch * cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
    trees = [tree_mask(cell.size)] * cell.batch
    plan = plan_trees(cell.heads, trees, [cell.length] * cell.batch, device="cuda")
    attention = backend("triton").trees(plan, q.dtype)
    ours = attention.run(q, Stored(*kv[0]), AttentionParams(cell.dim**-0.5))
    return {name: compared(partial(PEERS[name], cell, q, kv), ours) for name in names}


def compared(make: Callable[[], Calls], expected: Tensor, most: float = 2e-2) -> float | str:
    """Returns the microseconds of a call, or why there is no time.

    Args:
        make: makes the calls, each of which returns the output.
        expected: output of the first call.
        most: largest relative difference from ``expected`` of a correct result.
    """
    device, calls = expected.device, Calls()
    try:
        calls = make()
        difference = (calls[0]().reshape(expected.shape).float() - expected.float()).norm()
        relative = (difference / expected.float().norm()).item()
        if not relative < most:
            return f"another result: relative difference {relative:.3g}"
        return round(median_us(calls, device), 2)
    except ImportError:
        return "not installed"
    except Exception as error:
        return f"cannot run: {type(error).__name__}: {str(error)[:120]}"
    finally:
        del calls
        if device.type == "cuda":
            torch.cuda.empty_cache()


# FlashInfer compiles modules at their first use, for prefill, decode, and XQA per tree size and group.
_BUILDS = [
    ("FlashInfer fa2 cascade", Cell(32, 8, 128, 16)), ("FlashInfer decode", Cell(32, 8, 128, 1)),
    *(("FlashInfer XQA", Cell(32, 8, 128, size)) for size in (1, 16, 64, 256)),
    *(("FlashInfer XQA", Cell(32, 32, 128, size)) for size in (16, 64)),
]  # fmt: skip


def build() -> None:
    """Compiles the modules of the peers in parallel."""
    if len(sys.argv) > 2:
        name, cell = _BUILDS[int(sys.argv[2])]
        print(name, cell, peers(cell, random_kv(cell)[:2], [name]), flush=True)
        return
    command = [sys.executable, "-m", "scripts.benchmarks.attention.peers", "--build"]
    for process in [subprocess.Popen([*command, str(i)]) for i in range(len(_BUILDS))]:
        process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] != ["--build"]:
        sys.exit("--build compiles the peers; python -m scripts.benchmarks tree_attention times them")
    build()
