"""What all measurements share: their results file, and the tables at their end."""

import argparse
from collections.abc import Callable, Sequence

from triforce_tree.cli.console import Interrupt, plain_table, screen
from triforce_tree.eval.report import write
from triforce_tree.eval.report.code_digest import digest
from triforce_tree.eval.report.tables import Table, tables
from triforce_tree.eval.results import Record, Records, Series, hardware


def records_of(args: argparse.Namespace, settings: Record) -> Records:
    """The results of this run, or of the one that it continues: same settings, code and machine.

    Raises:
        ValueError: ``--out`` belongs to another run.
        OSError: it cannot be written.
    """
    same = {"code": digest("api"), "hardware": hardware()}
    return Records(args.out, {**settings, **same}, write.about(args.seed, list(args.words)))


def series_of(
    args: argparse.Namespace, records: Records, interrupt: Interrupt, done: Callable[[Record], None]
) -> Series:
    """The measurements of this run, until Ctrl-C."""
    return Series(records, args.seed, interrupt, lambda: not interrupt.requested, done)


def finish(args: argparse.Namespace, records: Records, interrupted: bool) -> int:
    """Show the tables, write them beside the results file; the exit code."""
    show(tables(records))
    if records.path is not None:
        written = write.write_beside(records.path, records)
        if getattr(args, "kept", True):  # not by bench verify, which may measure into a temporary folder
            screen().print(f"written: {', '.join(map(str, [records.path, *written]))}")
    if interrupted:
        left = "; the same command continues from here" if records.path is not None else ""
        screen().print(f"ended by Ctrl-C after {len(records.all)} measurements{left}")
    return 130 if interrupted else 0


def show(shown: Sequence[Table]) -> None:
    for table in shown:
        screen().print(plain_table(table.title, table.columns, table.rows))
        if table.note:
            screen().print(table.note, highlight=False)
