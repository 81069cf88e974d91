"""One layer of tree attention on a GPU: problems, rotated KV, and what the chip reaches at most."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.benchmarks.common.timing import time_calls
from triforce_tree.kernels.attention.plan import Heads

L2_BYTES = 60 * 2**20


@dataclass(frozen=True)
class Cell:
    """A line of the table: ``batch`` sequences of ``length`` prefix rows and a tree of ``size``."""

    query_heads: int
    kv_heads: int
    length: int
    size: int
    batch: int = 1
    dim: int = 128

    @property
    def heads(self) -> Heads:
        return Heads(self.query_heads, self.kv_heads, self.dim)

    @property
    def rows(self) -> int:
        return self.length + self.size

    @property
    def bytes(self) -> int:
        """Fewest bytes: K and V once, queries and results once."""
        kv = 2 * self.rows * self.kv_heads * self.dim * 2
        return self.batch * (kv + 2 * self.size * self.query_heads * self.dim * 2)

    @property
    def flops(self) -> int:
        return self.batch * 4 * self.size * self.query_heads * self.dim * self.rows

    def roof_us(self, ceilings: "Ceilings") -> float:
        return max(self.bytes / ceilings.read_bandwidth, self.flops / ceilings.matmul_rate) * 1e6

    def __str__(self) -> str:
        batch = f" x{self.batch}" if self.batch > 1 else ""
        return f"{self.query_heads}/{self.kv_heads} L={self.length} T={self.size}{batch}"


@dataclass(frozen=True)
class Ceilings:
    """What this chip reached in this run, in bytes and FLOPs per second."""

    read_bandwidth: float
    matmul_rate: float


def tree_mask(size: int, device: str = "cuda") -> Tensor:
    """Ancestors of a heap-ordered binary tree: bool ``[T, T]``."""
    mask = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        mask[node] |= mask[(node - 1) // 2]
    return mask.to(device)


def random_kv(cell: Cell, layout: str = "heads") -> list[tuple[Tensor, Tensor]]:
    """Enough copies of ``[B, H_kv, S, D]`` K and V that a round of calls leaves nothing in L2."""
    copies = max(2, -(-4 * L2_BYTES // (cell.bytes)))
    shape = (cell.batch, cell.kv_heads, cell.rows, cell.dim)
    if layout == "rows":
        shape = (cell.batch, cell.rows, cell.kv_heads, cell.dim)

    def one() -> Tensor:
        made = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        return made.transpose(1, 2) if layout == "rows" else made

    return [(one(), one()) for _ in range(copies)]


@triton.jit
def _read_kernel(out_ptr, in_ptr, per_program, BLOCK: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.float32)
    base = in_ptr + tl.program_id(0).to(tl.int64) * per_program
    for at in tl.range(0, per_program, BLOCK, num_stages=4):
        acc += tl.load(base + at + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc))


def measure_ceilings() -> Ceilings:
    """Read bandwidth (a sum over 4 GB, nothing written) and the rate of an 8192^3 bf16 product."""
    source = torch.randn(2**30, device="cuda")
    sums = torch.empty(2**17, device="cuda")
    rates = []
    for programs, block in [(2**11, 4096), (2**12, 4096), (2**14, 8192), (2**13, 2048)]:
        per = source.numel() // programs
        took = time_calls([lambda g=programs, b=block, p=per: _read_kernel[(g,)](sums, source, p, BLOCK=b)])
        rates.append(source.numel() * 4 / took * 1e6)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    took = time_calls([lambda: torch.matmul(a, b, out=product)])
    return Ceilings(max(rates), 2 * 8192**3 / took * 1e6)
