"""Every kind of launch that the choice of tiles can come to, as calls on CPU tensors that are never run.

The values of the tensors do not matter, and their sizes only as far as the choice looks at them.
"""

import hashlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention import launch, merge
from triforce_tree.kernels.attention.configs import choose as choose_attention
from triforce_tree.kernels.attention.plan import Heads, plan_nodes, plan_trees
from triforce_tree.kernels.device import Device
from triforce_tree.kernels.exchange import chunks_kernels as exchange_kernels
from triforce_tree.kernels.linear import launch as linear
from triforce_tree.kernels.linear import reference as linear_reference
from triforce_tree.kernels.linear.configs import choose as choose_linear
from triforce_tree.kernels.linear.configs import row_block
from triforce_tree.kernels.step import accept_kernels as accept
from triforce_tree.kernels.step import grow_kernels as grow
from triforce_tree.kernels.step import kv_slots_kernels as rows
from triforce_tree.kernels.step import place_kernels
from triforce_tree.kernels.step import select_kernels as select

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
HEAD_DIMS = (64, 80, 96, 128, 256)
QUERIES = (1, 16, 32, 64, 128)
BITS = (16, 8, 4)
LINEARS = (
    *((outs, 4096) for outs in (768, 2048, 4096, 8192, 12_288, 22_016, 28_672)), (768, 768), (4096, 768),
)  # fmt: skip
VOCABULARIES = (4096, 32_000, 128_256)


class Variant(NamedTuple):
    """One launch: what it is, and the call."""

    name: str
    call: Callable[[], object]


def variants(device: Device) -> Iterator[Variant]:
    """All variants for a GPU, whose tiles decide which row counts differ."""
    for part in (_attention, _linears):
        yield from part(device)
    for always in (_companions, _cache_rows, _retrieval, _acceptance, _growth, _exchange):
        yield from always()


def digest(device: Device) -> str:
    """Of all choices for a GPU: another one means that results were made with other tiles."""
    found: list[object] = [variant.name for variant in variants(device)]
    for dim, queries, size in product(HEAD_DIMS, QUERIES, (2, 4)):
        found += [choose_attention(queries * group, dim, size, device) for group in (1, 4)]
    for bits, count, (out, ins) in product(BITS, (1, 32, 64, 128), LINEARS):
        found.append(choose_linear(bits, count, out, ins, device))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _attention(device: Device) -> Iterator[Variant]:
    for dtype in (BF16, FP16, FP32):
        for dim in HEAD_DIMS:
            for group in (1, 4):
                tiles = {}
                for queries in QUERIES:
                    tiles.setdefault(choose_attention(queries * group, dim, dtype.itemsize, device), queries)
                for queries in tiles.values():
                    # fp16 and GQA in fp32 differ from bf16 and MHA by no more than types and one division.
                    few = dtype == FP16 or (dtype == FP32 and group > 1)
                    for kind in ("dense",) if few else ("dense", "chunks", "pages", "window", "batch"):
                        name = f"{kind}, {NAMES[dtype]}, head_dim {dim}, {queries} x {group} rows"
                        yield Variant(name, _attend(kind, dtype, dim, group, queries))
    yield Variant("nodes, bf16, head_dim 128", _attend("nodes", BF16, 128, 4, 16))


def _attend(kind: str, dtype: torch.dtype, dim: int, group: int, queries: int) -> Callable[[], object]:
    def call() -> None:
        heads, batch = Heads(2 * group, 2, dim), 2 if kind == "batch" else 1
        mask = torch.ones(queries, queries, dtype=torch.bool)
        plan = plan_trees(heads, [mask] * batch, [512] * batch, device="cpu", dtype=dtype)
        if kind == "nodes":
            plan = plan_nodes(
                heads, [(0, 64, 0, queries), (64, 64, 0, 1)], queries, device="cpu", split="node"
            )
        q = torch.zeros(plan.queries, heads.query, dim, dtype=dtype)
        page = {"chunks": 8, "pages": 128}.get(kind, 0)
        kv = torch.zeros((8, 2, page, dim) if page else (batch, 2, 1024, dim), dtype=dtype)
        table = torch.zeros(1, 2, 128, dtype=torch.int32) if page else None
        first = torch.zeros(queries, dtype=torch.int64) if kind == "window" else None
        softcap, sinks = (5.0, torch.zeros(heads.query)) if kind == "window" else (None, None)
        launch.run(q, kv, kv.clone(), plan, scale=0.1, table=table, first=first, softcap=softcap, sinks=sinks)

    return call


def _linears(device: Device) -> Iterator[Variant]:
    for bits in BITS:
        for count in (1, 32, 64, 128):
            seen = set()
            for out, ins in LINEARS:
                config = choose_linear(bits, count, out, ins, device)
                # The number of splits is no constant of the kernel, but whether there are any is.
                key = (
                    config.block_n,
                    config.width,
                    config.warps,
                    config.stages,
                    config.tma,
                    config.splits > 1,
                )
                if key in seen:
                    continue
                seen.add(key)
                name = f"{bits} bits, {row_block(count)} rows, {out} x {ins}"
                yield Variant(name, _multiply(bits, count, out, ins))
        for kind in ("fp16", "bias", "fused", "unaligned"):
            yield Variant(f"{bits} bits, 16 rows, 4096 x 4096, {kind}", _multiply(bits, 1, 4096, 4096, kind))


def _multiply(bits: int, count: int, out: int, ins: int, kind: str = "") -> Callable[[], object]:
    def call() -> None:
        dtype = FP16 if kind == "fp16" else BF16
        x = torch.zeros(count, ins, dtype=dtype)
        bias = torch.zeros(out, dtype=dtype) if kind == "bias" else None
        if bits == 16:
            words, scales = (
                torch.zeros(out, ins + (4 if kind == "unaligned" else 0), dtype=dtype)[:, :ins],
                None,
            )
        else:
            blocks = linear_reference.blocks_of(ins, bits)
            size = 128 * blocks
            words = torch.zeros(out, size + (4 if kind == "unaligned" else 0), dtype=torch.int16)[:, :size]
            scales = torch.zeros(out) if bits == 8 else torch.zeros(blocks, out, 4, dtype=BF16)
        counters = linear.counters_for(out)
        if kind == "fused":
            given = [] if scales is None else [scales] * 3
            linear.linears(x, [words] * 3, given, [], [counters] * 3, bits)
        elif scales is None:
            linear.linear(x, words, bias, counters)
        else:
            linear.low_bit_linear(x, words, scales, bias, bits, counters)

    return call


def _companions() -> Iterator[Variant]:
    for dtype in (BF16, FP32):
        for dim in (64, 256):
            kv = torch.zeros(1, 2, 256, dim, dtype=dtype)
            name = f"{NAMES[dtype]}, head_dim {dim}"
            yield Variant(
                f"merge, {name}",
                lambda kv=kv: merge.merge_states(torch.stack([kv] * 3), torch.zeros(3, 1, 2, 256)),
            )


def _cache_rows() -> Iterator[Variant]:
    start = torch.zeros(2, dtype=torch.int64)
    for dtype in (BF16, FP32):
        for dim in HEAD_DIMS[1:]:
            cache = torch.zeros(3, 2, 2, 256, dim, dtype=dtype)
            name = f"{NAMES[dtype]}, head_dim {dim}"

            def append(cache: Tensor = cache, dim: int = dim) -> None:
                rows.append_kv(cache[0], cache[1], cache[0, :, :, :16], cache[1, :, :, :16], start)

            def move(cache: Tensor = cache, places: int = 64) -> None:
                rows.move_kv(cache, torch.zeros(2, places, dtype=torch.int64), start)

            def means(cache: Tensor = cache, dim: int = dim) -> None:
                rows.chunk_means(cache[..., :32, :].clone(), cache, start, 4, 8)

            yield Variant(f"append, {name}", append)
            yield Variant(f"move 64, {name}", move)
            yield Variant(f"move 1024, {name}", lambda move=move: move(places=1024))
            yield Variant(f"means, {name}", means)


def _retrieval() -> Iterator[Variant]:
    for dim in (64, 96, 256):
        for group in (1, 4):
            # Held in registers, and more than they hold.
            for chunks in (512, 15_360, 131_072):
                yield Variant(
                    f"choice of {chunks} chunks, head_dim {dim}, group {group}", _select(dim, group, chunks)
                )


def _select(dim: int, group: int, chunks: int) -> Callable[[], object]:
    def call() -> None:
        table = torch.zeros(1, 1, 256, dtype=torch.int32)
        limit = torch.zeros(1, dtype=torch.int64)
        q, means = torch.zeros(1, group, dim, dtype=BF16), torch.zeros(1, 1, chunks, dim, dtype=BF16)
        select.select_chunks(q, means, limit, table, 160, 0.1)

    return call


def _acceptance() -> Iterator[Variant]:
    for vocabulary in VOCABULARIES:
        for nodes in (16, 64, 256):

            def judge(nodes: int = nodes, vocabulary: int = vocabulary) -> None:
                tree = torch.zeros(1, nodes, dtype=torch.int64)
                probs = torch.zeros(1, 2, vocabulary)
                p = probs[:, :1].expand(1, nodes, vocabulary)
                accept.accept_tree(tree, tree, p, probs, tree, torch.zeros(1, nodes), probs[:, 0], 12)
                accept.accept_greedy(tree, tree, tree, 12)

            yield Variant(f"acceptance of {nodes} nodes, {vocabulary} entries", judge)
        for greedy in (False, True):

            def second(greedy: bool = greedy, vocabulary: int = vocabulary) -> None:
                probs = torch.zeros(1, 12, vocabulary)
                accept.second_choice(probs, torch.zeros(1, 12, dtype=torch.int64), None if greedy else probs)

            yield Variant(f"runner-ups, {'greedy' if greedy else 'sampled'}, {vocabulary} entries", second)


def _growth() -> Iterator[Variant]:
    whole = {"dtype": torch.int64}

    def begin() -> None:
        grow.begin_tree(
            torch.zeros(2, 4, **whole), torch.zeros(2, 20, **whole), torch.zeros(2, 64, **whole),
            torch.zeros(4, 2, **whole), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 512, **whole),
            torch.zeros(2, **whole), torch.zeros(2, **whole), torch.zeros(20, **whole),
            torch.zeros(4, **whole),
        )  # fmt: skip

    yield Variant("first inputs of a tree", begin)
    for vocabulary in VOCABULARIES:
        for draws in (1, 8, 16):
            for greedy in (False, True):

                def expand(vocabulary: int = vocabulary, draws: int = draws, greedy: bool = greedy) -> None:
                    logits = torch.zeros(1, 4, vocabulary, dtype=BF16)
                    probs = torch.zeros(1, 4, vocabulary)
                    noise = None if greedy else probs.clone()
                    grow.expand_nodes(logits, None if greedy else torch.ones(()), noise, probs, draws)

                how = "most likely" if greedy else "draws"
                yield Variant(f"{draws} {how} of {vocabulary} entries", expand)
    for frontier, draws in ((1, 1), (8, 8), (64, 32)):
        for fixed in (False, True):

            def place(frontier: int = frontier, draws: int = draws, fixed: bool = fixed) -> None:
                size, width = 64 if frontier < 64 else 128, min(32, frontier * draws)
                tree, words = torch.zeros(1, size, **whole), torch.zeros(1, size, size // 64, **whole)
                mask = torch.zeros(width, size // 64, **whole)
                pairs = torch.zeros(2, width, **whole) if fixed else None
                place_kernels.place_nodes(
                    tree, tree.clone(), words, torch.zeros(1, size), torch.zeros(1, width, **whole), mask,
                    torch.zeros(1, frontier, draws, **whole), torch.zeros(1, frontier, draws),
                    torch.zeros(1, frontier, 4096), pairs, 0, 0,
                )  # fmt: skip

            where = "given" if fixed else "likeliest"
            yield Variant(f"{where} places of {frontier} x {draws}", place)


def _exchange() -> Iterator[Variant]:
    for slots in (64, 2048):

        def exchange(slots: int = slots) -> None:
            held = torch.zeros(1, 2, slots, dtype=torch.int32)
            chunks = torch.zeros(1, 2, 16 * slots, dtype=torch.int32)
            moves = torch.zeros(1, 2, 2, slots // 2, dtype=torch.int32)
            hand = torch.zeros(1, 2, dtype=torch.int32)
            wanted = held[..., : slots // 2].contiguous()
            exchange_kernels.exchange_chunks(held, chunks, wanted, hand, moves, hand.clone())

        yield Variant(f"exchange of {slots} slots", exchange)
    for dim in (96, 256):
        for chunk in (8, 64):
            for resident in (False, True):

                def fetch(dim: int = dim, chunk: int = chunk, resident: bool = resident) -> None:
                    k = torch.zeros(2, 1024, dim, dtype=BF16)
                    far = torch.zeros(1024, 2, 2, dim, dtype=BF16)
                    near = far[: 512 if resident else 0]
                    moves = torch.zeros(2, 2, 16, dtype=torch.int32)
                    counts = torch.zeros(2, dtype=torch.int32)
                    exchange_kernels.fetch_chunks(k, k.clone(), near, far, moves, counts, chunk)

                where = "both memories" if resident else "the host"
                yield Variant(f"chunks of {chunk} from {where}, head_dim {dim}", fetch)
    words = torch.zeros(4096, dtype=torch.int32)
    yield Variant("words from the host", lambda: exchange_kernels.fetch_words(words, words.clone()))
