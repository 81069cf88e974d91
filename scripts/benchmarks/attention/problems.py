"""Problems of tree attention in one layer, copies of their KV, and the rates that the machine reaches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.benchmarks.common.timing import median_us
from triforce_tree.kernels.attention.plan import Heads

KV = list[tuple[Tensor, Tensor]]

_L2_BYTES = 60 * 2**20
# The size of the matrices by which the rate of products is measured.
_PRODUCT = 8192


@dataclass(frozen=True)
class Cell:
    """A problem of ``batch`` sequences, each with a prefix of ``length`` tokens and a tree of ``size`` nodes.

    ``itemsize`` is the bytes of an element of queries, keys, values and results.
    """

    query_heads: int
    kv_heads: int
    length: int
    size: int
    batch: int = 1
    dim: int = 128
    itemsize: int = 2

    @property
    def heads(self) -> Heads:
        return Heads(self.query_heads, self.kv_heads, self.dim)

    @property
    def rows(self) -> int:
        return self.length + self.size

    @property
    def bytes(self) -> int:
        """Returns the fewest bytes to transfer: keys, values, queries and results once."""
        kv = 2 * self.rows * self.kv_heads * self.dim * self.itemsize
        return self.batch * (kv + 2 * self.size * self.query_heads * self.dim * self.itemsize)

    @property
    def flops(self) -> int:
        return self.batch * 4 * self.size * self.query_heads * self.dim * self.rows

    def roof_us(self, ceilings: "Ceilings") -> float:
        return ceilings.roof_us(self.bytes, self.flops)

    def __str__(self) -> str:
        batch = f" x{self.batch}" if self.batch > 1 else ""
        return f"{self.query_heads}/{self.kv_heads} L={self.length} T={self.size}{batch}"


@dataclass(frozen=True)
class Ceilings:
    """The rates that this machine reached in this run, in bytes and FLOPs per second."""

    read_bandwidth: float
    matmul_rate: float

    def roof_us(self, size: int, flops: int) -> float:
        """Returns the least microseconds for reading ``size`` bytes and computing ``flops``."""
        return max(size / self.read_bandwidth, flops / self.matmul_rate) * 1e6


def tree_mask(size: int, device: torch.device | str = "cuda") -> Tensor:
    """Returns the mask of ancestors in a heap-ordered binary tree, bool ``[T, T]``."""
    mask = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        mask[node] |= mask[(node - 1) // 2]
    return mask.to(device)


def random_kv(cell: Cell, layout: str = "heads") -> KV:
    """Returns copies of K and V ``[B, H_kv, S, D]`` that together exceed the L2 cache."""
    shape = (cell.batch, cell.kv_heads, cell.rows, cell.dim)
    if layout == "rows":
        shape = (cell.batch, cell.rows, cell.kv_heads, cell.dim)

    def one() -> Tensor:
        made = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        return made.transpose(1, 2) if layout == "rows" else made

    return [(one(), one()) for _ in range(max(2, -(-4 * _L2_BYTES // cell.bytes)))]


def measure_ceilings() -> Ceilings:
    """Measures the read bandwidth by a large sum, and the rate of a large product in bf16."""
    from scripts.benchmarks.attention.read_kernel import read_rate

    device = torch.device("cuda")
    rate = read_rate(device)
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    took = median_us([lambda: torch.matmul(a, b, out=product)], device)
    return Ceilings(rate, 2 * _PRODUCT**3 / took * 1e6)
