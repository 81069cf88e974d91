"""Chooses tile shapes of the tree-attention kernel by a table and the device's limits, without autotuning.

A launch under CUDA-graph capture or in serving must not stop to time configurations, so the choice
is a pure function of problem and device. The measurements for the table are in
`docs/log/2026-11-22-tiles-of-tree-attention.md`.
"""

from dataclasses import dataclass, replace

import torch

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.device import Device, describe

# Pages of at least so many slots have the same tiles as keys and values without pages.
_WHOLE_PAGE = 64
EDGE = 32
"""Number of KV positions of a masked (edge) tile, whose mask is a 32-bit half of a mask word per query."""


@dataclass(frozen=True)
class KernelConfig:
    """Tile and launch configuration of the kernel.

    Attributes:
        block_m: packed query rows (tokens x query heads of one KV head) per tile.
        block_n: KV positions per unmasked tile; a multiple of ``EDGE``.
        warps, stages: warps per program and depth of the load pipeline.
        programs_per_sm: programs that run on a multiprocessor at once; the list of tiles is divided among
            them.
        tma: whether unmasked tiles are loaded with the bulk copy engine where the layout allows it.
        max_registers: limit on registers per thread, so that more programs run at once; 0 for no limit.
        align: slices do not span two KV heads if a program has fewer tiles than this.
        edge_stages: depth of the load pipeline over masked tiles.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    tma: bool = True
    max_registers: int = 0
    align: int = 16
    edge_stages: int = 2

    def __post_init__(self) -> None:
        if self.block_n % EDGE:
            raise ValueError(f"block_n={self.block_n} is not a multiple of {EDGE}; use 64 or 128")


# head_dim -> (most query rows, configuration) in rising order, for 16-bit elements. The last configuration
# serves any number of query rows, in several tiles over the same KV slots. The table was measured on an H200;
# a device with less shared memory takes the first result of ``smaller`` that fits.
_PREFERRED = {
    64: [
        (16, KernelConfig(16, 128, 4, 4, 2)),
        (64, KernelConfig(64, 128, 4, 3, 2)),
        (128, KernelConfig(128, 64, 8, 4, 1)),
    ],
    128: [
        (16, KernelConfig(16, 128, 4, 3, 1)),
        (64, KernelConfig(64, 64, 4, 3, 2)),
    ],
    256: [
        (16, KernelConfig(16, 32, 4, 3, 2)),
        (64, KernelConfig(64, 64, 8, 2, 1)),
        (128, KernelConfig(128, 32, 8, 2, 1)),
    ],
    # These were not measured; they are the largest tiles that compile without spilling.
    512: [
        (16, KernelConfig(16, 32, 8, 3, 1)),
        (32, KernelConfig(32, 32, 8, 2, 1)),
    ],
}
# The same table for keys and values of different widths (D, D_v); other pairs take the table above.
_PREFERRED_WIDTHS = {
    (192, 128): [
        (16, KernelConfig(16, 128, 4, 3, 1)),
        (64, KernelConfig(64, 64, 4, 2, 2)),
    ],
}
# The same tables for pages of fewer slots than these tiles. A tile is gathered from pages, or is a page of
# 32.
_PREFERRED_GATHERED = {128: [(16, KernelConfig(16, 64, 4, 3, 3))]}
_PREFERRED_PAGES_OF_32 = {128: [*_PREFERRED_GATHERED[128], (64, KernelConfig(64, 32, 4, 3, 2))]}
_MOST_IN_REGISTERS = 64 * 256
_FP32 = KernelConfig(16, EDGE, 8, 2, 1, tma=False)
# No pipeline: its buffers and operands in fp64 do not both fit shared memory.
_FP32_WIDE = replace(_FP32, stages=1, edge_stages=1)
_MOST_FP32 = 256
MOST_KEYS, MOST_VALUES = 576, 512
"""Most elements of a key (parts of 512 and 64 columns) and of a value that the tiles support."""


def key_parts(head_dim: int, value_dim: int, element_bytes: int = 2) -> tuple[int, int]:
    """Returns the columns of the two parts in which a tile of keys is multiplied; the second may be 0.

    The number of columns of a tile is a power of two. Keys of 192 elements with values of 128 have parts of
    128 and 64 columns, which need less shared memory than one part of 256. Keys as wide as their values are
    one part. Keys in fp32 of more than 256 elements are two parts, so that a part fits shared memory in fp64.
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    first = whole // 2
    if element_bytes == 4 and first == _MOST_FP32:
        return first, first
    if head_dim in (whole, value_dim) or first < 16:
        return whole, 0
    second = max(16, 1 << (head_dim - first - 1).bit_length())
    return (first, second) if first + second < whole else (whole, 0)


def value_columns(value_dim: int, element_bytes: int) -> int:
    """Returns the columns of a tile of values, a power of two.

    Values in fp32 of more than 256 elements have two tiles, because their sums in fp64 do not fit the
    registers of a program. A second program computes the second tile, and computes all scores again.
    """
    whole = max(16, 1 << (value_dim - 1).bit_length())
    return min(whole, _MOST_FP32) if element_bytes == 4 else whole


def choose(
    query_rows: int,
    head_dim: int,
    element_bytes: int,
    device: Device,
    value_dim: int = 0,
    kv_bytes: int = 0,
    page: int = 0,
) -> KernelConfig:
    """Returns the configuration for ``query_rows`` packed query rows per KV head.

    A tile that holds all query rows reads the KV slots once. Several smaller tiles read the same KV slots
    concurrently through L2, which is faster where smaller tiles overlap loads and products better.

    Args:
        head_dim: D, 1 to 512, or to 576 where ``value_dim`` is less.
        element_bytes: bytes of an element of queries and KV, 2 or 4.
        kv_bytes: 1 where keys and values are int8, for which the tables were not measured; else 0.
        device: its shared memory limits the tile.
        value_dim: D_v where it differs from D, else 0.
        page: KV slots of a page; 0 for keys and values without pages.

    Raises:
        ValueError: ``head_dim`` or ``value_dim`` is too large, or no tile fits the device.
    """
    value_dim = value_dim or head_dim
    widest = max(head_dim, value_dim)
    if head_dim > MOST_KEYS or value_dim > MOST_VALUES:
        raise ValueError(
            f"keys of {head_dim} and values of {value_dim} elements exceed {MOST_KEYS} and {MOST_VALUES}, "
            "the most that tiles fit; run on the CPU (device='cpu')"
        )
    padded = min(MOST_VALUES, _padded(widest))
    table = _PREFERRED_WIDTHS.get((head_dim, value_dim), _PREFERRED[padded])
    if 0 < page < _WHOLE_PAGE and head_dim == value_dim:
        bulk = device.tma and page == EDGE
        table = [*(_PREFERRED_PAGES_OF_32 if bulk else _PREFERRED_GATHERED).get(padded, ()), *table]
    if element_bytes == 4:
        table = [(query_rows, _FP32 if padded <= _MOST_FP32 else _FP32_WIDE)]
    if not device.shared_products:
        # Both operands of a product are in registers, which do not suffice for 128 query rows of many
        # columns.
        table = [entry for entry in table if entry[0] * padded <= _MOST_IN_REGISTERS] or table
    config: KernelConfig | None
    config = next((config for most, config in table if most >= query_rows), table[-1][1])
    while config is not None:
        needed = shared_bytes(config, head_dim, element_bytes, device, value_dim, kv_bytes)
        if needed <= device.shared_bytes:
            return replace(config, programs_per_sm=min(config.programs_per_sm, device.resident(needed)))
        config = smaller(config)
    raise ValueError(
        f"{device.arch} has {device.shared_bytes:,} bytes of shared memory a block, too few for any tile at "
        f"head_dim={widest} with elements of {element_bytes} bytes; run on the CPU (device='cpu')"
    )


def smaller(config: KernelConfig) -> KernelConfig | None:
    """Returns the next configuration that needs less shared memory, or None after the smallest."""
    if config.stages > 2:
        return replace(config, stages=config.stages - 1)
    if config.block_n > EDGE:
        return replace(config, block_n=config.block_n // 2)
    if config.block_m > 16:
        return replace(config, block_m=config.block_m // 2)
    if config.stages > 1 or config.edge_stages > 1:
        return replace(config, stages=1, edge_stages=1)
    return None


def shared_bytes(
    config: KernelConfig,
    head_dim: int,
    element_bytes: int,
    device: Device,
    value_dim: int = 0,
    kv_bytes: int = 0,
) -> int:
    """Returns the bytes of shared memory that the compiled kernel needs, accurate to a few dozen.

    They hold queries, the probabilities that are multiplied with V, and the pipeline's buffers of K and V. A
    tile whose products read both operands from shared memory (64 or more query rows on sm_90 and sm_100) has
    a buffer of K and of V for every stage, and keeps probabilities in registers. Other tiles have one buffer
    less. Without a pipeline, K and V share one buffer. With int8 (``kv_bytes`` 1) the buffers also hold
    scales.
    """
    value_dim = value_dim or head_dim
    parts = key_parts(head_dim, value_dim, element_bytes)
    keys, values = max(64, sum(parts)), max(64, value_columns(value_dim, element_bytes))
    if element_bytes == 4:
        # Products in fp64 read queries and one of K and V from shared memory; products in fp32 only V.
        probs = 8 * config.block_m * config.block_n
        if device.fp64_products and kv_bytes != 1:
            if config.stages == 1 and parts[1]:
                # The first part of the queries stays in registers.
                keys = parts[1]
            return 8 * (config.block_m * keys + config.block_n * max(64, *parts, values)) + probs + 1024
        return 4 * config.block_n * values + probs + 1024
    from_shared = config.block_m >= 64 and device.shared_products
    buffers = config.stages if from_shared else max(1, config.stages - 1)
    probs = 0 if from_shared else config.block_m * config.block_n
    slot = (keys + values) * (kv_bytes or element_bytes) + (8 if kv_bytes == 1 else 0)
    if config.stages == 1 and not from_shared:
        slot = max(*parts, values) * element_bytes
    return (config.block_m * keys + probs) * element_bytes + buffers * config.block_n * slot + 128


def _padded(head_dim: int) -> int:
    return max(64, 1 << (head_dim - 1).bit_length())


def config_for(
    query_rows: int,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_dtype: torch.dtype | None = None,
    page: int = 0,
) -> KernelConfig:
    """Returns the configuration from the table; on the CPU, heads may exceed the table's limits."""
    dim, value_dim = heads.dim, heads.value_dim
    if torch.device(device).type == "cpu":
        dim, value_dim = min(dim, MOST_VALUES), min(value_dim, MOST_VALUES)
    kv_bytes = 1 if kv_dtype == torch.int8 else 0
    return choose(query_rows, dim, dtype.itemsize, describe(device), value_dim, kv_bytes, page)


def slices_for(query_rows: int, device: torch.device | str, config: KernelConfig) -> int:
    """Returns the number of slices: programs that run at once, divided by the tiles of a slice."""
    programs = describe(device).processors * config.programs_per_sm
    return max(1, programs // -(-query_rows // config.block_m))
