"""Every kind of launch that the choice of tiles can come to, as calls on CPU tensors that are never run.

The values of the tensors do not matter, and their sizes only as far as the choice looks at them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention import launch, merge, triton_backend
from triforce_tree.kernels.attention.blocks import launch as blocks
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.configs import choose as choose_attention
from triforce_tree.kernels.attention.exact import launch as exact
from triforce_tree.kernels.attention.exact.attention import ExactAttention
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, pack_mask, plan_trees
from triforce_tree.kernels.attention.prefixes import PrefixPlan
from triforce_tree.kernels.device import Device
from triforce_tree.kernels.exchange import chunks_kernels as exchange_kernels
from triforce_tree.kernels.exchange import experts_kernels, link_kernels
from triforce_tree.kernels.linear import experts_kernels as linear_experts
from triforce_tree.kernels.linear import launch as linear
from triforce_tree.kernels.linear.configs import choose, counters_for, row_block
from triforce_tree.kernels.linear.reference import blocks_of
from triforce_tree.kernels.norm.launch import row_rms_norm
from triforce_tree.kernels.pointwise import launch as pointwise
from triforce_tree.kernels.pointwise.reference import ACTIVATIONS
from triforce_tree.kernels.probs import softmax_kernels, truncation_kernels
from triforce_tree.kernels.recurrent import recurrence_kernels
from triforce_tree.kernels.step import accept_kernels as accept
from triforce_tree.kernels.step import grow_kernels as grow
from triforce_tree.kernels.step import kv_slots_kernels, place_kernels
from triforce_tree.kernels.step import select_kernels as select
from triforce_tree.kernels.step import traversal_kernels as traversal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.int8: "int8"}
# Widths of keys and values; multi-head latent attention (DeepSeek-V3; MiniCPM3) has two.
WIDTHS = (*((dim, dim) for dim in (64, 80, 96, 128, 256, 512)), (192, 128), (96, 64))
_PAGES = {"chunks": 8, "chunks of 32": 32, "pages": 128}  # slots of a page
_BITS = (16, 8, 4)


class Variant(NamedTuple):
    """One launch: what it is, and the call."""

    name: str
    call: Callable[[], object]


def every(name: str, call: Callable[..., object], **axes: Iterable[Any]) -> Iterator[Variant]:
    """Yields ``call`` with every combination of keyword arguments, which ``name`` has places for."""
    for values in product(*axes.values()):
        given = dict(zip(axes, values, strict=True))
        shown = {
            axis: _width(value) if axis == "dims" else NAMES.get(value, value)
            for axis, value in given.items()
        }
        yield Variant(name.format(**shown), partial(call, **given))


def _width(dims: tuple[int, int]) -> str:
    return f"head_dim {dims[0]}" if dims[0] == dims[1] else f"head_dim {dims[0]} and {dims[1]}"


def variants(device: Device) -> Iterator[Variant]:
    """Yields all variants for a GPU, whose tiles decide which row counts differ."""
    yield from _attention(device)
    yield from _linears(device)
    if device.ptx:
        yield from _link()
    for always in (_attention_over_any_cache, _exact, _kv_slots, _trees, _exchange, _experts, _layers):
        yield from always()


def _ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


_int32 = partial(_ints, dtype=torch.int32)


def _attention(device: Device) -> Iterator[Variant]:
    for dtype, dims, group in product((BF16, FP16, FP32), WIDTHS, (1, 4)):
        tiles: dict[object, int] = {}
        for queries in (1, 16, 32, 64, 128):
            tile = choose_attention(queries * group, dims[0], dtype.itemsize, device, dims[1])
            tiles.setdefault(tile, queries)
        # fp16 and GQA in fp32 differ from bf16 and MHA by no more than types and one division.
        few = dtype == FP16 or (dtype == FP32 and group > 1)
        kinds = ("dense",) if few else ("dense", *_PAGES, "window", "batch")
        call = partial(_attend, dtype=dtype, dims=dims, group=group)
        name = f"{{kind}}, {NAMES[dtype]}, {_width(dims)}, {{queries}} x {group} rows"
        yield from every(name, call, queries=tiles.values(), kind=kinds)


def _attend(
    kind: str, dtype: torch.dtype, dims: tuple[int, int], queries: int, group: int = 4, int8: bool = False
) -> None:
    batch, heads = 2 if kind == "batch" else 1, Heads(2 * group, 2, *dims)
    mask = torch.ones(queries, queries, dtype=torch.bool)
    stored = torch.int8 if int8 else dtype
    page = _PAGES.get(kind, 0)
    plan = plan_trees(heads, [mask] * batch, [512] * batch, device="cpu")
    q = torch.zeros(plan.queries, heads.query, heads.dim, dtype=dtype)
    slots = (8, 2, page) if page else (batch, 2, 1024)
    k, v = (torch.zeros(*slots, dim, dtype=stored) for dim in dims)
    scales = (torch.zeros(*slots, 1), torch.zeros(*slots, 1)) if int8 else None
    table = _int32(1, 2, 128) if page else None
    first = _ints(queries) if kind == "window" else None
    softcap, sinks = (5.0, torch.zeros(heads.query)) if kind == "window" else (None, None)
    params = AttentionParams(0.1, softcap=softcap, sinks=sinks)
    launch.prepare(plan, dtype, stored, page).run(q, KV(k, v, table, scales), params, first)


def _attention_over_any_cache() -> Iterator[Variant]:
    """Yields attention over int8, over prefixes that sequences share, and by blocks of queries; merges."""
    name, int8 = "{kind}, int8 for {dtype}, {dims}, {queries} x 4 rows", partial(_attend, int8=True)
    kinds = ("dense", "chunks", "window")
    yield from every(name, int8, kind=kinds, dtype=(BF16,), dims=WIDTHS, queries=(1, 16))
    yield from every(name, int8, kind=kinds[:2], dtype=(FP16, FP32), dims=((128, 128),), queries=(1, 16))
    name, dims = "prefixes, {dtype} of {stored}, head_dim {dim}, 32 x {queries} x 4 rows", (64, 128, 256)
    kept = (BF16, torch.int8)
    yield from every(name, _share, dtype=(BF16,), dim=dims, queries=(1, 8, 16), stored=kept)
    yield from every(name, _share, dtype=(FP32,), dim=dims, queries=(16,), stored=(FP32,))
    name = "blocks of {queries} x 4 rows, {dtype}, {dims}, pages of {page}"
    # Slots of a page: whole tiles, and gathered positions alone.
    yield from every(name, _attend_blocks, dtype=(BF16,), dims=WIDTHS, queries=(4, 64), page=(64, 16))
    yield from every(name, _attend_blocks, dtype=(FP32,), dims=WIDTHS, queries=(4, 64), page=(64,))
    yield from every("merge, {dtype}, head_dim {dim}", _merge, dtype=(BF16, FP32), dim=(64, 256, 512))


def _share(dtype: torch.dtype, dim: int, queries: int, stored: torch.dtype) -> None:
    """Many sequences in pages that share prefixes: a launch for these, and one for the rest."""
    heads, page, batch = Heads(8, 2, dim), _PAGES["pages"], 32
    mask = torch.ones(queries, queries, dtype=torch.bool)
    plan = PrefixPlan(heads, mask, batch, 6, _int32(batch), pack_mask(mask).repeat(batch, 1))
    q = torch.zeros(batch * queries, heads.query, heads.dim, dtype=dtype)
    k, v = (torch.zeros(8, heads.kv, page, heads.dim, dtype=stored) for _ in range(2))
    scale = torch.zeros(8, heads.kv, page, 1)
    scales = (scale, scale.clone()) if stored == torch.int8 else None
    attention = triton_backend.TritonBackend().prefixes(plan, dtype, stored, page)
    attention.run(q, KV(k, v, _int32(batch, 8), scales), AttentionParams(0.1))


def _attend_blocks(dtype: torch.dtype, dims: tuple[int, int], queries: int, page: int) -> None:
    heads = Heads(8, 2, *dims)
    plan = BlockPlan(heads, queries, 8, 8 * queries, 0, 16, page, device=torch.device("cpu"), dtype=dtype)
    q = torch.zeros(queries, heads.query, heads.dim, dtype=dtype)
    k, v = (torch.zeros(2, 16, page, dim, dtype=dtype).transpose(0, 1) for dim in dims)
    softcap, sinks = (5.0, torch.zeros(heads.query)) if queries == 4 else (None, None)
    blocks.run(q, k, v, plan, scale=0.1, softcap=softcap, sinks=sinks)


def _merge(dtype: torch.dtype, dim: int) -> None:
    merge.merge_states(torch.zeros(3, 1, 2, 256, dim, dtype=dtype), torch.zeros(3, 1, 2, 256))
    q, lse = torch.zeros(1, 16, 2, dim, dtype=dtype).transpose(1, 2), torch.zeros(1, 2, 16)
    merge.merge_parts([q] * 3, [lse] * 3)


def _exact() -> Iterator[Variant]:
    """Yields kernels of bit-exact mode; attention has tiles for any number of queries."""
    name = "exact {kind}, {dtype}, {dims}"
    yield from every(name, _attend_exactly, kind=("dense", "window"), dtype=(BF16,), dims=WIDTHS)
    yield from every(name, _attend_exactly, kind=("dense",), dtype=(FP16,), dims=((128, 128),))
    shapes = (4096, 4096), (4096, 11_008)
    yield from every("pinned linear, bf16, {shape[0]} x {shape[1]}", _multiply_pinned, shape=shapes)
    name = "row norm, bf16, {columns} columns, late {late}"
    yield from every(name, _normalise, columns=(128, 4096), late=(False, True))


def _attend_exactly(kind: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    slots, table = ((16, 2, 128), _int32(1, 8)) if kind == "window" else ((1, 2, 1024), None)
    k, v = (torch.zeros(*slots, dim, dtype=dtype) for dim in dims)
    window = (512, 5.0, torch.zeros(8, dtype=dtype)) if kind == "window" else ()
    q, mask = torch.zeros(16, 8, dims[0], dtype=dtype), _ints(1, 16, 1)
    params = AttentionParams(0.1, *window)
    exact.attention(ExactAttention(q=q, kv=KV(k, v, table), params=params, lengths=_int32(1), mask=mask))


def _multiply_pinned(shape: tuple[int, int]) -> None:
    x, weight = torch.zeros(16, shape[1], dtype=BF16), torch.zeros(shape, dtype=BF16)
    linear.pinned_linear(x, weight, None, _int32(-(-shape[0] // 32)))


def _normalise(columns: int, late: bool) -> None:
    row_rms_norm(torch.zeros(16, columns, dtype=BF16), torch.zeros(columns, dtype=BF16), 1e-6, 0.0, late)


def _linears(device: Device) -> Iterator[Variant]:
    """Yields linear layers with few rows; row counts with equal tiles on the device are compiled once."""
    kinds, square, name = ("fp16", "bias", "fused", "unaligned"), (4096, 4096), "{shape[0]} x {shape[1]}"
    shapes = (
        *((outs, 4096) for outs in (768, 2048, 4096, 8192, 12_288, 22_016, 28_672)),
        (768, 768),
        (4096, 768),
    )
    for bits in _BITS:
        for count in (16, 32, 64, 128):
            kernels = {}
            for out, ins in shapes:
                config = choose(bits, count, out, ins, device)
                # The number of splits is no constant of the kernel, but whether there are any is.
                key = config.block_n, config.width, config.warps, config.stages, config.tma, config.splits > 1
                kernels.setdefault(key, (out, ins))
            label, call = f"{bits} bits, {row_block(count)} rows, {name}", partial(_multiply, bits, count)
            yield from every(label, call, shape=kernels.values())
        call = partial(_multiply, bits, 16, square)
        yield from every(f"{bits} bits, 16 rows, 4096 x 4096, {{kind}}", call, kind=kinds)
    # Without tensor cores, where the device has such a configuration.
    call = partial(_multiply, 16, 1)
    yield from every(f"one row, {name}", call, shape=(square, (12_288, 4096), (4096, 14_336)))
    yield from every("one row, 4096 x 4096, {kind}", partial(call, square), kind=kinds)


def _multiply(bits: int, count: int, shape: tuple[int, int], kind: str = "") -> None:
    (out, ins), dtype = shape, FP16 if kind == "fp16" else BF16
    x = torch.zeros(count, ins, dtype=dtype)
    bias = torch.zeros(out, dtype=dtype) if kind == "bias" else None
    width, words, scales = _stored((out,), ins, bits, dtype, 4 if kind == "unaligned" else 0)
    words, counters = words[:, :width], counters_for(out)
    if kind == "fused":
        linear.linears(x, [words] * 3, [] if scales is None else [scales] * 3, [], [counters] * 3, bits)
    elif scales is None:
        linear.linear(x, words, bias, counters)
    else:
        linear.low_bit_linear(x, words, scales, bias, bits, counters)


def _stored(
    outs: tuple[int, ...], ins: int, bits: int, dtype: torch.dtype, more: int = 0
) -> tuple[int, Tensor, Tensor | None]:
    """Returns the columns that packed weights take, the weights with ``more`` columns, and their scales."""
    blocks = 0 if bits == 16 else blocks_of(ins, bits)
    width = 128 * blocks or ins
    words = torch.zeros(*outs, width + more, dtype=dtype if bits == 16 else torch.int16)
    scales = {16: None, 8: torch.zeros(outs), 4: torch.zeros(blocks, math.prod(outs), 4, dtype=BF16)}
    return width, words, scales[bits]


def _experts() -> Iterator[Variant]:
    """Yields linear layers of routed experts, and the copies of those that are in host memory."""
    name = "experts, {bits} bits, {tokens} tokens, {kind}"
    yield from every(name, _route, bits=_BITS, tokens=(1, 16, 64), kind=("bf16",))
    yield from every(name, _route, bits=_BITS, tokens=(1,), kind=("fp16", "bias"))
    yield from every("choice of {experts} experts", _choose_experts, experts=(8, 128, 512))
    yield from every("experts from the host, {dtype}", _fetch_experts, dtype=(BF16, torch.int16, FP32))


def _route(bits: int, tokens: int, kind: str) -> None:
    dtype, experts, out, ins = FP16 if kind == "fp16" else BF16, 4, 1536, 2048
    _, words, scales = _stored((experts, out), ins, bits, dtype)
    bias = torch.zeros(experts, out, dtype=dtype) if kind == "bias" else None
    x = torch.zeros(tokens, ins, dtype=dtype)
    linear_experts.expert_linear(x, _ints(tokens, 4), words, scales, bias, bits)


def _choose_experts(experts: int) -> None:
    held = _int32(experts)
    experts_kernels.choose_experts(_ints(16, 8), held, held.clone(), _int32(1), _ints(1), 3)


def _fetch_experts(dtype: torch.dtype) -> None:
    slots = torch.zeros(8, 4096, dtype=dtype)
    experts_kernels.fetch_experts(slots, slots.clone(), _int32(8), _int32(1))


def _kv_slots() -> Iterator[Variant]:
    plain = (
        "append",
        "move 64",
        "move 1024",
        "append in pages",
        "move in pages",
        "means",
        "means and variances",
    )
    name, dtypes = "{how}, {dtype}, {dims}", (BF16, FP32)
    yield from every(name, _use_slots, how=plain, dtype=dtypes, dims=WIDTHS[1:])
    name, int8 = "{how}, int8 for {dtype}, {dims}", partial(_use_slots, int8=True)
    yield from every(name, int8, how=("append", "means"), dtype=dtypes, dims=WIDTHS[1:])
    # Chunks that registers hold, and more than they hold.
    name, chunks = (
        "choice of {chunks} chunks, head_dim {dim}, group {group}, {moments} moments",
        (512, 15_360, 131_072),
    )
    yield from every(name, _select, dim=(64, 96, 256, 512), group=(1, 4), chunks=chunks, moments=(1, 2))


def _use_slots(how: str, dtype: torch.dtype, dims: tuple[int, int], int8: bool = False) -> None:
    caches = [torch.zeros(3, 2, 2, 256, dim, dtype=torch.int8 if int8 else dtype) for dim in dims]
    scales, start = torch.zeros(3, 2, 2, 256, 1) if int8 else None, _ints(2)
    pages = {"table": _int32(2, 2), "page": 128} if how.endswith("pages") else {}
    if how.startswith("append"):
        held = (0, scales[0], scales[0].clone()) if scales is not None else ()
        fresh = [cache[0, :, :, :16].to(dtype) for cache in caches]
        kv_slots_kernels.append_kv(*(cache[0] for cache in caches), *fresh, start, *held, **pages)  # type: ignore[call-arg]
    elif how.startswith("move"):
        moves = _ints(2, 64 if how == "move 64" else 1024)
        kv_slots_kernels.move_kv(*caches, moves, start, **pages)  # type: ignore[call-arg]
    else:
        means = torch.zeros(3, 2, 2, 32, dims[0] * (2 if "variances" in how else 1), dtype=dtype)
        kv_slots_kernels.chunk_means(means, caches[0], start, 4, 8, scales)


def _select(dim: int, group: int, chunks: int, moments: int) -> None:
    q, means = torch.zeros(1, group, dim, dtype=BF16), torch.zeros(1, 1, chunks, moments * dim, dtype=BF16)
    select.select_chunks(q, means, _ints(1), _int32(1, 1, 256), 160, 0.1)


def _trees() -> Iterator[Variant]:
    """Yields the growth of trees, and the acceptance of their tokens."""
    yield from every("acceptance of {nodes} nodes", _accept, nodes=(16, 64, 256))
    yield from every("runner-ups, {how}", _take_second, how=("sampled", "greedy"))
    buffers = (_ints(2, 4), _ints(2, 20), _ints(2, 64), _ints(4, 2), _int32(2), _ints(2, 512))
    rest = (_ints(2), _ints(2), _ints(20), _ints(4))
    yield Variant("first inputs of a tree", partial(place_kernels.begin_tree, *buffers, *rest))
    name, entries = "{draws} {how} of {vocabulary} entries", (4096, 32_000, 128_256)
    yield from every(name, _expand, vocabulary=entries, draws=(1, 8, 16), how=("draws", "most likely"))
    name, sizes = "{where} places of {size[0]} x {size[1]}", ((1, 1), (8, 8), (64, 32))
    yield from every(name, _place, size=sizes, where=("likeliest", "given"))
    yield from every("softmax of {entries} entries", _softmax, entries=(32_000, 128_256))
    yield from every("truncation of {entries} entries", _truncate, entries=(32_000, 128_256, 262_144))


def _accept(nodes: int) -> None:
    tree, probs = _ints(1, nodes), torch.zeros(1, 2, 4096)
    p = probs[:, :1].expand(1, nodes, 4096)
    traversal.traverse_tree(tree, tree, p, probs, tree, torch.zeros(1, nodes), probs[:, 0], 12)
    accept.accept_greedy(tree, tree, tree, 12)


def _take_second(how: str) -> None:
    probs = torch.zeros(1, 12, 4096)
    accept.second_choice(probs, _ints(1, 12), None if how == "greedy" else probs)


def _expand(vocabulary: int, draws: int, how: str) -> None:
    logits, probs = torch.zeros(1, 4, vocabulary, dtype=BF16), torch.zeros(1, 4, vocabulary)
    temperature, noise = (torch.ones(()), probs.clone()) if how == "draws" else (None, None)
    grow.expand_nodes(logits, temperature, noise, probs, draws)


def _place(size: tuple[int, int], where: str) -> None:
    frontier, draws = size
    nodes, width = 64 if frontier < 64 else 128, min(32, frontier * draws)
    tree, words, mask = _ints(1, nodes), _ints(1, nodes, nodes // 64), _ints(width, nodes // 64)
    pairs = _ints(2, width) if where == "given" else None
    place_kernels.place_nodes(
        tree, tree.clone(), words, torch.zeros(1, nodes), _ints(1, width), mask, _ints(1, frontier, draws),
        torch.zeros(1, frontier, draws), pairs, 0, 0,
    )  # fmt: skip


def _softmax(entries: int) -> None:
    softmax_kernels.softmax_rows(torch.zeros(2, entries))


def _truncate(entries: int) -> None:
    options = _ints(1), _ints(1, dtype=torch.float64), _ints(1, dtype=torch.float64)
    truncation_kernels.truncate_scores(torch.zeros(1, 2, entries), *options)


def _exchange() -> Iterator[Variant]:
    yield from every("exchange of {slots} slots", _exchange_chunks, slots=(64, 2048))
    dims, name = ((96, 96), (256, 256), (192, 128), (512, 512)), "chunks of {chunk} from {where}, {dims}"
    yield from every(name, _fetch, dims=dims, chunk=(8, 64), where=("the host", "both memories"))
    words = _int32(4096)
    yield Variant("words from the host", partial(exchange_kernels.fetch_words, words, words.clone()))


def _link() -> Iterator[Variant]:
    yield Variant("the beginning of a transfer", partial(link_kernels.begin_transfer, _ints(1)))
    for name, count in (("one part", None), ("counted parts", _int32(8))):
        call = partial(link_kernels.end_transfer, _ints(2), _ints(1), count, 1 << 26, 25_000)
        yield Variant(f"the end of a transfer of {name}", call)


def _exchange_chunks(slots: int) -> None:
    held, chunks, moves = _int32(1, 2, slots), _int32(1, 2, 16 * slots), _int32(1, 2, 2, slots // 2)
    wanted, hand = held[..., : slots // 2].contiguous(), _int32(1, 2)
    exchange_kernels.exchange_chunks(held, chunks, wanted, hand, moves, hand.clone())


def _fetch(dims: tuple[int, int], chunk: int, where: str) -> None:
    k, v = (torch.zeros(2, 1024, dim, dtype=BF16) for dim in dims)
    on_host = torch.zeros(1024, Heads(2, 2, *dims).row, dtype=BF16)
    on_device = on_host[: 512 if where == "both memories" else 0]
    exchange_kernels.fetch_chunks(k, v, on_device, on_host, _int32(2, 2, 16), _int32(2), chunk)


def _layers() -> Iterator[Variant]:
    """Yields what else layers compute: recurrences, rotations, gates."""
    kinds = {
        "Mamba": (1, 1, 4096, 16), "Mamba-2": (1, 64, 64, 128), "gated delta": (16, 32, 128, 128),
        "Kimi delta": (32, 32, 128, 128),
    }  # fmt: skip
    for kind, shape in kinds.items():
        for how in ("read", "stored", "stored, read", "along paths"):
            yield Variant(f"{kind}, {how}", partial(_recur, kind, shape, how))
    for dtype, dim in product((BF16, FP32), (64, 256, 512)):
        name = f"rotary, {NAMES[dtype]} and {{wide}}, {{width}} of {dim} elements"
        yield from every(name, partial(_rotate, dtype, dim), width=(dim, dim // 4), wide=(FP32, dtype))
    yield from every("gated, {dtype}, {activation}", _gate, dtype=(BF16, FP32), activation=ACTIVATIONS)


def _recur(kind: str, shape: tuple[int, int, int, int], how: str) -> None:
    groups, heads, values, keys = shape
    rates = torch.zeros(heads, values, keys) if kind == "Mamba" else None
    decays = {"Mamba": values, "Kimi delta": keys}.get(kind, 1)
    v, read = torch.zeros(1, 5, heads, values), torch.zeros(1, 5, groups, keys)
    recurrence_kernels.linear_recurrence(
        torch.zeros(1, heads, values, keys), read, read.clone(), v, torch.zeros(1, 5, heads, decays), rates,
        torch.zeros(1, 5, heads) if "delta" in kind else None, _ints(1) if "stored" in how else None,
        None if how == "stored" else torch.zeros_like(v), _ints(1, 5, 3) if how == "along paths" else None,
    )  # fmt: skip


def _rotate(dtype: torch.dtype, dim: int, width: int, wide: torch.dtype) -> None:
    q, cos = torch.zeros(1, 16, 2, dim, dtype=dtype).transpose(1, 2), torch.zeros(1, 16, width, dtype=wide)
    pointwise.rotary(q, q, cos, cos)


def _gate(dtype: torch.dtype, activation: str) -> None:
    gate, up = torch.zeros(16, 22_016, dtype=dtype).chunk(2, -1)
    pointwise.gated(gate, up, activation)
