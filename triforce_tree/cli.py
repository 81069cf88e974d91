"""The command line: ``triforce-tree generate | bench | check | demo``.

Exit codes: 0 done, 1 a check failed or memory ran out, 2 bad input (one line on stderr says what),
130 ended by Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch
from transformers.utils import logging

from triforce_tree import __version__, demo
from triforce_tree.commands import bench_needle, bench_text, check, generate, options


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="triforce-tree",
        description="Lossless speculative decoding with hierarchical drafting, for long contexts.",
        formatter_class=options.HelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(required=True, metavar="command")
    generate.add(commands)
    bench = commands.add_parser("bench", help="Measure speed (text) or retrieval accuracy (needle).")
    kinds = bench.add_subparsers(required=True, metavar="kind")
    bench_text.add(kinds)
    bench_needle.add(kinds)
    check.add(commands)
    demo.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    # Progress and notices of the libraries below would run into our own.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except BrokenPipeError:
        # The reader of our stdout has gone; what is left in its buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except torch.OutOfMemoryError as error:
        if args.traceback:
            raise
        return _failed(f"out of memory ({error}); use a shorter prompt, --dtype bfloat16 or another device", 1)
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        return _failed(_message(error), 2)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _failed(message: str, code: int) -> int:
    print(f"triforce-tree: {message}", file=sys.stderr)
    return code
