"""The texts that benchmarks and checks read, by their options; nothing here imports torch."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from triforce_tree.eval import text
from triforce_tree.eval.texts import registry
from triforce_tree.runtime.files.text_files import read_text


def documents(args: argparse.Namespace) -> tuple[str, Iterable[str]]:
    """The name of the text, and its documents."""
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
    if args.text:
        source, found = text_source(args)
        if source.copies is not None:
            raise ValueError(
                f"--text {args.text}: passages are copied for prompts of one length, which bench text makes; "
                f"use --text {source.copies} here"
            )
        return source.name, [found]
    if args.texts:
        raise ValueError(f"--texts {args.texts} holds texts by name; give --text NAME as well")
    return text.PYDOC, [text.pydoc_text()]


def text_source(args: argparse.Namespace) -> tuple[registry.TextSource, str]:
    """The text that ``--text`` names, from ``--texts`` or from this machine."""
    here = registry.Texts(args.texts)
    source = here.first(args.text)
    return source, here.read(source)
