"""What ``bench batch | offload | kernels | workloads`` share: progress, tables and JSON of a measurement."""

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from transformers import StoppingCriteria

from triforce_tree.cli.bench.running import finish
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.eval.results import Record, Records, header


class Measure(Protocol):
    """Measures what the records lack."""

    def __call__(
        self, *, stop: StoppingCriteria, done: Callable[[Record], None], wanted: Callable[[], bool]
    ) -> None: ...


def follow(
    args: argparse.Namespace,
    records: Records,
    measure: Measure,
    total: int,
    said: Callable[[Record], str],
    rows: Callable[[Records], Any],
) -> int:
    """Run a measurement with a progress bar and Ctrl-C; then tables and files. The exit code.

    Args:
        total: number of records.
        said: what the bar says of one.
        rows: for ``--json``.
    """
    progress = bar("measurements")
    task = progress.add_task("measuring", total=total)
    with Interrupt() as interrupt, progress:
        measure(
            stop=interrupt,
            done=lambda record: progress.update(task, advance=1, description=said(record)),
            wanted=lambda: not interrupt.requested,
        )
    code = finish(args, records, interrupt.requested)
    if args.json:
        json_line({**header(args.seed), "interrupted": interrupt.requested, "rows": rows(records)})
    return code
