"""Chooses tile shapes of linear layers with few rows by shape and device, without autotuning."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce_tree.kernels.device import Device

MOST_ROWS = 128
"""Largest number of input rows; more rows need a general matrix product."""

MOST_PLAIN_ROWS = 64
"""Largest number of input rows with 16-bit weights; the vendor's matrix product is as fast at 96 rows."""

MOST_FUSED = 3
"""Largest number of weights of one launch."""

SPLIT_WORDS = 128
"""Programs that share a tile divide its columns at multiples of this number of 16-bit words, or of a step."""

LEAST_BLOCK = 32
"""Smallest number of output columns of a tile, which bounds the number of counters."""


def counters_for(outs: int, device: torch.device | str | None = None) -> Tensor:
    """Returns zeroed counters for a weight of ``outs`` rows; calls that use them must run on one stream."""
    return torch.zeros(-(-outs // LEAST_BLOCK), dtype=torch.int32, device=device)


@dataclass(frozen=True)
class LinearConfig:
    """Tile and launch configuration of the kernel.

    Attributes:
        block_n: output columns (rows of the weight) per tile.
        width: 16-bit words of a row of the weight per step.
        splits: number of programs that share the input columns of a tile and sum their partial results
            (split-K).
        warps, stages: warps per program and depth of the load pipeline.
        tma: whether the bulk copy engine loads the tiles where the layout allows it.
        prefetch: number of first steps whose weights are prefetched while the previous kernel still runs. One
            is best with programmatic dependent launch; more steps save no time.
    """

    block_n: int
    width: int
    splits: int
    warps: int
    stages: int
    tma: bool = True
    prefetch: int = 1


@dataclass(frozen=True)
class OneRowConfig:
    """Tile and launch configuration of ``one_row``.

    Attributes:
        block_n: rows of the weight per program.
        width: columns per step.
        warps, stages: as in :class:`LinearConfig`.
    """

    block_n: int
    width: int
    warps: int
    stages: int


def row_block(rows: int) -> int:
    """Returns the input rows of a tile: 16, 32, 64 or 128."""
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"rows={rows} is outside 1 to {MOST_ROWS}; use a general matrix product")
    return max(16, 1 << (rows - 1).bit_length())


# Entries by bits and rows of the tile: largest number of outputs, block_n, width, warps, stages, tma, and
# number of programs that a multiprocessor runs at once. They were measured on an H200 with the layers of a 7B
# and an 8B model, 4096 to 28,672 outputs of 4096 inputs and 4096 outputs of more inputs; those of few outputs
# with 768 outputs.
_ANY_OUTS = 1 << 62
_TABLE: dict[int, dict[int, tuple[tuple[int, int, int, int, int, int, int], ...]]] = {
    16: {
        16: (
            (2048, 32, 128, 4, 9, 0, 1),
            (5120, 64, 128, 4, 6, 0, 1),
            (8192, 64, 128, 4, 5, 0, 1),
            (16384, 64, 64, 4, 7, 1, 1),
            (25600, 64, 256, 4, 5, 1, 1),
            (_ANY_OUTS, 128, 128, 4, 4, 1, 1),
        ),
        32: (
            (5120, 64, 128, 4, 5, 0, 1),
            (8192, 64, 64, 4, 9, 1, 1),
            (16384, 64, 64, 4, 6, 1, 1),
            (25600, 64, 128, 4, 4, 1, 1),
            (_ANY_OUTS, 128, 128, 4, 4, 1, 1),
        ),
        64: (
            (5120, 64, 128, 4, 5, 1, 1),
            (8192, 64, 64, 4, 7, 1, 1),
            (16384, 64, 128, 4, 7, 1, 1),
            (25600, 64, 64, 4, 4, 1, 1),
            (_ANY_OUTS, 128, 128, 4, 4, 1, 1),
        ),
        128: ((8192, 64, 64, 4, 7, 1, 1), (16384, 128, 64, 8, 5, 1, 1), (_ANY_OUTS, 128, 64, 8, 3, 1, 1)),
    },
    8: {
        16: (
            (5120, 64, 128, 4, 4, 0, 2),
            (8192, 64, 128, 4, 3, 1, 3),
            (16384, 64, 128, 4, 4, 0, 2),
            (25600, 64, 128, 4, 3, 0, 3),
            (_ANY_OUTS, 128, 128, 4, 3, 1, 1),
        ),
        32: (
            (5120, 64, 128, 4, 3, 1, 2),
            (8192, 64, 64, 4, 4, 1, 3),
            (16384, 64, 128, 4, 3, 1, 2),
            (25600, 64, 64, 4, 4, 1, 3),
            (_ANY_OUTS, 128, 128, 4, 3, 1, 1),
        ),
        64: ((5120, 64, 64, 4, 4, 1, 2), (25600, 64, 64, 4, 3, 1, 3), (_ANY_OUTS, 128, 64, 4, 4, 1, 2)),
        128: ((_ANY_OUTS, 64, 64, 4, 3, 1, 2),),
    },
    4: {
        16: (
            (5120, 64, 64, 4, 4, 0, 2),
            (8192, 64, 64, 4, 5, 0, 3),
            (25600, 128, 64, 4, 3, 1, 3),
            (_ANY_OUTS, 128, 128, 4, 3, 1, 1),
        ),
        32: (
            (5120, 64, 128, 4, 3, 0, 1),
            (25600, 64, 64, 4, 3, 1, 3),
            (_ANY_OUTS, 128, 64, 4, 3, 1, 1),
        ),
        64: ((5120, 64, 64, 4, 3, 1, 2), (8192, 64, 128, 4, 3, 1, 1), (_ANY_OUTS, 64, 64, 4, 3, 1, 2)),
        128: ((_ANY_OUTS, 128, 64, 8, 3, 0, 1),),
    },
}  # fmt: skip
# Up to so many inputs, programs do not share a tile, and weights of 16 bits with 16 rows use their own table.
_FEW_INS = 1024
_FEW_INS_TABLE = ((1024, 64, 256, 4, 3, 1, 1), (_ANY_OUTS, 64, 128, 4, 5, 0, 1))
_MOST_SPLITS = 8
# Fewest inputs of layers that multiply one row without tensor cores, most inputs with wide steps, and most
# outputs with narrower steps.
_LEAST_ROW, _MOST_WIDE, _FEW_OUTS = 2048, 8192, 5120
# If all operands are in registers, sums and unpacked codes of larger tiles spill with 4 warps.
_MOST_UNPACKED = 64 * 128 * 2
_WGMMA_OUTS = 64
# Major compute capabilities whose products use tensor memory.
_TENSOR_MEMORY = (10, 11)
# Bytes of shared memory of a multiprocessor of the H200, on which the table was measured.
_MEASURED_PER_SM = 233_472


def choose(bits: int, rows: int, outs: int, ins: int, device: Device) -> LinearConfig:
    """Returns the configuration for ``rows`` input rows and a weight ``[outs, ins]`` of 16, 8 or 4 bits.

    Args:
        outs: number of outputs of all weights of the launch.
        device: its shared memory limits the tile, and its multiprocessors share the work.

    Raises:
        ValueError: too many rows, or no tile fits the device.
    """
    block_m, few_ins = row_block(rows), ins <= _FEW_INS
    entries = _FEW_INS_TABLE if few_ins and (bits, block_m) == (16, 16) else _TABLE[bits][block_m]
    _, block_n, width, warps, stages, tma, resident = next(entry for entry in entries if outs <= entry[0])
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
    tiles, units = -(-outs // config.block_n), -(-ins * bits // (16 * max(config.width, SPLIT_WORDS)))
    splits = 1 if few_ins else max(1, min(_MOST_SPLITS, device.processors * resident // tiles))
    return replace(config, splits=min(splits, units))


def choose_one_row(outs: int, ins: int, device: Device) -> OneRowConfig | None:
    """Returns the configuration for one row and a 16-bit weight ``[outs, ins]``; None: use :func:`choose`.

    It is None with few inputs and on GPUs of AMD. The configurations were measured on an H200 with the layers
    of a 7B and an 8B model; other GPUs of NVIDIA use the same.
    """
    if not device.ptx or ins < _LEAST_ROW:
        return None
    if ins > _MOST_WIDE:
        return OneRowConfig(8, 256, 2, 5)
    return OneRowConfig(4, 512, 2, 6) if outs <= _FEW_OUTS else OneRowConfig(4, 1024, 4, 4)


def most_exact_rows(device: Device) -> int:
    """Returns the most rows of a product with one order of sums. They are fewer with tcgen05, on AMD and in
    the interpreter, where it is not known that tiles of several sizes give the same bits.
    """
    known = device.ptx and device.capability[0] not in _TENSOR_MEMORY
    return MOST_ROWS if known else MOST_PLAIN_ROWS


def choose_exact(rows: int, outs: int, ins: int, device: Device) -> tuple[LinearConfig, int]:
    """Returns a configuration for 16-bit weights and the rows of its tile, whose order of sums is fixed.

    An output is summed over the columns in order, within bounds that depend only on the splits, which are
    chosen for one row. Tiles of other sizes give the same bits if the same instruction multiplies them in
    steps of 16 columns: mma.sync, or wgmma for 64 outputs and more. Where this is not known, any number of
    rows uses the same tile.

    Raises:
        ValueError: more than :func:`most_exact_rows`, or no tile fits the device.
    """
    if rows > (most := most_exact_rows(device)):
        raise ValueError(f"{rows} rows exceed {most}, the most with one order of sums; split them")
    if most == MOST_PLAIN_ROWS:
        return choose(16, most, outs, ins, device), most
    config, one_row = choose(16, rows, outs, ins, device), choose(16, 1, outs, ins, device)
    if device.shared_products and one_row.block_n < _WGMMA_OUTS:
        more = one_row.splits * (_WGMMA_OUTS // one_row.block_n)
        one_row = replace(one_row, splits=min(more, _MOST_SPLITS, -(-ins // SPLIT_WORDS)))
        config = replace(config, block_n=max(config.block_n, _WGMMA_OUTS))
    width = min(config.width, SPLIT_WORDS) if one_row.splits > 1 else config.width
    return replace(config, splits=one_row.splits, width=width), row_block(rows)


def smaller(config: LinearConfig) -> LinearConfig | None:
    """Returns the next configuration that needs less shared memory, or None after the smallest."""
    if config.stages > 3:
        return replace(config, stages=config.stages - 1)
    if config.width > 32:
        return replace(config, width=config.width // 2)
    if config.stages > 1:
        return replace(config, stages=config.stages - 1)
    return replace(config, block_n=config.block_n // 2) if config.block_n > LEAST_BLOCK else None


def shared_bytes(config: LinearConfig, bits: int, block_m: int, device: Device) -> int:
    """Returns an upper bound on the bytes of shared memory of the compiled kernel, accurate to a few hundred.

    Each stage of the pipeline buffers a tile of packed weights, and for each code in a word a tile of x.
    Tiles that are being multiplied are in registers, or in another buffer if products read shared memory.
    """
    words, xs = 2 * config.width * config.block_n, 2 * config.width * block_m * 16 // bits
    from_shared = config.block_n >= 64 and device.shared_products
    ahead = max(1, config.stages - 1)
    in_use = config.stages if from_shared else ahead
    return words * (in_use if bits == 16 else ahead) + xs * in_use + 512
