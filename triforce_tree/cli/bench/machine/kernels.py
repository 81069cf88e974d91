"""``triforce-tree bench kernels``: tree attention over shapes, on the GPU or on the CPU."""

import argparse
from functools import partial
from typing import Any

import torch

from triforce_tree.cli.bench.machine.following import follow
from triforce_tree.cli.bench.running import records_of
from triforce_tree.eval.attention import measure as kernels
from triforce_tree.eval.report import machine
from triforce_tree.eval.results import Record
from triforce_tree.runtime.devices import device_of
from triforce_tree.runtime.fingerprint import hardware

# What is measured where nothing is given.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "heads": [(32, 8, 128), (32, 32, 128)],
        "prefixes": [4096, 32_768, 122_880],
        "trees": [1, 16, 64, 256],
        "pages": [0, 64],
        "dtype": "bfloat16",
    },
    "cpu": {
        "heads": [(8, 2, 64)],
        "prefixes": [1024, 8192],
        "trees": [1, 16, 64],
        "pages": [0, 16],
        "dtype": "float32",
    },
}


def run(args: argparse.Namespace) -> int:
    device = device_of(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = _DEFAULTS["cuda" if device.type == "cuda" else "cpu"]
    chosen = {name: getattr(args, name) or value for name, value in usual.items()}
    known = kernels.methods(device) + ([kernels.SLOW] if device.type == "cuda" else [])
    for name in args.methods or []:
        if name not in known:
            raise ValueError(f"{name!r} is not measured on {device.type}; known: {', '.join(known)}")
    methods = args.methods or kernels.methods(device)
    settings = {
        "benchmark": "kernels",
        "device": hardware(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "dtype": chosen["dtype"],
        "seed": args.seed,
    }
    records = records_of(args, settings)
    shapes = kernels.Shapes(*(chosen[name] for name in ("heads", "prefixes", "trees", "pages")))
    dtype = getattr(torch, chosen["dtype"])
    measure = partial(kernels.measure, shapes, methods, device, dtype)
    return follow(args, records, measure, len(shapes.keys(methods)), _said, machine.of_kernels)


def _said(record: Record) -> str:
    what = record.get("reason") or f"{record['us']:.1f} microseconds"
    return f"{record['method']}, {record['prefix']:,} + {record['tree']}: {what}"
