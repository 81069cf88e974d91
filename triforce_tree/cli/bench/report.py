"""``triforce-tree report``: one HTML page from the results files in a folder."""

import argparse

from triforce_tree.cli.console import json_line, screen
from triforce_tree.eval.report import plots, write


def run(args: argparse.Namespace) -> int:
    made = write.write(args.folder)
    for path in made.passed_over:
        screen().print(f"{path}: no measurements of bench; left out")
    if not plots.available():
        screen().print("without plots, which need matplotlib: pip install matplotlib")
    print(made.page)
    if args.json:
        json_line({"report": str(made.page), "results": [str(path) for path in made.shown]})
    return 0
