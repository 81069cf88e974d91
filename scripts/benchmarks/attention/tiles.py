"""What the tiles of other GPUs cost on this one, and what its bulk copies and dependent launches gain.

    python -m scripts.benchmarks tiles                    # docs/results/tiles_h200.json, in three minutes
    python -m scripts.benchmarks tiles --devices sm_89 --cells 2

Each kernel is timed with this GPU's own tiles and then as if it were another one: the tiles that the
other has shared memory for, without the features that it lacks (``kernels/device.py``). Instructions stay
those of this GPU, so these are no times of the other. Medians inside CUDA graphs, KV and weights rotated
beyond L2, after two warm-up calls each.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from scripts.benchmarks.attention.problems import Cell, random_kv
from scripts.benchmarks.attention.run import ours
from scripts.benchmarks.attention.tables import TILES
from scripts.benchmarks.common.results import RESULTS, Record, header, write
from scripts.benchmarks.linear.problems import BITS, LAYERS, ROTATION, Weights, time_us, weight_bytes
from triforce_tree.eval.results import check_writable
from triforce_tree.kernels.device import KNOWN, told

DEVICES = ("sm_80", "sm_89", "sm_120")
OWN = "own"
CELLS = [
    Cell(32, 32, 122_880, 1), Cell(32, 32, 122_880, 16), Cell(32, 32, 122_880, 64),
    Cell(32, 8, 122_880, 1), Cell(32, 8, 122_880, 16), Cell(32, 8, 122_880, 64), Cell(32, 8, 4096, 16),
    Cell(32, 8, 32_768, 16, dim=64), Cell(32, 8, 32_768, 64, dim=64),
    Cell(16, 8, 32_768, 1, dim=256), Cell(16, 8, 32_768, 64, dim=256),
]  # fmt: skip
ROWS = (1, 16, 32, 64)


def as_device(name: str) -> Any:
    """A context in which kernels take this device's tiles."""
    return nullcontext() if name == OWN else told(replace(KNOWN[name], told=True))


def attention(devices: list[str], cells: list[Cell]) -> Iterator[Record]:
    for cell in cells:
        kv = random_kv(cell)
        for name in devices:
            with as_device(name):
                us = round(ours(cell, kv), 2)
            yield {"kernel": "attention", "cell": f"{cell}, head_dim {cell.dim}", "device": name, "us": us}


def linears(devices: list[str]) -> Iterator[Record]:
    for bits in BITS:
        size = sum(weight_bytes(bits, shape) for shape in LAYERS["7B"])
        layers = [[Weights(bits, shape) for shape in LAYERS["7B"]] for _ in range(-(-2 * ROTATION // size))]
        for rows in ROWS:
            xs = {w.shape.ins: torch.randn(rows, w.shape.ins, device="cuda").bfloat16() for w in layers[0]}
            calls = [lambda ws=ws, xs=xs: [w.call(xs[w.shape.ins]) for w in ws] for ws in layers]
            for name in devices:
                with as_device(name):
                    cell = f"7B layer, {bits} bits, {rows} rows"
                    yield {"kernel": "linear", "cell": cell, "device": name, "us": round(time_us(calls), 2)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks tiles", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--devices", nargs="*", default=[*DEVICES], choices=[*KNOWN], help="whose tiles")
    parser.add_argument("--cells", type=int, help="time the first so many cells of attention only")
    parser.add_argument("--out", type=Path, default=RESULTS / TILES, help="results file")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; kernels_by_arch compiles for GPUs that are not at hand")
    check_writable(args.out)
    result = header(0, "attention", "linear") | {"rows": []}
    names = [OWN, *args.devices]
    parts = [attention(names, CELLS[: args.cells]), *([] if args.cells else [linears(names)])]
    for row in itertools.chain(*parts):
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
    own = {row["cell"]: row["us"] for row in result["rows"] if row["device"] == OWN}
    for row in result["rows"]:
        row["times_own"] = round(row["us"] / own[row["cell"]], 3)
    write(args.out, result)
    for name in args.devices:
        ratios = [row["times_own"] for row in result["rows"] if row["device"] == name]
        print(f"{name}: median {median(ratios):.2f} of own tiles, worst {max(ratios):.2f}")
