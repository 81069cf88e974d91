"""The texts that benchmarks and checks read, by their options; nothing here imports torch."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from triforce_tree.bench import texts as text
from triforce_tree.runtime.files.text_files import read_text


def documents(args: argparse.Namespace) -> tuple[str, Iterable[str]]:
    """Returns the name of the text, and its documents."""
    if args.dataset:
        name = f"{args.dataset}/{args.split}/{args.column}"
        return name, text.dataset_texts(args.dataset, args.split, args.column)
    if args.file:
        if Path(args.file).suffix.lower() in text.ROWS:
            raise ValueError(
                f"--file {args.file}: its suffix is that of a data set, not of a text; use --dataset "
                f"{args.file} --column NAME"
            )
        return args.file, [read_text(args.file)]
    return text.PYDOC, [text.pydoc_text()]
