"""Peers of the tree-attention benchmark, each at the best its own options allow.

Every peer computes the same function on the same KV and is checked against ours before it is timed;
a peer that is not installed, cannot run a cell, or gives another result is reported as the reason
instead of a time.
"""

import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.attention.problems import Cell, random_kv, tree_mask
from scripts.benchmarks.common.timing import time_calls
from triforce_tree.kernels.attention.launch import run
from triforce_tree.kernels.attention.plan import plan_trees

PAGE = 64
KV = list[tuple[Tensor, Tensor]]
# From a cell, its queries and one KV pair, a peer makes a call that returns the output.
Peer = Callable[[Cell, Tensor, Tensor, Tensor], Callable[[], Tensor]]


def dense_mask(cell: Cell) -> Tensor:
    """Bool ``[T, L + T]``."""
    mask = torch.ones(cell.size, cell.rows, dtype=torch.bool, device="cuda")
    mask[:, cell.length :] = tree_mask(cell.size)
    return mask


def sdpa(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """torch's own attention with a dense mask: what most tree decoders use."""
    mask = _shared(cell, "sdpa", lambda: dense_mask(cell)[None, None])
    packed = q.view(cell.batch, cell.size, cell.query_heads, cell.dim).transpose(1, 2)

    def call() -> Tensor:
        grouped = cell.query_heads != cell.kv_heads
        return F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, enable_gqa=grouped)

    return lambda: call().transpose(1, 2).reshape(q.shape)


def flex(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlexAttention, max-autotune, a mask on the last blocks only, BLOCK_M set to compile."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if cell.batch > 1:
        raise NotImplementedError("one sequence only")

    def prepare() -> tuple:
        mask, length, size, block = tree_mask(cell.size), cell.length, cell.size, 128

        def seen(b, h, row, column):
            inside = (column - length).clamp(0, size - 1)
            return (column < length) | mask[row.clamp(0, size - 1), inside]

        full, every = length // block, -(-cell.rows // block)
        rows = -(-size // block)
        columns = torch.arange(every, dtype=torch.int32, device="cuda")
        order = columns.roll(-full).expand(1, 1, rows, every).contiguous()
        counts = torch.full((1, 1, rows), every - full, dtype=torch.int32, device="cuda")
        blocks = BlockMask.from_kv_blocks(
            counts, order, torch.full_like(counts, full), columns.expand(1, 1, rows, every).contiguous(),
            BLOCK_SIZE=(block, block), mask_mod=seen, seq_lengths=(size, cell.rows),
        )  # fmt: skip
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=False)
        return blocks, compiled

    blocks, compiled = _shared(cell, "flex", prepare)
    packed = q.transpose(0, 1)[None].contiguous()
    options = {"BLOCK_M": min(64, max(16, cell.size * cell.heads.group))} if cell.size < 128 else None
    grouped = cell.query_heads != cell.kv_heads

    def call() -> Tensor:
        return compiled(packed, k, v, block_mask=blocks, enable_gqa=grouped, kernel_options=options)

    return lambda: call()[0].transpose(0, 1)


def _paged(cell: Cell, k: Tensor) -> Tensor:
    """``[B, H_kv, S, D]`` into pages ``[pages, page, H_kv, D]``, each sequence padded."""
    pages = -(-cell.rows // PAGE)
    padded = F.pad(k, (0, 0, 0, pages * PAGE - cell.rows)).transpose(1, 2)
    return padded.reshape(cell.batch * pages, PAGE, cell.kv_heads, cell.dim).contiguous()


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _space(filled: bool = False) -> Tensor:
    """The workspace that FlashInfer asks for."""
    return (torch.zeros if filled else torch.empty)(256 * 2**20, dtype=torch.uint8, device="cuda")


def _heads(cell: Cell) -> tuple[int, int, int, int]:
    return cell.query_heads, cell.kv_heads, cell.dim, PAGE


def _prefill_wrapper(cell: Cell, rows: int, first_page: int, mask: Tensor | None):
    import flashinfer

    if cell.batch > 1:
        raise NotImplementedError("one sequence only")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_space(), "NHD", backend="fa2")
    pages = -(-rows // PAGE)
    used = torch.arange(first_page, first_page + pages, dtype=torch.int32, device="cuda")
    wrapper.plan(
        _ints(0, cell.size), _ints(0, pages), used, _ints(rows - (pages - 1) * PAGE), *_heads(cell),
        custom_mask=None if mask is None else mask.flatten(),
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return wrapper


def flashinfer_full_mask(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashInfer fa2, paged, the tree as one custom mask over all rows."""
    pages = _paged(cell, k), _paged(cell, v)
    wrapper = _shared(cell, "full", lambda: _prefill_wrapper(cell, cell.rows, 0, dense_mask(cell)))
    return lambda: wrapper.run(q, pages)


def flashinfer_cascade(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashInfer fa2 by hand: prefix without a mask, T x T tree with one, merge_state in place."""
    import flashinfer

    if cell.length % PAGE:
        raise NotImplementedError("the tree must begin on a page")
    pages = _paged(cell, k), _paged(cell, v)

    def prepare() -> tuple:
        tree = _prefill_wrapper(cell, cell.size, cell.length // PAGE, tree_mask(cell.size))
        return _prefill_wrapper(cell, cell.length, 0, None), tree

    prefix, tree = _shared(cell, "cascade", prepare)

    def call() -> Tensor:
        out, lse = prefix.run(q, pages, return_lse=True)
        other, other_lse = tree.run(q, pages, return_lse=True)
        flashinfer.merge_state_in_place(out, lse, other, other_lse)
        return out

    return call


def flashinfer_decode(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's decode kernel: one query only."""
    import flashinfer

    if cell.size > 1 or cell.batch > 1:
        raise NotImplementedError("one query only")
    pages = _paged(cell, k), _paged(cell, v)

    def prepare():
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_space(), "NHD", use_tensor_cores=True)
        count = -(-cell.rows // PAGE)
        used = torch.arange(count, dtype=torch.int32, device="cuda")
        kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(_ints(0, count), used, _ints(cell.rows - (count - 1) * PAGE), *_heads(cell), **kinds)
        return wrapper

    wrapper = _shared(cell, "decode", prepare)
    return lambda: wrapper.run(q, pages)


def flashinfer_xqa(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashInfer XQA: draft-block bit mask, lengths on the device, one build per tree size."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    pages = _paged(cell, k), _paged(cell, v)

    def prepare() -> tuple:
        halves = 2 * -(-cell.size // 32)
        bits = torch.zeros(cell.size, halves * 16, dtype=torch.int32, device="cuda")
        bits[:, : cell.size] = tree_mask(cell.size).int()
        packed = (bits.view(cell.size, halves, 16) << torch.arange(16, device="cuda")).sum(-1)
        mask = packed.int().to(torch.int16).view(torch.uint16)[None].expand(cell.batch, -1, -1).contiguous()
        count = pages[0].shape[0] // cell.batch
        tables = torch.arange(cell.batch * count, dtype=torch.int32, device="cuda")
        lengths = torch.full((cell.batch,), cell.rows, dtype=torch.int32, device="cuda")
        return mask, tables.view(cell.batch, count), lengths.view(torch.uint32), _space(filled=True)

    mask, tables, lengths, space = _shared(cell, "xqa", prepare)
    return lambda: xqa_batch_decode_with_kv_cache(
        q, pages, space, tables, lengths, cell.rows, bmm1_scale=cell.dim**-0.5, bmm2_scale=1.0,
        kv_layout="NHD", q_len_per_req=cell.size, mask=mask if cell.size > 1 else None,
    )  # fmt: skip


PEERS: dict[str, Peer] = {
    "SDPA dense mask": sdpa,
    "FlexAttention": flex,
    "FlashInfer fa2 full mask": flashinfer_full_mask,
    "FlashInfer fa2 cascade": flashinfer_cascade,
    "FlashInfer decode": flashinfer_decode,
    "FlashInfer XQA": flashinfer_xqa,
}

_made: dict[tuple[Cell, str], object] = {}


def _shared(cell: Cell, name: str, make: Callable[[], object]):
    """What a peer prepares once per cell (plans, compiled code), not once per KV copy."""
    key = (cell, name)
    if key not in _made:
        _made[key] = make()
    return _made[key]


def peers(cell: Cell, kv: KV, names: list[str]) -> dict[str, float | str]:
    """Microseconds of each peer on this cell, or why it has none."""
    q = torch.randn(cell.batch * cell.size, cell.query_heads, cell.dim, device="cuda").bfloat16()
    trees = [tree_mask(cell.size)] * cell.batch
    plan = plan_trees(cell.heads, trees, [cell.length] * cell.batch, device="cuda")
    ours, _ = run(q, *kv[0], plan, scale=cell.dim**-0.5)
    found: dict[str, float | str] = {}
    for name in names:
        calls: list = []
        try:
            calls = [PEERS[name](cell, q, k, v) for k, v in kv]
            difference = (calls[0]().reshape(q.shape).float() - ours.float()).norm() / ours.float().norm()
            if not difference < 2e-2:
                found[name] = f"another result: relative difference {difference.item():.3g}"
                continue
            found[name] = round(time_calls(calls), 2)
        except ImportError:
            found[name] = "not installed"
        except Exception as error:
            found[name] = f"cannot run: {type(error).__name__}: {str(error)[:120]}"
        finally:
            del calls
            _made.clear()
            torch.cuda.empty_cache()
    return found


# FlashInfer compiles at first use: modules of prefill and decode, one of XQA per tree and group.
_BUILDS = [
    ("FlashInfer fa2 cascade", Cell(32, 8, 128, 16)), ("FlashInfer decode", Cell(32, 8, 128, 1)),
    *(("FlashInfer XQA", Cell(32, 8, 128, size)) for size in (1, 16, 64, 256)),
    *(("FlashInfer XQA", Cell(32, 32, 128, size)) for size in (16, 64)),
]  # fmt: skip


def build() -> None:
    """Compile what the peers need, in parallel."""
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
