"""How a few-row linear layer is cut: a pure function of its shape, never a first-call autotune."""

from dataclasses import dataclass

MOST_ROWS = 128
"""More rows than this are a matter for a general matrix product."""

MOST_PLAIN_ROWS = 64
"""The same for 16-bit weights, where the general product of the vendor's library wins sooner."""

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
        prefetch: first steps whose weights are sent for while the kernel before still runs.
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


# (block_n, width, warps, stages, tma) by bits and rows of the tile, measured on an H200.
_TILES = {
    16: {16: (64, 128, 4, 4, 0), 32: (64, 128, 4, 4, 0), 64: (64, 64, 4, 5, 1), 128: (64, 64, 4, 4, 1)},
    8: {16: (64, 128, 4, 4, 0), 32: (64, 128, 4, 3, 1), 64: (64, 64, 4, 4, 1), 128: (64, 64, 4, 3, 1)},
    4: {16: (64, 128, 4, 3, 0), 32: (64, 64, 4, 4, 0), 64: (64, 64, 4, 3, 1), 128: (64, 64, 8, 3, 1)},
}
# 16 bits with few rows: deeper pipelines where no columns are shared, fewer and wider steps for short rows.
_WIDE = {16: (64, 128, 4, 6, 1), 32: (64, 128, 4, 5, 1)}
_SHORT = {16: (64, 256, 4, 3, 1)}
_SHORT_INS = 1024
# Two programs on each of 132 processors.
_PROGRAMS = 264


def choose(bits: int, rows: int, outs: int, ins: int) -> LinearConfig:
    """The configuration for ``rows`` rows and a weight ``[outs, ins]`` of 16, 8 or 4 bits.

    Args:
        outs: of all weights, where several share a launch.
    """
    block_m = row_block(rows)
    tile = _TILES[bits][block_m]
    if bits == 16 and ins <= _SHORT_INS:
        tile = _SHORT.get(block_m, tile)
    elif bits == 16 and 2 * outs > _PROGRAMS * tile[0]:
        tile = _WIDE.get(block_m, tile)
    block_n, width, warps, stages, tma = tile
    tiles, steps = -(-outs // block_n), -(-ins * bits // (16 * width))
    if ins <= _SHORT_INS:
        splits = 1 if outs <= _SHORT_INS else 2
    else:
        splits = min(8, max(1, _PROGRAMS // tiles))
    return LinearConfig(block_n, width, min(splits, steps), warps, stages, bool(tma), 1)
