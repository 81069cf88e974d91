"""Linear layers with few rows on a GPU: shapes, random weights, errors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.kernels.linear import launch, reference
from triforce_tree.kernels.linear.configs import counters_for

BITS = (16, 8, 4)


@dataclass(frozen=True)
class Shape:
    """Numbers of output columns of linears that share an input, and of its columns."""

    outs: tuple[int, ...]
    ins: int

    @property
    def out(self) -> int:
        return sum(self.outs)

    def __str__(self) -> str:
        return f"[{'+'.join(map(str, self.outs))}, {self.ins}]"


def block(width: int, inner: int, heads: int | None = None) -> list[Shape]:
    """Returns the shapes that a decoder layer multiplies: q+k+v, o, gate+up, down."""
    keys = width if heads is None else heads
    return [
        Shape((width, keys, keys), width), Shape((width,), width),
        Shape((inner, inner), width), Shape((width,), inner),
    ]  # fmt: skip


LAYERS = {
    "7B": block(4096, 11008), "8B": block(4096, 14336, 1024), "68M": block(768, 3072),
    "head of 8B": [Shape((128_256,), 4096)],
}  # fmt: skip
ODD = [Shape((1000,), 1000), Shape((100, 33, 65), 264), Shape((333,), 520), Shape((65, 128), 4100)]


class Weights:
    """Random weights of one shape."""

    def __init__(self, bits: int, shape: Shape, dtype: torch.dtype):
        self.bits, self.shape, self.dtype = bits, shape, dtype
        self.counters = [counters_for(outs, "cuda") for outs in shape.outs]
        self.words = [self._words(outs) for outs in shape.outs]
        self.scales = [self._scales(outs) for outs in shape.outs] if bits < 16 else []

    def _words(self, outs: int) -> Tensor:
        if self.bits == 16:
            made = torch.empty(outs, self.shape.ins, dtype=self.dtype, device="cuda")
            return made.normal_(std=self.shape.ins**-0.5)
        size = (outs, 128 * reference.blocks_of(self.shape.ins, self.bits))
        return torch.randint(-(2**15), 2**15, size, dtype=torch.int16, device="cuda")

    def _scales(self, outs: int) -> Tensor:
        blocks = reference.blocks_of(self.shape.ins, self.bits)
        size, kind = ((outs,), torch.float32) if self.bits == 8 else ((blocks, outs, 4), torch.bfloat16)
        top = self.shape.ins**-0.5 / 2 ** (self.bits - 1)
        return torch.rand(size, device="cuda").add_(0.5).mul_(top).to(kind)

    def call(self, x: Tensor, bias: list[Tensor] | None) -> Tensor:
        words, scales = self.words, self.scales
        if len(words) > 1:
            return launch.linears(x, words, scales, bias or [], self.counters, self.bits)
        one = bias[0] if bias else None
        if self.bits == 16:
            return launch.linear(x, words[0], one, self.counters[0])
        return launch.low_bit_linear(x, words[0], scales[0], one, self.bits, self.counters[0])

    def exact(self, x: Tensor, bias: list[Tensor] | None = None) -> tuple[Tensor, float]:
        """Returns the result in fp64 and the allowed error, twice the error of torch in x's dtype."""
        words, scales, added = self.words, self.scales, torch.cat(bias) if bias else None
        weight = torch.cat(words)
        if scales:
            weight = torch.cat([
                reference.dequantise(w, s, self.bits, self.shape.ins)
                for w, s in zip(words, scales, strict=True)
            ])  # fmt: skip
        double = None if added is None else added.double()
        gold = torch.nn.functional.linear(x.double(), weight.double(), double)
        near = gold.to(x.dtype)
        if not scales:
            near = torch.nn.functional.linear(x, weight, added)
        return gold, 2 * (near.double() - gold).abs().max().item() + 1e-6
