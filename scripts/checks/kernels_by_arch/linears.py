"""Launches of the kernels of linear layers with few rows, as ``variants`` has them."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from triforce_tree.kernels.device import Device
from triforce_tree.kernels.linear import launch as linear
from triforce_tree.kernels.linear import reference
from triforce_tree.kernels.linear.configs import choose, counters_for, row_block

BITS = (16, 8, 4)
_ROWS = (16, 32, 64, 128)
_SHAPES = (
    *((outs, 4096) for outs in (768, 2048, 4096, 8192, 12_288, 22_016, 28_672)), (768, 768), (4096, 768),
)  # fmt: skip


def launches(device: Device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Returns names and calls; row counts that have equal tiles on the device are compiled once."""
    for bits in BITS:
        for count in _ROWS:
            kernels = {}
            for out, ins in _SHAPES:
                config = choose(bits, count, out, ins, device)
                # The number of splits is no constant of the kernel, but whether there are any is.
                key = config.block_n, config.width, config.warps, config.stages, config.tma, config.splits > 1
                kernels.setdefault(key, (out, ins))
            for out, ins in kernels.values():
                name = f"{bits} bits, {row_block(count)} rows, {out} x {ins}"
                yield name, partial(_multiply, bits, count, out, ins)
        for kind in ("fp16", "bias", "fused", "unaligned"):
            name = f"{bits} bits, 16 rows, 4096 x 4096, {kind}"
            yield name, partial(_multiply, bits, 16, 4096, 4096, kind)
    # Without tensor cores, where the device has such a configuration.
    for out, ins in ((4096, 4096), (12_288, 4096), (4096, 14_336)):
        yield f"one row, {out} x {ins}", partial(_multiply, 16, 1, out, ins)
    for kind in ("fp16", "bias", "fused", "unaligned"):
        yield f"one row, 4096 x 4096, {kind}", partial(_multiply, 16, 1, 4096, 4096, kind)


def _multiply(bits: int, count: int, out: int, ins: int, kind: str = "") -> None:
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    x = torch.zeros(count, ins, dtype=dtype)
    bias = torch.zeros(out, dtype=dtype) if kind == "bias" else None
    blocks = 0 if bits == 16 else reference.blocks_of(ins, bits)
    width = 128 * blocks or ins
    stored = width + (4 if kind == "unaligned" else 0)
    words = torch.zeros(out, stored, dtype=dtype if bits == 16 else torch.int16)[:, :width]
    scales = {16: None, 8: torch.zeros(out), 4: torch.zeros(blocks, out, 4, dtype=torch.bfloat16)}[bits]
    counters = counters_for(out)
    if kind == "fused":
        linear.linears(x, [words] * 3, [] if scales is None else [scales] * 3, [], [counters] * 3, bits)
    elif scales is None:
        linear.linear(x, words, bias, counters)
    else:
        linear.low_bit_linear(x, words, scales, bias, bits, counters)
