"""What ``bench batch | offload | kernels | workloads`` share: progress, tables and JSON of a measurement."""

import argparse
from collections.abc import Callable
from typing import Any

from triforce_tree.cli.bench.running import finish, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.eval.results import Record, Records, Series, header


def follow(
    args: argparse.Namespace,
    records: Records,
    measure: Callable[[Series], None],
    total: int,
    said: Callable[[Record], str],
    rows: Callable[[Records], Any],
) -> int:
    """Run a measurement with a progress bar and Ctrl-C; then tables and files. The exit code.

    Args:
        measure: what the records lack.
        total: number of records.
        said: what the bar says of one.
        rows: for ``--json``.
    """
    progress = bar("measurements")
    task = progress.add_task("measuring", total=total)
    with Interrupt() as interrupt, progress:
        measure(series_of(args, records, interrupt, (progress, task), said))
    code = finish(args, records, interrupt.requested)
    if args.json:
        json_line({**header(args.seed), "interrupted": interrupt.requested, "rows": rows(records)})
    return code
