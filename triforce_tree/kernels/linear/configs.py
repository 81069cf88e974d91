"""How a few-row linear layer is cut: a pure function of shape and device, never a first-call autotune."""

from dataclasses import dataclass, replace

from triforce_tree.kernels.device import Device

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
# stages, tma, and how many programs a processor runs at once. Measured on an H200, by the benchmark `linear`,
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
_MOST_SPLITS = 8
# Sums and unpacked codes of so large a tile spill from the registers of 4 warps that hold all operands.
_MOST_UNPACKED = 64 * 128 * 2
# Shared memory of a multiprocessor where the table was measured.
_MEASURED_PER_SM = 233_472


def choose(bits: int, rows: int, outs: int, ins: int, device: Device) -> LinearConfig:
    """The configuration for ``rows`` rows and a weight ``[outs, ins]`` of 16, 8 or 4 bits.

    Args:
        outs: of all weights, where several share a launch.
        device: whose shared memory bounds the tile, and whose processors share the work.

    Raises:
        ValueError: too many rows, or no tile fits the device.
    """
    block_m, short = row_block(rows), ins <= _SHORT_INS
    cuts = _SHORT if short and (bits, block_m) == (16, 16) else _CUTS[bits][block_m]
    _, block_n, width, warps, stages, tma, resident = next(cut for cut in cuts if outs <= cut[0])
    if block_m * block_n * 16 // bits >= _MOST_UNPACKED and not device.shared_products:
        warps = 8
    config: LinearConfig | None = LinearConfig(block_n, width, 1, warps, stages, bool(tma))
    while config is not None and shared_bytes(config, bits, block_m, device) > device.shared_bytes:
        config = smaller(config)
    if config is None:
        raise ValueError(
            f"{device.arch} has {device.shared_bytes:,} bytes of shared memory a block, too few for any "
            f"tile of {bits} bits and {rows} rows; run on the CPU (device='cpu')"
        )
    if device.shared_bytes_per_sm < _MEASURED_PER_SM:
        resident = min(resident, device.resident(shared_bytes(config, bits, block_m, device)))
    tiles, steps = -(-outs // config.block_n), -(-ins * bits // (16 * config.width))
    splits = 1 if short else max(1, min(_MOST_SPLITS, device.processors * resident // tiles))
    return replace(config, splits=min(splits, steps))


def smaller(config: LinearConfig) -> LinearConfig | None:
    """The next configuration that needs less shared memory; None behind the smallest."""
    if config.stages > 3:
        return replace(config, stages=config.stages - 1)
    if config.width > 32:
        return replace(config, width=config.width // 2)
    if config.stages > 1:
        return replace(config, stages=config.stages - 1)
    return replace(config, block_n=config.block_n // 2) if config.block_n > LEAST_BLOCK else None


def shared_bytes(config: LinearConfig, bits: int, block_m: int, device: Device) -> int:
    """Shared memory that the compiled kernel asks for, in bytes, to a few hundred; never less than it.

    Each stage of the pipeline has a tile of words and, for every plane of packed codes, one of x; the tiles
    in use are in registers, or have a stage of their own where products read them from shared memory.
    """
    words, xs = 2 * config.width * config.block_n, 2 * config.width * block_m * 16 // bits
    from_shared = config.block_n >= 64 and device.shared_products
    ahead = max(1, config.stages - 1)
    in_use = config.stages if from_shared else ahead
    return words * (in_use if bits == 16 else ahead) + xs * in_use + 512
