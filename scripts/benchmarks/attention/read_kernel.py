"""Measures the read bandwidth of a GPU by a Triton kernel that writes very little."""

from functools import partial

import torch
import triton
import triton.language as tl

from scripts.benchmarks.common.timing import time_calls

# Pairs of the number of programs and of elements that each reads at a time; the fastest pair counts.
_GRIDS = ((2**11, 4096), (2**12, 4096), (2**14, 8192), (2**13, 2048))


@triton.jit
def _read_kernel(out_ptr, in_ptr, per_program, BLOCK: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.float32)
    base = in_ptr + tl.program_id(0).to(tl.int64) * per_program
    for at in tl.range(0, per_program, BLOCK, num_stages=4):
        acc += tl.load(base + at + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc))


def read_rate(device: torch.device) -> float:
    """Returns the bytes per second of a sum over 4 GB."""
    source = torch.randn(2**30, dtype=torch.float32, device=device)
    sums = torch.empty(2**17, dtype=torch.float32, device=device)
    rates = []
    for programs, block in _GRIDS:
        per = source.numel() // programs
        took = time_calls([partial(_read_kernel[(programs,)], sums, source, per, BLOCK=block)])
        rates.append(source.numel() * 4 / took * 1e6)
    return max(rates)
