"""Every kind of launch that the choice of tiles can come to, as calls on CPU tensors that are never run.

The values of the tensors do not matter, and their sizes only as far as the choice looks at them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.checks.kernels_by_arch import blocks as query_blocks
from scripts.checks.kernels_by_arch import exact, linears, prefill
from triforce_tree.kernels.attention import launch, merge, triton_backend
from triforce_tree.kernels.attention.configs import choose as choose_attention
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, pack_mask, plan_trees
from triforce_tree.kernels.attention.prefixes import PrefixPlan
from triforce_tree.kernels.device import Device
from triforce_tree.kernels.exchange import chunks_kernels as exchange_kernels
from triforce_tree.kernels.exchange import experts_kernels
from triforce_tree.kernels.linear import experts_kernels as linear_experts
from triforce_tree.kernels.linear import reference as linear_reference
from triforce_tree.kernels.probs import softmax_kernels
from triforce_tree.kernels.recurrent import recurrence_kernels
from triforce_tree.kernels.step import accept_kernels as accept
from triforce_tree.kernels.step import grow_kernels as grow
from triforce_tree.kernels.step import kv_slots_kernels, place_kernels
from triforce_tree.kernels.step import select_kernels as select
from triforce_tree.kernels.step import traversal_kernels as traversal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
# Of keys and values: multi-head latent attention (DeepSeek-V3; MiniCPM3) has two.
WIDTHS = (*((dim, dim) for dim in HEAD_DIMS), (192, 128), (96, 64))
QUERIES = (1, 16, 32, 64, 128)
_PAGES = {"chunks": 8, "chunks of 32": 32, "pages": 128}  # slots of a page
VOCABULARIES = (4096, 32_000, 128_256)


class Variant(NamedTuple):
    """One launch: what it is, and the call."""

    name: str
    call: Callable[[], object]


def variants(device: Device) -> Iterator[Variant]:
    """Returns all variants for a GPU, whose tiles decide which row counts differ."""
    yield from _attention(device)
    yield from (Variant(*each) for each in linears.launches(device))
    for always in (_exact, _int8, _prefixes, _merges, _kv_slots, _retrieval, _acceptance, _growth):
        yield from always()
    for always in (_softmax, _exchange, _experts, _states):
        yield from always()
    for launches in (prefill.launches(), query_blocks.launches(WIDTHS)):
        yield from (Variant(*each) for each in launches)


def _ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


_int32 = partial(_ints, dtype=torch.int32)


def _attention(device: Device) -> Iterator[Variant]:
    for dtype, (dim, value_dim), group in product((BF16, FP16, FP32), WIDTHS, (1, 4)):
        heads = Heads(2 * group, 2, dim, value_dim)
        tiles: dict[object, int] = {}
        for queries in QUERIES:
            tile = choose_attention(queries * group, dim, dtype.itemsize, device, value_dim)
            tiles.setdefault(tile, queries)
        # fp16 and GQA in fp32 differ from bf16 and MHA by no more than types and one division.
        few = dtype == FP16 or (dtype == FP32 and group > 1)
        kinds = ("dense",) if few else ("dense", *_PAGES, "window", "batch")
        for queries, kind in product(tiles.values(), kinds):
            name = f"{kind}, {NAMES[dtype]}, {_label(dim, value_dim)}, {queries} x {group} rows"
            yield Variant(name, partial(_attend, kind, dtype, heads, queries))


def _label(dim: int, value_dim: int) -> str:
    return f"head_dim {dim}" if dim == value_dim else f"head_dim {dim} and {value_dim}"


def _attend(kind: str, dtype: torch.dtype, heads: Heads, queries: int, int8: bool = False) -> None:
    batch = 2 if kind == "batch" else 1
    mask = torch.ones(queries, queries, dtype=torch.bool)
    stored = torch.int8 if int8 else dtype
    page = _PAGES.get(kind, 0)
    plan = plan_trees(heads, [mask] * batch, [512] * batch, device="cpu")
    q = torch.zeros(plan.queries, heads.query, heads.dim, dtype=dtype)
    slots = (8, 2, page) if page else (batch, 2, 1024)
    k, v = (torch.zeros(*slots, dim, dtype=stored) for dim in (heads.dim, heads.value_dim))
    scales = (torch.zeros(*slots, 1), torch.zeros(*slots, 1)) if int8 else None
    table = _int32(1, 2, 128) if page else None
    first = _ints(queries) if kind == "window" else None
    softcap, sinks = (5.0, torch.zeros(heads.query)) if kind == "window" else (None, None)
    params = AttentionParams(0.1, softcap=softcap, sinks=sinks)
    launch.prepare(plan, dtype, stored, page).run(q, KV(k, v, table, scales), params, first)


def _prefixes() -> Iterator[Variant]:
    """Kernels of many sequences in pages, which share prefixes: a launch for these, and one for the rest."""
    for dtype, dim, queries, int8 in product((BF16, FP32), (64, 128, 256), (1, 8, 16), (False, True)):
        if dtype == BF16 or (queries == 16 and not int8):
            name = f"{NAMES[dtype]}, head_dim {dim}, 32 x {queries} x 4 rows"
            yield Variant(
                f"prefixes{', int8' * int8}, {name}", partial(_share, Heads(8, 2, dim), queries, dtype, int8)
            )


def _share(heads: Heads, queries: int, dtype: torch.dtype, int8: bool) -> None:
    mask, batch, page = torch.ones(queries, queries, dtype=torch.bool), 32, _PAGES["pages"]
    plan = PrefixPlan(heads, mask, batch, 6, _int32(batch), pack_mask(mask).repeat(batch, 1))
    q = torch.zeros(batch * queries, heads.query, heads.dim, dtype=dtype)
    stored = torch.int8 if int8 else dtype
    k, v = (torch.zeros(8, heads.kv, page, heads.dim, dtype=stored) for _ in range(2))
    scales = (torch.zeros(8, heads.kv, page, 1), torch.zeros(8, heads.kv, page, 1)) if int8 else None
    attention = triton_backend.TritonBackend().prefixes(plan, dtype, stored, page)
    attention.run(q, KV(k, v, _int32(batch, 8), scales), AttentionParams(0.1))


def _exact() -> Iterator[Variant]:
    """Kernels of bit-exact mode."""
    yield from (Variant(*each) for each in exact.variants(WIDTHS))


def _int8() -> Iterator[Variant]:
    """Kernels on keys and values in int8."""
    for dtype, (dim, value_dim), kind in product((BF16, FP16, FP32), WIDTHS, ("dense", "chunks", "window")):
        if dtype != BF16 and (dim != 128 or kind == "window"):
            continue
        heads = Heads(8, 2, dim, value_dim)
        for queries in (1, 16):
            name = f"{kind}, int8 for {NAMES[dtype]}, {_label(dim, value_dim)}, {queries} x 4 rows"
            yield Variant(name, partial(_attend, kind, dtype, heads, queries, True))
    start = _ints(2)
    for dtype, (dim, value_dim) in product((BF16, FP32), WIDTHS[1:]):
        caches = [torch.zeros(3, 2, 2, 256, width, dtype=torch.int8) for width in (dim, value_dim)]
        scales = [torch.zeros(3, 2, 2, 256, 1) for _ in caches]
        fresh = [cache[0, :, :, :16].to(dtype) for cache in caches]
        means = caches[0][..., :32, :].to(dtype)
        name = f"int8 for {NAMES[dtype]}, {_label(dim, value_dim)}"
        first = [cache[0] for cache in caches]
        append = partial(kv_slots_kernels.append_kv, *first, *fresh, start, 0, scales[0][0], scales[1][0])  # type: ignore[call-arg]
        yield Variant(f"append, {name}", append)
        mean = partial(kv_slots_kernels.chunk_means, means, caches[0], start, 4, 8, scales[0])
        yield Variant(f"means, {name}", mean)


def _merges() -> Iterator[Variant]:
    for dtype, dim in product((BF16, FP32), (64, 256, 512)):
        parts = torch.zeros(3, 1, 2, 256, dim, dtype=dtype), torch.zeros(3, 1, 2, 256)
        yield Variant(f"merge, {NAMES[dtype]}, head_dim {dim}", partial(merge.merge_states, *parts))


def _kv_slots() -> Iterator[Variant]:
    start = _ints(2)
    for dtype, (dim, value_dim) in product((BF16, FP32), WIDTHS[1:]):
        caches = [torch.zeros(3, 2, 2, 256, width, dtype=dtype) for width in (dim, value_dim)]
        name, means = f"{NAMES[dtype]}, {_label(dim, value_dim)}", caches[0][..., :32, :].clone()
        fresh = [cache[0, :, :, :16] for cache in caches]
        append = partial(kv_slots_kernels.append_kv, *(cache[0] for cache in caches), *fresh, start)  # type: ignore[call-arg]
        yield Variant(f"append, {name}", append)
        for places in (64, 1024):
            move = partial(kv_slots_kernels.move_kv, *caches, _ints(2, places), start)  # type: ignore[call-arg]
            yield Variant(f"move {places}, {name}", move)
        table = _ints(2, 2).int()
        paged = partial(append, table=table, page=128)
        yield Variant(f"append in pages, {name}", paged)
        yield Variant(f"move in pages, {name}", partial(move, table=table, page=128))
        yield Variant(f"means, {name}", partial(kv_slots_kernels.chunk_means, means, caches[0], start, 4, 8))
        both = torch.cat([means, means], -1)
        moments = partial(kv_slots_kernels.chunk_means, both, caches[0], start, 4, 8)
        yield Variant(f"means and variances, {name}", moments)


def _retrieval() -> Iterator[Variant]:
    # Chunks that registers hold, and more than they hold.
    for dim, group, chunks in product((64, 96, 256, 512), (1, 4), (512, 15_360, 131_072)):
        name = f"choice of {chunks} chunks, head_dim {dim}, group {group}"
        yield Variant(name, partial(_select, dim, group, chunks))
        yield Variant(f"{name}, variances", partial(_select, dim, group, chunks, 2 * dim))


def _select(dim: int, group: int, chunks: int, columns: int | None = None) -> None:
    q, means = torch.zeros(1, group, dim, dtype=BF16), torch.zeros(1, 1, chunks, columns or dim, dtype=BF16)
    select.select_chunks(q, means, _ints(1), _int32(1, 1, 256), 160, 0.1)


def _acceptance() -> Iterator[Variant]:
    for vocabulary in VOCABULARIES:
        for nodes in (16, 64, 256):
            yield Variant(
                f"acceptance of {nodes} nodes, {vocabulary} entries", partial(_accept, nodes, vocabulary)
            )
        for how in ("sampled", "greedy"):
            probs = torch.zeros(1, 12, vocabulary)
            call = partial(accept.second_choice, probs, _ints(1, 12), None if how == "greedy" else probs)
            yield Variant(f"runner-ups, {how}, {vocabulary} entries", call)


def _accept(nodes: int, vocabulary: int) -> None:
    tree, probs = _ints(1, nodes), torch.zeros(1, 2, vocabulary)
    p = probs[:, :1].expand(1, nodes, vocabulary)
    verified = tree, tree, p, probs, tree, torch.zeros(1, nodes), probs[:, 0], 12
    traversal.traverse_tree(*verified)
    accept.accept_greedy(tree, tree, tree, 12)


def _growth() -> Iterator[Variant]:
    buffers = (_ints(2, 4), _ints(2, 20), _ints(2, 64), _ints(4, 2), _int32(2), _ints(2, 512))
    rest = (_ints(2), _ints(2), _ints(20), _ints(4))
    yield Variant("first inputs of a tree", partial(place_kernels.begin_tree, *buffers, *rest))
    for vocabulary, draws, how in product(VOCABULARIES, (1, 8, 16), ("draws", "most likely")):
        call = partial(_expand, vocabulary, draws, how == "most likely")
        yield Variant(f"{draws} {how} of {vocabulary} entries", call)
    for (frontier, draws), where in product(((1, 1), (8, 8), (64, 32)), ("likeliest", "given")):
        call = partial(_place, frontier, draws, where == "given")
        yield Variant(f"{where} places of {frontier} x {draws}", call)


def _expand(vocabulary: int, draws: int, greedy: bool) -> None:
    logits, probs = torch.zeros(1, 4, vocabulary, dtype=BF16), torch.zeros(1, 4, vocabulary)
    noise = None if greedy else probs.clone()
    grow.expand_nodes(logits, None if greedy else torch.ones(()), noise, probs, draws)


def _softmax() -> Iterator[Variant]:
    for vocabulary in (32_000, 128_256):
        scores = torch.zeros(2, vocabulary)
        yield Variant(f"softmax of {vocabulary} entries", partial(softmax_kernels.softmax_rows, scores))


def _place(frontier: int, draws: int, fixed: bool) -> None:
    size, width = 64 if frontier < 64 else 128, min(32, frontier * draws)
    tree, words, mask = _ints(1, size), _ints(1, size, size // 64), _ints(width, size // 64)
    pairs = _ints(2, width) if fixed else None
    place_kernels.place_nodes(
        tree, tree.clone(), words, torch.zeros(1, size), _ints(1, width), mask, _ints(1, frontier, draws),
        torch.zeros(1, frontier, draws), torch.zeros(1, frontier, 4096), pairs, 0, 0,
    )  # fmt: skip


def _exchange() -> Iterator[Variant]:
    for slots in (64, 2048):
        yield Variant(f"exchange of {slots} slots", partial(_exchange_chunks, slots))
    every = (96, 96), (256, 256), (192, 128), (512, 512)
    for dims, chunk, where in product(every, (8, 64), ("the host", "both memories")):
        name = f"chunks of {chunk} from {where}, {_label(*dims)}"
        yield Variant(name, partial(_fetch, Heads(2, 2, *dims), chunk, where == "both memories"))
    words = _int32(4096)
    yield Variant("words from the host", partial(exchange_kernels.fetch_words, words, words.clone()))


def _exchange_chunks(slots: int) -> None:
    held, chunks, moves = _int32(1, 2, slots), _int32(1, 2, 16 * slots), _int32(1, 2, 2, slots // 2)
    wanted, hand = held[..., : slots // 2].contiguous(), _int32(1, 2)
    exchange_kernels.exchange_chunks(held, chunks, wanted, hand, moves, hand.clone())


def _fetch(heads: Heads, chunk: int, resident: bool) -> None:
    k, v = (torch.zeros(2, 1024, dim, dtype=BF16) for dim in (heads.dim, heads.value_dim))
    on_host = torch.zeros(1024, heads.row, dtype=BF16)
    on_device = on_host[: 512 if resident else 0]
    exchange_kernels.fetch_chunks(k, v, on_device, on_host, _int32(2, 2, 16), _int32(2), chunk)


def _experts() -> Iterator[Variant]:
    """Returns linear layers of routed experts, and the copies of those that are in host memory."""
    for bits, tokens, (out, ins) in product(linears.BITS, (1, 16, 64), ((1536, 2048), (2880, 2880))):
        for kind in ("", *(("fp16", "bias") if tokens == 1 else ())):
            name = f"experts, {bits} bits, {tokens} tokens, {out} x {ins}{kind and ', ' + kind}"
            yield Variant(name, partial(_route, bits, tokens, out, ins, kind))
    for experts in (8, 128, 512):
        routed, held = _ints(16, 8), _int32(experts)
        moves, count, fetched = held.clone(), _int32(1), _ints(1)
        choose = partial(experts_kernels.choose_experts, routed, held, moves, count, fetched, 3)
        yield Variant(f"choice of {experts} experts", choose)
    for dtype in (BF16, torch.int16, FP32):
        slots = torch.zeros(8, 4096, dtype=dtype)
        copy = partial(experts_kernels.fetch_experts, slots, slots.clone(), _int32(8), _int32(1))
        yield Variant(f"experts from the host, {dtype}", copy)


def _route(bits: int, tokens: int, out: int, ins: int, kind: str) -> None:
    dtype, experts = FP16 if kind == "fp16" else BF16, 4
    blocks = 0 if bits == 16 else linear_reference.blocks_of(ins, bits)
    words = torch.zeros(experts, out, 128 * blocks or ins, dtype=dtype if bits == 16 else torch.int16)
    scales = {16: None, 8: torch.zeros(experts, out), 4: torch.zeros(blocks, experts * out, 4, dtype=BF16)}[
        bits
    ]
    bias = torch.zeros(experts, out, dtype=dtype) if kind == "bias" else None
    x, routed = torch.zeros(tokens, ins, dtype=dtype), _ints(tokens, 4)
    linear_experts.expert_linear(x, routed, words, scales, bias, bits)


def _states() -> Iterator[Variant]:
    """Returns recurrences: Mamba, Mamba-2, gated delta rule, Kimi delta attention."""
    kinds = {
        "Mamba": (1, 1, 4096, 16), "Mamba-2": (1, 64, 64, 128), "gated delta": (16, 32, 128, 128),
        "Kimi delta": (32, 32, 128, 128),
    }  # fmt: skip
    for kind, stored, reads in product(kinds, (False, True), (False, True)):
        if stored or reads:
            name = f"{kind}, {'stored' if stored else 'left'}{', read' if reads else ''}"
            yield Variant(name, partial(_recur, kind, kinds[kind], stored, reads))
    for kind, shape in kinds.items():
        yield Variant(f"{kind}, along paths", partial(_recur, kind, shape, False, True, paths=True))


def _recur(
    kind: str, shape: tuple[int, int, int, int], stored: bool, reads: bool, paths: bool = False
) -> None:
    groups, heads, values, keys = shape
    rates = torch.zeros(heads, values, keys) if kind == "Mamba" else None
    decays = {"Mamba": values, "Kimi delta": keys}.get(kind, 1)
    v, read = torch.zeros(1, 5, heads, values), torch.zeros(1, 5, groups, keys)
    recurrence_kernels.linear_recurrence(
        torch.zeros(1, heads, values, keys), read, read.clone(), v, torch.zeros(1, 5, heads, decays), rates,
        torch.zeros(1, 5, heads) if "delta" in kind else None, _ints(1) if stored else None,
        torch.zeros_like(v) if reads else None, torch.zeros(1, 5, 3, dtype=torch.int64) if paths else None,
    )  # fmt: skip
