"""What benchmarks share on the command line, and what makes a run tiny."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from scripts.benchmarks.common.results import RESULTS, Record

# A tiny pair that has room for the embedded one.
TINY_SHAPES = {
    "llama-2-7b": "384x6x3/3x128x1152",
    "llama-3.1-8b": "768x7x6/3x128x1152",
    "llama-2-13b": "512x7x4/4x128x1152",
}
TINY_DRAFT = "256x2x4/4x64x512"
# What is changed in a hierarchy for tiny models.
TINY_OPTIONS: Record = {
    "gamma": 6, "tree": "best-first:3,2", "budget": 128, "recent": 32, "window": 64,
}  # fmt: skip


def shapes_of(shape: str, tiny: bool) -> tuple[str, str]:
    """What target and draft are inflated to."""
    return (TINY_SHAPES[shape], TINY_DRAFT) if tiny else (shape, "llama-68m")


def parser(name: str, doc: str | None, tiny: bool = True) -> argparse.ArgumentParser:
    """With ``--out``, ``--seed`` and, where a benchmark can be tiny, ``--tiny``."""
    made = argparse.ArgumentParser(
        prog=f"python -m scripts.{name}",
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument(
        "--out", type=Path, help="where results go; without it docs/results, or nowhere if tiny"
    )
    made.add_argument("--seed", type=int, default=0, help="of all draws, and of the weights without effect")
    if tiny:
        made.add_argument("--tiny", action="store_true", help="the same code, tiny, on any machine")
    return made


def parts_parser(name: str, doc: str | None, parts: list[str], seconds: float) -> argparse.ArgumentParser:
    """Of a benchmark whose results file has parts, which can be measured one by one and go on."""
    made = parser(name, doc)
    add = made.add_argument
    add("--part", choices=[*parts, "all"], nargs="+", required=True, help="what to measure")
    add("--seconds", type=float, default=seconds, help="begin nothing that would not end within this time")
    add("--set", type=setting, nargs="*", default=[], metavar="NAME=VALUE", help="options of the hierarchy")
    add("--prompts", type=int, help="prompts, or sets of them in a batch; by default as the part has it")
    add("--temperatures", type=float, nargs="+", help="0 is greedy; likewise")
    add("--fresh", action="store_true", help="drop what the part has measured before")
    return made


def device_of(made: argparse.ArgumentParser, tiny: bool) -> torch.device:
    """The GPU, or for a tiny run the CPU; silences transformers, and lets torch compile many shapes."""
    if not tiny and not torch.cuda.is_available():
        made.error("there is no GPU here; --tiny runs the same code with tiny models on the CPU")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Every number of rows is compiled once, and ablations bring many of them.
    torch._dynamo.config.recompile_limit = 128
    return torch.device("cpu" if tiny else "cuda")


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def results_folder(out: Path | None, tiny: bool) -> Path:
    """Where results go: ``out``, else docs/results, but a folder to forget for tiny models."""
    folder = out or (Path(tempfile.mkdtemp()) if tiny else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
