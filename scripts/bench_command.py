"""What bench_on_chip.py and bench_offload.py share: the command line, and what makes a run tiny."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from measurements import ROOT, Record, engine_digest
from transformers.utils import logging

from triforce_tree.bench.results import hardware

RESULTS = ROOT / "docs" / "results"
# A tiny pair that has room for the embedded one.
TINY_SHAPES = {
    "llama-2-7b": "384x6x3/3x128x1152",
    "llama-3.1-8b": "768x7x6/3x128x1152",
    "llama-2-13b": "512x7x4/4x128x1152",
}
TINY_DRAFT = "256x2x4/4x64x512"
# A hierarchy for long contexts, as the plan of the memory chooses it, and what is changed for tiny models.
LONG_OPTIONS: Record = {
    "levels": 3, "gamma": 40, "tree": "best-first:8,6,4", "budget": 4096, "chunk": 8, "recent": 256,
    "refresh": 1,
}  # fmt: skip
TINY_OPTIONS: Record = {
    "gamma": 6, "tree": "best-first:3,2", "budget": 128, "recent": 32, "window": 64,
}  # fmt: skip


def value_of(text: str) -> Any:
    """``8`` is a number, ``none``, ``true`` and ``false`` are themselves, all else is text."""
    known = {"none": None, "true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    return int(text) if text.lstrip("-").isdigit() else text


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in gamma=16")
    return name, value_of(value)


def prepare() -> None:
    """No bars or warnings of transformers, and room for every kind of graph in torch's compiler."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Every number of rows is compiled once, and ablations bring many of them.
    torch._dynamo.config.recompile_limit = 128


def results_folder(out: Path | None, tiny: bool) -> Path:
    """Where results go: ``out``, else docs/results, but a folder to forget for tiny models."""
    folder = out or (Path(tempfile.mkdtemp()) if tiny else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def settings_of(plan: Record, seed: int, tiny: bool) -> Record:
    """What must agree for measurements to be put together: a part's plan, the engine, the machine."""
    return {
        **plan,
        "seed": seed,
        "engine": engine_digest(),
        "gpu": hardware(),
        "dtype": "float32" if tiny else "bfloat16",
    }
