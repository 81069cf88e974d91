"""Tables and a plot beside a results file."""

from pathlib import Path

from triforce_tree.eval.report import plots
from triforce_tree.eval.report.tables import tables
from triforce_tree.eval.results import Records
from triforce_tree.runtime.files.replacing import replace_file


def write_beside(path: Path, records: Records) -> list[Path]:
    """The Markdown tables of a run, and its plot where matplotlib is installed; the paths written."""
    shown = tables(records)
    if not shown:
        return []
    written = [path.with_suffix(".md")]
    image = plots.png(records) if plots.available() else None
    text = "\n".join(table.markdown() for table in shown)
    if image is not None:
        written.append(path.with_suffix(".png"))
        replace_file(written[-1], image)
        text += f"\n![{path.stem}]({written[-1].name})\n"
    replace_file(written[0], f"{text}\n{_where(records)}\n")
    return written


def _where(records: Records) -> str:
    known = records.about
    if not known:
        return "No machine or versions were kept with these results."
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    return (
        f"{known['hardware']}, {versions}, commit {known['commit']}, seed "
        f"{known['seed']}, {known['date']}. Command: `{known['command']}`"
    )
