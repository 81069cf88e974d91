"""Few-row linear layers to time and to check on a GPU: shapes, random weights, errors, candidates."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from triforce_tree.kernels import linear as kernels
from triforce_tree.kernels import linear_reference as reference
from triforce_tree.kernels.linear_configs import LinearConfig as C
from triforce_tree.kernels.linear_configs import row_block

LAYER_7B = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
LARGE = [
    (4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096), (4096, 14336), (1024, 4096),
    (5120, 5120), (13824, 5120), (5120, 13824),
]  # fmt: skip
SMALL = [(768, 768), (3072, 768), (768, 3072), (4096, 768), (384, 384)]
ODD = [(1000, 1000), (100, 264), (333, 520), (65, 4100)]
BITS = (16, 8, 4)
ROTATION = 256 * 2**20


def weight_bytes(bits: int, outs: int, ins: int) -> int:
    """What one call must read of the weight and its scales."""
    if bits == 16:
        return outs * ins * 2
    scales = outs * 4 if bits == 8 else reference.blocks_of(ins, 4) * outs * 8
    return reference.blocks_of(ins, bits) * 256 * outs + scales


def least_bytes(bits: int, rows: int, outs: int, ins: int) -> int:
    return weight_bytes(bits, outs, ins) + 2 * rows * (outs + ins)


class Weights:
    """Random weights of one shape: ``copies`` of them, so that a round of calls leaves nothing in L2."""

    def __init__(self, bits: int, outs: int, ins: int, copies: int, dtype: torch.dtype = torch.bfloat16):
        self.bits, self.outs, self.ins, self.dtype = bits, outs, ins, dtype
        self.counters = kernels.counters_for(outs, "cuda")
        self.scales: list[Tensor | None] = [None] * copies
        if bits == 16:
            made = torch.empty(copies, outs, ins, dtype=dtype, device="cuda").normal_(std=ins**-0.5)
        else:
            blocks = reference.blocks_of(ins, bits)
            shape = (copies, outs, 128 * blocks)
            made = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")
            size, kind = ((outs,), torch.float32) if bits == 8 else ((blocks, outs, 4), torch.bfloat16)
            top = ins**-0.5 / 2 ** (bits - 1)
            self.scales = [
                torch.rand(size, device="cuda").add_(0.5).mul_(top).to(kind) for _ in range(copies)
            ]
        self.words = list(made)

    def call(self, x: Tensor, copy: int = 0, bias: Tensor | None = None, config: C | None = None) -> Tensor:
        scales = self.scales[copy]
        if scales is None:
            return kernels.linear(x, self.words[copy], bias, self.counters, config)
        return kernels.low_bit_linear(x, self.words[copy], scales, bias, self.bits, self.counters, config)

    def exact(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, float]:
        """The result in fp64 and the error allowed: twice that of torch in x's dtype."""
        scales, weight = self.scales[0], self.words[0]
        if scales is not None:
            weight = reference.dequantise(weight, scales, self.bits, self.ins)
        gold = torch.nn.functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        near = gold.to(x.dtype)
        if scales is None:
            near = torch.nn.functional.linear(x, weight, bias)
        return gold, 2 * (near.double() - gold).abs().max().item() + 1e-6


def wrong(made: Tensor, gold: Tensor, allowed: float) -> str | None:
    error = (made.double() - gold).abs().max().item()
    return None if error <= allowed else f"error {error:.3g} above {allowed:.3g}"


def gate(part: int, parts: int) -> Iterator[tuple[str, str | None]]:
    """A share of the problems, each with what is wrong with it: default configurations, poisoned memory."""
    units = [(b, n, k, torch.bfloat16) for b in BITS for n, k in [*LARGE, *SMALL, *ODD]]
    units += [(b, n, k, torch.float16) for b in BITS for n, k in ODD]
    for bits, outs, ins, dtype in units[part::parts]:
        weights = Weights(bits, outs, ins, 1, dtype)
        bias = torch.randn(outs, dtype=dtype, device="cuda") if ins % 1000 == 0 else None
        for rows in (1, 7, 16, 17, 32, 64, 96, 128):
            name = f"{bits} bits [{outs}, {ins}] {str(dtype)[6:]} M={rows}"
            try:
                yield name, _one(weights, rows, bias)
            except Exception as error:
                yield name, repr(error)[:300]


def _one(weights: Weights, rows: int, bias: Tensor | None) -> str | None:
    x = torch.randn(rows, weights.ins, dtype=weights.dtype, device="cuda")
    gold, allowed = weights.exact(x, bias)
    for size in (weights.outs * rows, 64 * weights.outs * max(16, rows)):
        poison = torch.full((size,), torch.nan, dtype=torch.float32, device="cuda")
        del poison
    made = weights.call(x, 0, bias)
    said = wrong(made, gold, allowed)
    again = [weights.call(x, 0, bias) for _ in range(8)]
    if said is None and not all(torch.equal(made, other) for other in again):
        said = "a second call gave other bits"
    if said is None and weights.counters.any():
        said = "counters are not zero after the call"
    return said


def time_us(calls: list[Callable[[], object]], target_ms: float = 5.0) -> float:
    """Median microseconds of one call; all are captured in one graph, which is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    repeats = max(1, -(-48 // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    each = repeats * len(calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / each

    replay()
    first = replay()
    return median([replay() for _ in range(int(min(40, max(5, target_ms * 1e3 / (first * each)))))])


# (block_n, width, warps, stages[, without the bulk copy engine]) by bits and rows of the tile.
_TILES: dict[int, dict[int, list[tuple[int, ...]]]] = {
    16: {
        16: [(32, 128, 4, 5), (32, 256, 4, 4), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3),
             (64, 64, 4, 8), (128, 128, 4, 3), (128, 64, 4, 5), (128, 64, 8, 6), (64, 128, 4, 4, 0)],
        32: [(32, 128, 4, 5), (64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 8), (128, 128, 4, 3),
             (128, 64, 4, 5), (128, 64, 8, 6), (64, 128, 4, 4, 0)],
        64: [(64, 128, 4, 3), (64, 64, 4, 5), (64, 64, 4, 7), (128, 64, 4, 4), (128, 64, 8, 5),
             (128, 128, 8, 4), (64, 128, 4, 3, 0)],
        128: [(64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4), (128, 64, 8, 6),
              (256, 64, 8, 4)],
    },
    8: {
        16: [(32, 128, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 6),
             (128, 128, 8, 4), (128, 64, 4, 5), (128, 64, 8, 6), (64, 128, 4, 4, 0)],
        32: [(64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (128, 128, 8, 4), (128, 64, 4, 5),
             (128, 64, 8, 5), (64, 128, 4, 4, 0)],
        64: [(64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5), (128, 64, 4, 4), (128, 64, 8, 4),
             (128, 128, 8, 3)],
        128: [(64, 64, 8, 3), (64, 64, 8, 4), (64, 64, 4, 3), (128, 64, 8, 3)],
    },
    4: {
        16: [(32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 4), (64, 64, 4, 6),
             (128, 64, 4, 4), (128, 64, 8, 5), (128, 128, 8, 3), (64, 128, 4, 3, 0)],
        32: [(64, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5), (64, 64, 8, 4), (128, 64, 8, 3),
             (128, 64, 8, 4), (64, 64, 4, 4, 0)],
        64: [(64, 64, 4, 3), (64, 64, 8, 3), (64, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3)],
        128: [(64, 64, 8, 2), (64, 64, 8, 3)],
    },
}  # fmt: skip


def tiles(bits: int, rows: int) -> list[C]:
    """What is tried for so many rows, without splits."""
    return [C(n, width, 1, *rest[:2], tma=len(rest) < 3) for n, width, *rest in _TILES[bits][row_block(rows)]]


def candidates(bits: int, rows: int, outs: int, ins: int) -> list[C]:
    """Every tile with the splits that give some hundred to some hundreds of programs."""
    found = []
    for tile in tiles(bits, rows):
        count, steps = -(-outs // tile.block_n), -(-ins * bits // (16 * tile.width))
        splits = [s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s <= steps and 96 <= count * s <= 540]
        splits = sorted(splits or [1], key=lambda s: abs(count * s - 264))[:3]
        found += [replace(tile, splits=s) for s in splits]
    return found
