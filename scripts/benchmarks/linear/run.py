"""Times linear layers with few rows on one GPU: single launches, all linears of a decoder layer, and gemlite.

    python -m scripts.benchmarks linear --out linear.jsonl
    python -m scripts.benchmarks linear --out linear.jsonl --quick      # only single launches

Linears of one input share a launch. All run in a CUDA graph with the configurations that the engine chooses
(``kernels/linear/configs.py``), over several copies of the weights that together exceed L2.
``tests/gpu/test_linear.py`` must pass on the same GPU first. The sweep over configurations was
``scripts/tune_linear.py`` of commit fcfaa8f.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from scripts.benchmarks.attention.problems import measure_ceilings
from scripts.benchmarks.common.command import need_gpu
from scripts.benchmarks.common.results import Record, header, write
from scripts.benchmarks.common.timing import time_calls
from scripts.benchmarks.linear import problems
from scripts.benchmarks.linear.problems import BITS, LAYERS, ROTATION, Shape, Weights, weight_bytes
from scripts.benchmarks.linear.tables import EARLY
from triforce_tree.kernels.device import describe
from triforce_tree.kernels.linear.configs import LinearConfig, choose
from triforce_tree.runtime.files.writing import check_writable

ROWS = (1, 8, 16, 24, 32, 48, 64, 96)
SINGLE = [*LAYERS["68M"], *LAYERS["7B"], LAYERS["8B"][0], LAYERS["8B"][2]]


@triton.jit
def _small_kernel(out_ptr, x_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + at, -tl.load(x_ptr + at, mask=at < count), mask=at < count)


def small(x: Tensor, early: bool) -> Tensor:
    """Runs a small kernel in place of norms, attention and activations; ``early`` allows dependent launch."""
    if not early:
        return x.neg()
    out = torch.empty_like(x)
    _small_kernel[(triton.cdiv(x.numel(), 1024),)](out, x, x.numel(), BLOCK=1024, launch_pdl=True)
    return out


def chosen(bits: int, rows: int, shape: Shape) -> LinearConfig:
    return choose(bits, rows, shape.out, shape.ins, describe("cuda"))


def single(read_bandwidth: float) -> Iterator[Record]:
    """Yields the time of single launches, of cuBLAS, and the roofline."""
    for shape in SINGLE:
        for bits in (16,) if shape in LAYERS["68M"] else BITS:
            weights = Weights(bits, shape, max(2, -(-ROTATION // weight_bytes(bits, shape))))
            copies = range(len(weights.words))
            for rows in ROWS:
                x = torch.randn(rows, shape.ins, dtype=torch.bfloat16, device="cuda")
                us = time_calls([lambda c=c, x=x, w=weights: w.call(x, c) for c in copies])
                theirs = None
                if bits == 16:
                    theirs = time_calls([
                        lambda c=c, x=x, w=weights: [F.linear(x, part) for part in w.words[c]] for c in copies
                    ])  # fmt: skip
                roof = problems.least_bytes(bits, rows, shape) / read_bandwidth * 1e6
                row = {"bits": bits, "outs": shape.outs, "ins": shape.ins, "rows": rows, "us": us}
                row |= {"roof_us": roof, "of_roof": roof / us, "torch_bf16_us": theirs}
                yield row | {"config": asdict(chosen(bits, rows, shape))}


def layers() -> Iterator[Record]:
    """Yields the microseconds of all linears of one layer, over several layers that together exceed L2."""
    for name, bits in product(("7B", "8B"), BITS):
        size = sum(weight_bytes(bits, shape) for shape in LAYERS[name])
        made = [[Weights(bits, shape) for shape in LAYERS[name]] for _ in range(-(-2 * ROTATION // size))]
        for rows in ROWS:
            xs = {w.shape.ins: torch.randn(rows, w.shape.ins, device="cuda").bfloat16() for w in made[0]}
            us = {
                way: time_calls([
                    lambda ws=ws, call=call, xs=xs: [call(w, xs[w.shape.ins]) for w in ws] for ws in made
                ])
                for way, call in ways(bits, rows).items()
            }  # fmt: skip
            yield {"layer": name, "bits": bits, "rows": rows, "us": us}


def ways(bits: int, rows: int) -> dict[str, Callable[[Weights, Tensor], object]]:
    """Returns the ways to multiply by the weights of one layer, by their names in a results file."""

    def early(w: Weights, x: Tensor) -> Tensor:
        return w.call(small(x, True), config=replace(chosen(bits, rows, w.shape), prefetch=1))

    found = {
        "fused": Weights.call,
        "one by one": lambda w, x: [part.call(x) for part in w.parts],
        "fused, small kernels between": lambda w, x: w.call(small(x, False)),
        EARLY: early,
    }
    if bits == 16:
        found["torch"] = lambda w, x: [F.linear(x, words) for words in w.words[0]]
    return found


def gemlite_times() -> Iterator[Record]:
    """Yields the times of gemlite on weights of the same size, if it is installed, after its tuning."""
    try:
        import gemlite
        from gemlite.helper import A16W4_HQQ_INT, A16W8_INT8

        gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    except Exception as error:
        print(f"gemlite: not run: {error!r}"[:300])
        return
    kind = torch.bfloat16

    def layer(bits: int, shape: Shape) -> Any:
        if bits == 8:
            weight = torch.randn(shape.out, shape.ins, dtype=kind, device="cuda")
            return A16W8_INT8(dtype=kind).from_weights(weight)
        codes = torch.randint(0, 16, (shape.out, shape.ins), dtype=torch.uint8, device="cuda")
        scales = torch.rand(shape.out * shape.ins // 128, 1, dtype=kind, device="cuda")
        return A16W4_HQQ_INT(dtype=kind).from_weights(codes, scales, torch.full_like(scales, 8))

    for rows, bits, fused in product((16, 32), (8, 4), LAYERS["7B"]):
        shape = Shape((fused.out,), fused.ins)
        row = {"bits": bits, "shape": str(shape), "rows": rows}
        try:
            x = torch.randn(rows, shape.ins, dtype=kind, device="cuda")
            made = [layer(bits, shape) for _ in range(max(2, -(-ROTATION // weight_bytes(bits, shape))))]
            made[0](x)
            yield row | {"us": time_calls([lambda m=m, x=x: m(x) for m in made])}
        except Exception as error:
            yield row | {"us": None, "error": repr(error)[:300]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks linear", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("linear.jsonl"), help="results file")
    parser.add_argument("--quick", action="store_true", help="single launches alone")
    args = parser.parse_args(words)
    need_gpu(parser)
    check_writable(args.out)
    ceilings = measure_ceilings()
    result = header(0) | {
        "torch": torch.__version__, "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name(), "read_bandwidth": ceilings.read_bandwidth,
        "cells": list(single(ceilings.read_bandwidth)),
    }  # fmt: skip
    if not args.quick:
        x = torch.randn(16, 4096, device="cuda").bfloat16()
        times = [time_calls([lambda early=early: small(x, early)]) for early in (False, True)]
        result["small_us"] = dict(zip(("ordinary", "early"), times, strict=True))
        result |= {"layers": list(layers()), "gemlite": list(gemlite_times())}
        timed = sum(len(row["us"]) for row in result["layers"]) + len(result["gemlite"])
        result["measured"] = timed + len(result["cells"])
    write(args.out, result)
    for row in result["cells"]:
        print("{bits} bits {outs} x {ins} M={rows}: {us:.2f} us, {of_roof:.0%} of the roofline".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
