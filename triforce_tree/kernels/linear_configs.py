"""How a few-row linear layer is cut: a pure function of its shape, never a first-call autotune."""

from dataclasses import dataclass

MOST_ROWS = 128
"""More rows than this are a matter for a general matrix product."""

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
    prefetch: int = 2


def row_block(rows: int) -> int:
    """Rows of x per tile: 16, 32, 64 or 128."""
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"rows={rows} is outside 1 to {MOST_ROWS}; use a general matrix product")
    return max(16, 1 << (rows - 1).bit_length())


# bits -> rows of the tile -> (block_n, width, warps, stages).
_TABLE = {
    16: {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (64, 128, 4, 3), 128: (64, 64, 4, 4)},
    8: {16: (64, 128, 4, 4), 32: (64, 128, 4, 3), 64: (64, 64, 4, 4), 128: (64, 64, 8, 3)},
    4: {16: (64, 128, 4, 3), 32: (64, 64, 4, 4), 64: (128, 64, 8, 3), 128: (64, 64, 8, 2)},
}


def choose(bits: int, rows: int, outs: int, ins: int) -> LinearConfig:
    """The configuration for ``rows`` rows and a weight ``[outs, ins]`` of 16, 8 or 4 bits."""
    block_n, width, warps, stages = _TABLE[bits][row_block(rows)]
    tiles, steps = -(-outs // block_n), -(-ins * bits // (16 * width))
    splits = max(1, min(264 // tiles, steps // 2, 16))
    return LinearConfig(block_n, width, splits, warps, stages)
