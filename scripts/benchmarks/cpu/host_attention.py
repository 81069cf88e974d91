"""Attention on the CPU over a cache in host memory, alone and beside streaming the cache to the device.

    python -m scripts.benchmarks host_attention               # where there is a GPU, in 90 s on 16 cores
    python -m scripts.benchmarks host_attention --out FILE    # on any machine; without a GPU there is no bus
    python -m scripts.benchmarks host_attention --tiny        # the same code on a few MiB; writes nothing

The results are docs/results/host_attention_h200.json: GB of keys and values a second, by T query rows, heads,
threads and implementation; what plain reading of the same memory reaches; what the bus takes from it to the
device; and both at once. Those of other processors, without a bus, lie beside it. Pieces are 8,192 KV slots
of one layer as the offloaded cache keeps them. 3 GiB of them are used in turn, so that no cache of the
processor holds the next one; their values are the same, their memory is not. An implementation is timed only
where its errors against fp32 are at most twice those of plain torch in bf16.
"""

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, Record, header, rounded, write
from scripts.benchmarks.cpu.machine import cores, processor
from scripts.benchmarks.cpu.tables import FILE
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.attention.reference import tree_attention
from triforce_tree.kernels.cpu.cpu_attention import CpuAttention, instructions, supports
from triforce_tree.kernels.cpu.host_rows import State, flash, merged
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.runtime.files.writable import check_writable

SHAPES = (Heads(32, 32, 128), Heads(32, 8, 128))
Attend = Callable[[Tensor, Sequence[Tensor]], State]
"""From queries ``[H_kv, R, D]`` in bf16, R = T x query heads a KV head, and pieces ``[n, 2, H_kv, D]`` to out
``[H_kv, R, D]`` and lse ``[H_kv, R]`` of all their rows, in fp32."""

_TIMES = 3
_BLOCK = 8 << 20  # bytes of a piece that torch attends to in one thread
# Environment variables that keep torch from the newest instructions of a processor.
_HOLDS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


def torch_flash(threads: int) -> Attend:
    """Torch's flash attention, one call a piece, in blocks of a few thousand rows for each thread."""
    return lambda q, pieces: merged(
        [flash(q, *piece.unbind(1), max(1, piece.nbytes // _BLOCK)) for piece in pieces]
    )


def our_kernel(way: str, threads: int) -> Attend:
    """Our kernel with some of the processor's instructions; it takes all heads of a query in a row."""
    kernel = CpuAttention(threads, way=way)

    def attend(q: Tensor, pieces: Sequence[Tensor]) -> State:
        states = (kernel(q.transpose(0, 1).contiguous(), *piece.unbind(1)) for piece in pieces)
        return merged([(out.transpose(0, 1).float(), lse.T) for out, lse in states])

    return attend


# By the names in a results file: "way" and "spread".
_OURS = instructions() if supports(128, torch.bfloat16) else ()
WAYS: dict[tuple[str, str], Callable[[int], Attend]] = {
    ("flash", "one call a piece"): torch_flash,
    **{("our kernel", f"on {way}"): partial(our_kernel, way) for way in _OURS},
}


def read(pieces: Sequence[Tensor]) -> None:
    """Plain reading: the sum of the words."""
    for piece in pieces:
        piece.view(-1).view(torch.int64).sum()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Size:
    """What is measured."""

    rows: int = 8192  # KV slots of a piece
    queries: tuple[int, ...] = (1, 16, 49, 97)  # T
    pool: int = 3 << 30  # bytes of all pieces
    call: int = 512 << 20  # bytes that one call attends to
    seconds: float = 0.4  # of a measurement beside the bus


# Without a GPU there are few cores as well: less memory exceeds their caches.
FEW_CORES = Size(pool=1 << 30, call=128 << 20)
TINY = Size(128, (1, 3), pool=16 << 20, call=4 << 20, seconds=0.02)


class Pool:
    """Host memory, page-locked for a GPU, as pieces ``[rows, 2, H_kv, D]`` in bf16 of any number of heads."""

    def __init__(self, size: Size, device: torch.device, seed: int) -> None:
        self.size = size
        self.memory = HostMemory(locked=device.type == "cuda")  # keeps the memory
        self.memory.check(size.pool)
        largest = size.rows * 2 * SHAPES[0].kv * SHAPES[0].dim
        self.values = self.memory.take((size.pool // 2 // largest, largest), torch.bfloat16)
        self.values[0].normal_(generator=torch.Generator().manual_seed(seed))
        self.values[1:] = self.values[0]

    def pieces(self, heads: Heads) -> list[Tensor]:
        return list(self.values.view(-1, self.size.rows, 2, heads.kv, heads.dim))

    def calls(self, heads: Heads) -> Iterator[list[Tensor]]:
        """Endlessly the pieces of one call."""
        pieces = self.pieces(heads)
        around = cycle(pieces)
        while True:
            yield list(islice(around, self.size.call // pieces[0].nbytes))


class Streaming:
    """A context in which a thread copies pieces to the device in turn; ``gbps`` is set at its end."""

    def __init__(self, pieces: Sequence[Tensor], device: torch.device) -> None:
        self._pieces, self._copies = pieces, CopyStream(device)
        self._target = torch.empty_like(pieces[0], device=device)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.gbps = 0.0

    def _run(self) -> None:
        start, count, around = time.perf_counter(), 0, cycle(self._pieces)
        while not self._stop.is_set():
            for piece in islice(around, 8):
                self._copies.copy(self._target, piece)
            count += 8
            if self._copies.stream is not None:
                # Waits without keeping a core busy that attention could use.
                event = torch.cuda.Event(blocking=True)
                event.record(self._copies.stream)
                event.synchronize()
        self.gbps = count * self._target.nbytes / 1e9 / (time.perf_counter() - start)

    def __enter__(self) -> "Streaming":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def median_gbps(work: Callable[[list[Tensor]], Any], calls: Iterator[list[Tensor]]) -> float:
    """Median over some calls, after one of warm-up."""
    found = []
    for _ in range(_TIMES + 1):
        pieces = next(calls)
        start = time.perf_counter()
        work(pieces)
        seconds = time.perf_counter() - start
        found.append(sum(piece.nbytes for piece in pieces) / 1e9 / seconds)
    return statistics.median(found[1:])


def beside(
    work: Callable[[list[Tensor]], Any], calls: Iterator[list[Tensor]], bus: Streaming, seconds: float
) -> Record:
    """Both at once: GB/s of the work and of the bus."""
    size = 0
    with bus:
        start = time.perf_counter()
        while (taken := time.perf_counter() - start) < seconds or size == 0:
            pieces = next(calls)
            work(pieces)
            size += sum(piece.nbytes for piece in pieces)
    return {"cpu_gbps": rounded(size / 1e9 / taken), "bus_gbps": rounded(bus.gbps)}


def error_ratio(q: Tensor, rows: Tensor) -> Callable[[State], float]:
    """Tells the largest error of a result as a multiple of plain torch's in bf16, both against fp32.

    Args:
        q: fp32 ``[1, H_q, T, D]``, of values that bf16 holds.
        rows: bf16 ``[n, 2, H_kv, D]``.
    """
    k, v = rows.permute(1, 2, 0, 3)[:, None]
    mask = torch.ones(q.shape[2], 0, dtype=torch.bool)

    def state(dtype: torch.dtype) -> State:
        out, lse = tree_attention(*(x.to(dtype) for x in (q, k, v)), mask, scale=q.shape[-1] ** -0.5)
        return out.float().reshape(rows.shape[2], -1, q.shape[-1]), lse.float().reshape(rows.shape[2], -1)

    def errors(made: State) -> list[float]:
        return [float((a - b).abs().max()) for a, b in zip(made, exact, strict=True)]

    exact = state(torch.float32)
    limits = errors(state(torch.bfloat16))
    return lambda made: max(error / limit for error, limit in zip(errors(made), limits, strict=True))


def attention(pool: Pool, threads: Sequence[int], seed: int) -> list[Record]:
    """Every shape, T, number of threads and implementation."""
    found = []
    for heads, queries in product(SHAPES, pool.size.queries):
        calls, rows = pool.calls(heads), pool.pieces(heads)[0]
        q = random_queries(heads, queries, seed)
        ratio_of, packed = error_ratio(q, rows), pack(q, heads)
        for count, ((way, spread), make) in product(threads, WAYS.items()):
            with torch_threads(count):
                work = partial(make(count), packed)
                ratio = ratio_of(work([rows]))
                gbps = rounded(median_gbps(work, calls)) if ratio <= 2 else None
            row = {"shape": label(heads), "t": queries, "threads": count, "way": way}
            found.append(row | {"spread": spread, "gbps": gbps})
            say(**found[-1], error_ratio=rounded(ratio))
    return found


def reading(pool: Pool, threads: Sequence[int]) -> list[Record]:
    """Plain reading of the same memory."""
    found = []
    for count in threads:
        with torch_threads(count):
            gbps = median_gbps(read, pool.calls(SHAPES[0]))
        found.append({"threads": count, "gbps": rounded(gbps)})
        say(what="reading", **found[-1])
    return found


def together(pool: Pool, device: torch.device, threads: int, rows: Sequence[Record], seed: int) -> Record:
    """The bus alone, beside plain reading, and beside the fastest attention at each shape and T."""
    size, pieces = pool.size, pool.pieces(SHAPES[0])
    alone = Streaming(pieces, device)
    with alone:
        time.sleep(size.seconds)
    found: Record = {"device": str(device), "bus_gbps": rounded(alone.gbps), "attention": []}
    with torch_threads(threads):
        found["reading"] = beside(read, pool.calls(SHAPES[0]), Streaming(pieces, device), size.seconds)
        for heads, queries in product(SHAPES, size.queries):
            place = {"shape": label(heads), "t": queries, "threads": threads}
            timed = [row for row in rows if row["gbps"] and place.items() <= row.items()]
            if not timed:
                continue
            best = max(timed, key=lambda row: row["gbps"])
            work = partial(
                WAYS[best["way"], best["spread"]](threads), pack(random_queries(heads, queries, seed), heads)
            )
            both = beside(work, pool.calls(heads), Streaming(pieces, device), size.seconds)
            row = {**place, "way": best["way"], "spread": best["spread"], "cpu_alone_gbps": best["gbps"]}
            found["attention"].append(row | both)
            say(what="beside the bus", **found["attention"][-1])
    return found


def pack(q: Tensor, heads: Heads) -> Tensor:
    return q.bfloat16().reshape(heads.kv, -1, heads.dim)


def random_queries(heads: Heads, count: int, seed: int) -> Tensor:
    """fp32 ``[1, H_q, count, D]``, of values that bf16 holds."""
    shape = (1, heads.query, count, heads.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).bfloat16().float()


def label(heads: Heads) -> str:
    return f"{heads.query}/{heads.kv} x {heads.dim}"


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks host_attention", __doc__)
    args = made.parse_args(words)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.tiny and not args.out:
        made.error("there is no GPU here, and thus no bus; --out names a file for what the CPU does alone")
    out = args.out or (None if args.tiny else RESULTS / FILE)
    if out is not None:
        check_writable(out)
    device = torch.device("cuda" if on_gpu else "cpu")
    start, size = time.perf_counter(), TINY if args.tiny else Size() if on_gpu else FEW_CORES
    result = header(args.seed) | {"cpu": processor(), "size": vars(size), "times": _TIMES}
    result["torch_held_to"] = {name: os.environ[name] for name in _HOLDS if name in os.environ}
    say(**result)
    pool = Pool(size, device, args.seed)
    # Half first: the last measurement, with all of them, is compared with the one beside the bus.
    threads = sorted({max(1, cores() // 2), cores()})
    result["reading"] = reading(pool, threads)
    result["rows"] = attention(pool, threads, args.seed)
    if on_gpu or args.tiny:
        result["together"] = together(pool, device, threads[-1], result["rows"], args.seed)
    result["seconds"] = rounded(time.perf_counter() - start)
    say(what="done", seconds=result["seconds"])
    if out is not None:
        write(out, result)
