"""The results file of a measurement, and the tables at its end."""

import argparse
from collections.abc import Callable, Sequence

from rich.progress import Progress, TaskID

import triforce_tree
from triforce_tree.bench.results import Record, Records, Series, commit, hardware, header
from triforce_tree.bench.tables import Table, write_beside
from triforce_tree.cli.console import Interrupt, plain_table, results, screen


def records_of(args: argparse.Namespace, settings: Record) -> Records:
    """Returns the records of this run, or of an interrupted run with the same settings, commit and machine.

    Raises:
        ValueError: ``--out`` belongs to another run.
        OSError: it cannot be written.
    """
    same = {"version": triforce_tree.__version__, "commit": commit(), "hardware": hardware()}
    return Records(args.out, {**settings, **same}, header(args.seed))


def series_of(
    args: argparse.Namespace,
    records: Records,
    interrupt: Interrupt,
    bar: tuple[Progress, TaskID],
    said: Callable[[Record], str],
) -> Series:
    """Returns the series of measurements of this run, which Ctrl-C ends.

    Args:
        bar: the task whose units are the measurements.
        said: returns a few words about a record.
    """
    kept, (progress, task) = {id(record) for record in records.all}, bar

    def done(record: Record) -> None:
        if id(record) in kept:
            # What an earlier run measured is not part of the shown speed.
            progress.reset(task, completed=int(progress.tasks[task].completed) + 1)
            return
        progress.update(task, advance=1, description=said(record))
        if not progress.console.is_terminal:  # where no bar is shown before the end
            progress.console.print(said(record))

    return Series(records, args.seed, interrupt, lambda: not interrupt.requested, done)


def finish(args: argparse.Namespace, records: Records, shown: Sequence[Table], interrupted: bool) -> int:
    """Shows the tables and writes them beside the results file; returns the exit code."""
    out = results(args)
    for table in shown:
        out.print(plain_table(table.title, table.columns, table.rows))
        if table.note:
            out.print(table.note)
    if records.path is not None:
        written = write_beside(records.path, records, shown)
        screen().print(f"written: {', '.join(map(str, [records.path, *written]))}")
    if interrupted:
        left = "; the same command continues from here" if records.path is not None else ""
        screen().print(f"ended by Ctrl-C after {len(records.all)} measurements{left}")
    return 130 if interrupted else 0
