"""Attention on the CPU over rows in host memory: ways to compute it, ways to use many cores.

A way takes queries ``[H_kv, R, D]`` in bf16, R = T x query heads a KV head, and rows ``[n, 2, H_kv, D]`` as
``kv/offload/host_store.py`` keeps them. It returns a state:
out ``[H_kv, R, D]`` and lse ``[H_kv, R]``, in fp32.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.cpu_attention import CpuAttention, instructions, supports
from triforce_tree.kernels.cpu.host_rows import State, flash, merged

Way = Callable[..., State]


def products(dtype: torch.dtype) -> Way:
    """Two batched products in this dtype, and a softmax in fp32 between them."""

    def way(q: Tensor, rows: Tensor) -> State:
        k, v = rows.to(dtype).permute(1, 2, 0, 3)
        # Keys as they are stored are no operand that oneDNN takes as it is; a copy costs less than its way.
        scores = (q.to(dtype) @ k.contiguous().mT).float().mul_(q.shape[-1] ** -0.5)
        weights = scores.softmax(-1)
        # The fused softmax keeps its sum to itself: the largest weight is exp(best - lse).
        lse = scores.amax(-1) - weights.amax(-1).log()
        return (weights.to(dtype) @ v).float(), lse

    return way


_TORCH: dict[str, Way] = {
    "flash": flash,
    "bf16 products": products(torch.bfloat16),
    "fp32 products": products(torch.float32),
}


def ours(q: Tensor, rows: Tensor, kernel: CpuAttention) -> State:
    """Our kernel, which takes all heads of a query in a row."""
    out, lse = kernel(q.transpose(0, 1).contiguous(), rows)
    return out.transpose(0, 1).float(), lse.T


WAYS: dict[str, Way] = {**_TORCH, "our kernel": ours}


class Team:
    """Inside, all threads work on each operation, on one piece after the other.

    Attributes:
        ways: those that have work for all threads in one operation.

    Args:
        threads: of torch.
        block: rows, a divisor of those of a piece.
    """

    name = "one call a piece"
    ways = ("flash",)

    def __init__(self, threads: int, block: int) -> None:
        self.threads, self.block = threads, block

    def __enter__(self) -> "Team":
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)

    def attend(self, way: Way, q: Tensor, pieces: Sequence[Tensor]) -> State:
        """State of all rows of the pieces; the way is ``flash``, which alone takes parts."""
        assert way is flash
        return merged([flash(q, piece, piece.shape[0] // self.block) for piece in pieces])

    def read(self, pieces: Sequence[Tensor]) -> None:
        for piece in pieces:
            _words(piece).sum()


class Workers:
    """Inside, each thread attends to blocks of its own and merges their states; then all merge the threads'.

    Args:
        threads: how many.
        block: rows, a divisor of those of a piece.
    """

    name = "blocks of each thread's own"
    ways = tuple(_TORCH)

    def __init__(self, threads: int, block: int) -> None:
        self.threads, self.block = threads, block

    def __enter__(self) -> "Workers":
        # Torch's own threads would wait for work where these want the cores. The number is each thread's own.
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        torch.set_num_threads(self._before)

    def attend(self, way: Way, q: Tensor, pieces: Sequence[Tensor]) -> State:
        """State of all rows of the pieces."""
        states = self._shares(lambda blocks: merged([way(q, rows) for rows in blocks]), pieces)
        flat = [(out.flatten(0, 1), lse.flatten()) for out, lse in states]
        share = -(-flat[0][1].numel() // self.threads)

        def part(start: int) -> State:
            return merged([(out[start : start + share], lse[start : start + share]) for out, lse in flat])

        parts = self._pool.map(part, range(0, flat[0][1].numel(), share))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs).view_as(states[0][0]), torch.cat(lses).view_as(states[0][1])

    def read(self, pieces: Sequence[Tensor]) -> None:
        self._shares(lambda blocks: [_words(rows).sum() for rows in blocks], pieces)

    def _shares(self, work: Callable[[list[Tensor]], Any], pieces: Sequence[Tensor]) -> list[Any]:
        blocks = [rows for piece in pieces for rows in piece.split(self.block)]
        shares = [share for i in range(self.threads) if (share := blocks[i :: self.threads])]
        return list(self._pool.map(work, shares))


class Kernel(Team):
    """Inside, our kernel attends to one piece after the other, on threads of its own."""

    ways = ("our kernel",)
    instructions: str

    def __enter__(self) -> "Kernel":
        super().__enter__()
        self._kernel = CpuAttention(self.threads, way=self.instructions)
        return self

    def attend(self, way: Way, q: Tensor, pieces: Sequence[Tensor]) -> State:
        """State of all rows of the pieces; the way is the kernel's own."""
        return merged([way(q, piece, self._kernel) for piece in pieces])


def _kernels() -> tuple[type[Kernel], ...]:
    """One for each of its ways on this processor, fastest first."""
    if not supports(128, torch.bfloat16):
        return ()
    return tuple(
        type("Kernel", (Kernel,), {"name": f"on {way}", "instructions": way}) for way in instructions()
    )


Spread = Team | Workers
SPREADS: tuple[type[Spread], ...] = (Team, Workers, *_kernels())


def _words(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.int64)
