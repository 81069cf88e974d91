"""Tile shapes of the tree-attention kernel: a table and the device's limits, never a first-call autotune.

A launch under CUDA-graph capture or in serving must not stop to try configurations, so the choice
is a pure function of problem and device. `docs/kernel.md` says what was measured to fill the
table.
"""

from dataclasses import dataclass, replace

from triforce_tree.kernels.device import Device

EDGE = 32
"""Rows of a tile that looks at the mask: one 32-bit half of a mask word per query and tile."""


@dataclass(frozen=True)
class KernelConfig:
    """How one problem is cut.

    Attributes:
        block_m: packed query rows (tokens x query heads of one KV head) per tile.
        block_n: KV rows per mask-free tile; a multiple of ``EDGE``.
        warps, stages: warps per program and depth of the load pipeline.
        programs_per_sm: resident programs of one multiprocessor the list is cut for.
        tma: load mask-free tiles with the bulk copy engine where the layout allows it.
        max_registers: per thread, to fit more programs on a multiprocessor; 0 for no limit.
        align: below this many tiles a program, shares do not straddle KV heads.
        edge_stages: depth of the load pipeline over tiles that look at the mask.
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


# head_dim -> (most rows, configuration) in rising order, for 16-bit elements; the last serves any number of
# rows, in sibling tiles. What pays was measured on an H200; a device with less shared memory takes the first
# of ``smaller`` that it has room for.
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
}
_MOST_IN_REGISTERS = 64 * 256
_FP32 = KernelConfig(16, EDGE, 8, 2, 1, tma=False)


def choose(rows: int, head_dim: int, element_bytes: int, device: Device) -> KernelConfig:
    """The configuration for ``rows`` packed query rows per KV head.

    A tile that holds all rows reads the KV once; sibling tiles walk the same KV rows side by side
    and share them through L2, which pays where smaller tiles overlap better.

    Args:
        head_dim: 1 to 256.
        element_bytes: 2 or 4, of queries and KV.
        device: whose shared memory bounds the tile.

    Raises:
        ValueError: ``head_dim`` is too large, or no tile fits the device.
    """
    padded = _padded(head_dim)
    if padded > 256:
        raise ValueError(f"head_dim={head_dim} is beyond 256, the largest that tiles fit; use 256 or less")
    table = _PREFERRED[padded] if element_bytes == 2 else [(rows, _FP32)]
    if not device.shared_products:
        # Both operands of a product are in registers, which 128 rows of so many columns overfill.
        table = [entry for entry in table if entry[0] * padded <= _MOST_IN_REGISTERS] or table
    config: KernelConfig | None
    config = next((config for most, config in table if most >= rows), table[-1][1])
    while config is not None:
        needed = shared_bytes(config, head_dim, element_bytes, device)
        if needed <= device.shared_bytes:
            return replace(config, programs_per_sm=min(config.programs_per_sm, device.resident(needed)))
        config = smaller(config)
    raise ValueError(
        f"{device.arch} has {device.shared_bytes:,} bytes of shared memory a block, too few for any tile at "
        f"head_dim={head_dim} with elements of {element_bytes} bytes; run on the CPU (device='cpu')"
    )


def smaller(config: KernelConfig) -> KernelConfig | None:
    """The next configuration that needs less shared memory; None behind the smallest."""
    if config.stages > 2:
        return replace(config, stages=config.stages - 1)
    if config.block_n > EDGE:
        return replace(config, block_n=config.block_n // 2)
    if config.block_m > 16:
        return replace(config, block_m=config.block_m // 2)
    if config.stages > 1 or config.edge_stages > 1:
        return replace(config, stages=1, edge_stages=1)
    return None


def shared_bytes(config: KernelConfig, head_dim: int, element_bytes: int, device: Device) -> int:
    """Shared memory that the compiled kernel asks for, in bytes, to a few dozen.

    Queries and the probabilities that are multiplied with V lie beside the pipeline's buffers of K and V. A
    tile whose products read both operands from shared memory (64 rows and more on sm_90 and sm_100) holds a
    tile of each for every stage, others one less; they keep probabilities in registers.
    """
    if element_bytes == 4:
        # Products in fp64 have queries and one of K and V in shared memory, those in fp32 only V.
        columns, probs = _padded(head_dim), 8 * config.block_m * config.block_n
        if device.fp64_products:
            return 8 * (config.block_m + config.block_n) * columns + probs + 1024
        return 4 * config.block_n * columns + probs + 1024
    row = _padded(head_dim) * element_bytes
    from_shared = config.block_m >= 64 and device.shared_products
    buffers = config.stages if from_shared else max(1, config.stages - 1)
    probs = 0 if from_shared else config.block_m * config.block_n * element_bytes
    return config.block_m * row + probs + 2 * buffers * config.block_n * row + 128


def _padded(head_dim: int) -> int:
    return max(64, 1 << (head_dim - 1).bit_length())
