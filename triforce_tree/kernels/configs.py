"""Tile shapes of the tree-attention kernel: a table per architecture, never a first-call autotune.

A launch under CUDA-graph capture or in serving must not stop to try configurations, so the choice
is a pure function of the problem's shape. `docs/kernel.md` says what was measured to fill the
table.
"""

from dataclasses import dataclass

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


# head_dim -> (most rows, configuration) in rising order, for 16-bit elements on Hopper; the last
# serves any number of rows, in sibling tiles.
_HOPPER = {
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


def choose(rows: int, head_dim: int, element_bytes: int) -> KernelConfig:
    """The configuration for ``rows`` packed query rows per KV head.

    A tile that holds all rows reads the KV once; sibling tiles walk the same KV rows side by side
    and share them through L2, which pays where smaller tiles overlap better.
    """
    padded = max(64, 1 << (head_dim - 1).bit_length())
    if padded > 256:
        raise ValueError(f"head_dim={head_dim} is beyond 256, the largest that tiles fit; use 256 or less")
    if element_bytes == 4:
        # fp32 is multiplied in fp64, whose tiles take four times the registers.
        return KernelConfig(16, EDGE, 8, 2, 1, tma=False)
    table = _HOPPER[padded]
    return next((config for most, config in table if most >= rows), table[-1][1])
