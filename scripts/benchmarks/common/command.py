"""Defines the options that benchmarks share, and the tiny models of a trial run."""

import argparse
import re
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging

from scripts.benchmarks.common.results import RESULTS, Record

# A tiny pair that has room for the embedded one, its vocabulary a little larger.
TINY_SHAPES = {
    "llama-2-7b": "512x6x4/4x128x1152-v4160",
    "llama-3.1-8b": "768x7x6/3x128x1152-v5001",
    "llama-2-13b": "512x7x4/4x128x1152-v4160",
    "qwen3-30b-a3b": "512x6x4/4x128x576-e4/2-v4160",
}
TINY_DRAFT = "320x2x5/5x64x512"
_DRAFT = "llama-68m"
# What is changed in a hierarchy for tiny models.
TINY_OPTIONS: Record = {
    "gamma": 6, "tree": "best-first:3,2", "budget": 128, "recent": 32, "window": 64,
}  # fmt: skip


def pair_shapes(shape: str | None, tiny: bool) -> tuple[str | None, str]:
    """Returns the shapes of a target and its draft, or in a trial run tiny ones for them.

    Args:
        shape: of the target; None: the embedded one as it is.
    """
    return (shape and TINY_SHAPES[shape], TINY_DRAFT) if tiny else (shape, _DRAFT)


def parser(name: str, doc: str | None, tiny: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with ``--out``, ``--seed`` and, if ``tiny`` is set, ``--tiny``."""
    made = argparse.ArgumentParser(
        prog=f"python -m scripts.{name}",
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument(
        "--out", type=Path, help="folder for the results; without it docs/results, or none with --tiny"
    )
    made.add_argument("--seed", type=int, default=0, help="of all draws, and of the weights without effect")
    if tiny:
        made.add_argument("--tiny", action="store_true", help="the same code, tiny, on any machine")
    return made


def device_for(tiny: bool) -> torch.device:
    """Returns the GPU, or the CPU where there is none or the run is tiny; silences transformers, lets torch
    compile many shapes.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Every number of rows is compiled once, and ablations bring many of them.
    torch._dynamo.config.recompile_limit = 128
    return torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")


def device_of(made: argparse.ArgumentParser, tiny: bool) -> torch.device:
    """Returns the device by :func:`device_for`; exits if the run is not tiny and there is no GPU."""
    device = device_for(tiny)
    if device.type == "cpu" and not tiny:
        made.error("there is no GPU here; --tiny runs the same code with tiny models on the CPU")
    return device


def machine_of(device: torch.device) -> str:
    """Returns the machine as results files are named after it, such as ``h200`` or ``cpu``."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    found = re.search(r"[A-Z]+\d+\w*", name)
    return (found[0] if found else name.replace(" ", "_")).lower()


def results_folder(out: Path | None, tiny: bool) -> Path:
    """Returns the folder of the results: ``out``, else docs/results, but a temporary one for tiny models."""
    folder = out or (Path(tempfile.mkdtemp()) if tiny else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
