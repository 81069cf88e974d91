"""The options that all trainings have."""

import argparse
from pathlib import Path
from typing import Any


def training_parser(module: str, doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with the options of every training, for those of one of them to be added.

    Args:
        module: for ``python -m``, below ``scripts.train_pair``.
        doc: the module's docstring, whose first line is the description.
        defaults: of shared options whose default is the training's own; ``data`` is required without one.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m scripts.train_pair.{module}",
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required="data" not in defaults, help="folder of token files")
    add("--out", type=Path, required=True, help="folder of what is trained, and of log.jsonl")
    add("--steps", type=int, default=10**9, help="most steps of a training")
    add("--tokens", type=int, default=65536, help="that the target reads in a step")
    add("--muon-rate", type=float, default=0.015, help="peak learning rate of matrices")
    add("--adam-rate", type=float, default=2e-3, help="peak learning rate of everything else")
    add("--decay", type=float, default=0.05, help="weight decay of matrices")
    add("--log-every", type=int, default=50, help="steps")
    add("--save-every", type=float, default=60.0, help="seconds")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--seed", type=int, default=0, help="of all draws")
    parser.set_defaults(**defaults)
    return parser
