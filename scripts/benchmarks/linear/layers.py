"""The linears of whole decoder layers in one CUDA graph, alone and among small kernels; a peer library."""

import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.benchmarks.linear.problems import BITS, LAYERS, ROTATION, Shape, Weights, time_us, weight_bytes
from triforce_tree.kernels.linear.configs import LinearConfig

# Bits, shape and rows.
Cell = tuple[int, Shape, int]


@triton.jit
def _small_kernel(out_ptr, x_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + at, -tl.load(x_ptr + at, mask=at < count), mask=at < count)


def small(x: Tensor, early: bool) -> Tensor:
    """Something small, where a layer has norms, attention, activations; early: the next kernel may come."""
    if not early:
        return x.neg()
    out = torch.empty_like(x)
    _small_kernel[(triton.cdiv(x.numel(), 1024),)](out, x, x.numel(), BLOCK=1024, launch_pdl=True)
    return out


def layer_times(best: dict[Cell, LinearConfig], rows: list[int]) -> Iterator[tuple[list[Any], float]]:
    """Keys and microseconds of one layer, over as many layers as L2 cannot hold."""
    for name in ("7B", "8B"):
        for bits in BITS:
            size = sum(weight_bytes(bits, shape) for shape in LAYERS[name])
            made = [[Weights(bits, shape) for shape in LAYERS[name]] for _ in range(-(-2 * ROTATION // size))]
            for count in rows:
                xs = {w.shape.ins: torch.randn(count, w.shape.ins, device="cuda").bfloat16() for w in made[0]}
                for way, run in _ways(bits, count, best):
                    calls = [
                        lambda ws=ws, run=run, xs=xs: [run(w, xs[w.shape.ins]) for w in ws] for ws in made
                    ]
                    yield [name, bits, count, way], time_us(calls)
    x = torch.randn(16, 4096, device="cuda").bfloat16()
    for early in (False, True):
        yield ["small", early], time_us([lambda e=early: small(x, e)])


def _ways(
    bits: int, rows: int, best: dict[Cell, LinearConfig]
) -> Iterator[tuple[str, Callable[[Weights, Tensor], object]]]:
    def ours(w: Weights, x: Tensor, prefetch: int | None = None) -> Tensor:
        config = best.get((bits, w.shape, rows))
        if config is not None and prefetch is not None:
            config = replace(config, prefetch=prefetch)
        return w.call(x, 0, None, config)

    def apart(w: Weights, x: Tensor) -> None:
        for outs, words, scales in zip(w.shape.outs, w.words[0], w.scales[0] or w.words[0], strict=True):
            one = Weights.__new__(Weights)
            one.bits, one.dtype, one.counters = bits, w.dtype, w.counters
            one.shape = Shape((outs,), w.shape.ins)
            one.words, one.scales = [[words]], [[scales]]
            one.call(x)

    def theirs(w: Weights, x: Tensor) -> None:
        for words in w.words[0]:
            torch.nn.functional.linear(x, words)

    yield "fused", ours
    yield "fused, small kernels between", lambda w, x: ours(w, small(x, False))
    for steps in (1, 4, 8):
        yield (
            f"fused, small kernels between, early, prefetch {steps}",
            (lambda w, x, steps=steps: ours(w, small(x, True), steps)),
        )
    yield "one by one", apart
    yield "one by one, small kernels between", lambda w, x: apart(w, small(x, False))
    if bits == 16:
        yield "torch", theirs
        yield "torch, small kernels between", lambda w, x: theirs(w, small(x, False))


def peer_times(cells: list[Cell]) -> Iterator[tuple[list[Any], float | None, str | None]]:
    """gemlite on weights of the same size, where it can be imported; it tunes at its first calls."""
    for wheel in Path(".whl").glob("gemlite*.whl"):
        place = tempfile.mkdtemp()
        zipfile.ZipFile(wheel).extractall(place)
        sys.path.insert(0, place)
    try:
        import gemlite
        from gemlite.helper import A16W4_HQQ_INT, A16W8_INT8

        gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    except Exception as error:
        yield ["peer", "not run"], None, repr(error)[:300]
        return
    kind = torch.bfloat16
    for bits, shape, rows in cells:
        key = [bits, str(shape), rows, "gemlite"]
        try:
            x = torch.randn(rows, shape.ins, dtype=kind, device="cuda")
            made = []
            for _ in range(max(2, -(-ROTATION // weight_bytes(bits, shape)))):
                if bits == 8:
                    weight = torch.randn(shape.out, shape.ins, dtype=kind, device="cuda")
                    made.append(A16W8_INT8(dtype=kind).from_weights(weight))
                else:
                    codes = torch.randint(0, 16, (shape.out, shape.ins), dtype=torch.uint8, device="cuda")
                    scales = torch.rand(shape.out * shape.ins // 128, 1, dtype=kind, device="cuda")
                    zeros = torch.full_like(scales, 8)
                    made.append(A16W4_HQQ_INT(dtype=kind).from_weights(codes, scales, zeros))
            made[0](x)
            yield key, time_us([lambda m=m, x=x: m(x) for m in made]), None
        except Exception as error:
            yield key, None, repr(error)[:300]
