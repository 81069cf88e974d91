"""How a few-row linear layer is cut: a pure function of its shape, never a first-call autotune."""

from dataclasses import dataclass

MOST_ROWS = 128
"""More rows than this are a matter for a general matrix product."""

MOST_PLAIN_ROWS = 64
"""The same for 16-bit weights: the general product of the vendor's library is level at 96 rows."""

MOST_FUSED = 3
"""Weights of one launch."""

LEAST_BLOCK = 32
"""Fewest output columns of a tile, by which callers size the counters."""


@dataclass(frozen=True)
class LinearConfig:
    """How one problem is cut.

    Attributes:
        block_n: output columns (rows of the weight) per tile.
        width: 16-bit words of a weight row per step; 128 where the weight is packed.
        splits: programs that share the input columns of a tile and add up their parts.
        warps, stages: warps per program and depth of the load pipeline.
        tma: load with the bulk copy engine where the layout allows it.
        prefetch: first steps whose weights are sent for while the kernel before still runs. One is best
            where that kernel lets others come early; more gain nothing there.
    """

    block_n: int
    width: int
    splits: int
    warps: int
    stages: int
    tma: bool = True
    prefetch: int = 1


def row_block(rows: int) -> int:
    """Rows of x per tile: 16, 32, 64 or 128."""
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"rows={rows} is outside 1 to {MOST_ROWS}; use a general matrix product")
    return max(16, 1 << (rows - 1).bit_length())


# By bits and rows of the tile, for as many outputs as the first number and fewer: block_n, width, warps,
# stages, tma, and how many programs a processor runs at once. Measured on an H200, scripts/tune_linear.py,
# with 4096, 6144, 12288, 22016 and 28672 outputs of 4096 inputs, and 768 and 4096 of more.
_MANY = 1 << 62
_CUTS: dict[int, dict[int, tuple[tuple[int, int, int, int, int, int, int], ...]]] = {
    16: {
        16: (
            (2048, 32, 128, 4, 9, 0, 1),
            (8192, 64, 128, 4, 5, 0, 1),
            (16384, 128, 64, 4, 6, 1, 1),
            (_MANY, 64, 256, 4, 5, 1, 1),
        ),
        32: (
            (5120, 64, 128, 4, 4, 0, 1),
            (8192, 64, 64, 4, 9, 1, 1),
            (16384, 128, 64, 4, 5, 1, 1),
            (_MANY, 64, 128, 4, 4, 1, 1),
        ),
        64: (
            (5120, 64, 128, 4, 7, 1, 1),
            (8192, 64, 64, 4, 7, 1, 1),
            (16384, 64, 128, 4, 7, 1, 1),
            (25600, 64, 64, 4, 4, 1, 1),
            (_MANY, 64, 64, 4, 5, 1, 1),
        ),
        128: ((5120, 128, 64, 8, 7, 1, 1), (8192, 64, 64, 4, 9, 1, 1), (_MANY, 128, 64, 8, 7, 1, 1)),
    },
    8: {
        16: (
            (5120, 64, 128, 4, 4, 0, 2),
            (8192, 64, 128, 4, 3, 1, 3),
            (16384, 64, 128, 4, 4, 0, 2),
            (25600, 64, 128, 4, 3, 0, 3),
            (_MANY, 64, 128, 4, 4, 0, 2),
        ),
        32: (
            (5120, 64, 128, 4, 3, 1, 2),
            (8192, 64, 64, 4, 5, 1, 3),
            (16384, 64, 128, 4, 3, 1, 2),
            (25600, 64, 64, 4, 5, 1, 3),
            (_MANY, 64, 128, 4, 3, 1, 2),
        ),
        64: ((5120, 64, 64, 4, 4, 1, 2), (25600, 64, 64, 4, 3, 1, 3), (_MANY, 128, 64, 4, 4, 1, 2)),
        128: ((_MANY, 64, 64, 4, 3, 1, 2),),
    },
    4: {
        16: (
            (5120, 64, 128, 4, 3, 0, 2),
            (8192, 64, 64, 4, 5, 0, 3),
            (25600, 128, 64, 4, 3, 1, 3),
            (_MANY, 64, 128, 4, 3, 0, 2),
        ),
        32: ((5120, 64, 64, 4, 4, 0, 2), (_MANY, 64, 64, 4, 3, 1, 3)),
        64: ((_MANY, 64, 64, 4, 3, 1, 2),),
        128: ((_MANY, 64, 64, 8, 3, 1, 2),),
    },
}  # fmt: skip
# Rows so short that programs do not share them; 16 bits and 16 rows have tiles of their own there.
_SHORT_INS = 1024
_SHORT = ((1024, 64, 256, 4, 3, 1, 1), (_MANY, 64, 128, 4, 5, 0, 1))
_PROCESSORS = 132
_MOST_SPLITS = 8


def choose(bits: int, rows: int, outs: int, ins: int) -> LinearConfig:
    """The configuration for ``rows`` rows and a weight ``[outs, ins]`` of 16, 8 or 4 bits.

    Args:
        outs: of all weights, where several share a launch.
    """
    block_m, short = row_block(rows), ins <= _SHORT_INS
    cuts = _SHORT if short and (bits, block_m) == (16, 16) else _CUTS[bits][block_m]
    _, block_n, width, warps, stages, tma, resident = next(cut for cut in cuts if outs <= cut[0])
    tiles, steps = -(-outs // block_n), -(-ins * bits // (16 * width))
    splits = 1 if short else max(1, min(_MOST_SPLITS, _PROCESSORS * resident // tiles))
    return LinearConfig(block_n, width, min(splits, steps), warps, stages, bool(tma))
