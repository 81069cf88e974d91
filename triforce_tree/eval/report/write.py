"""Reports from results files: Markdown and a PNG beside each, one HTML page for a folder."""

import base64
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triforce_tree.eval import results
from triforce_tree.eval.report import plots
from triforce_tree.eval.report.code_digest import digest
from triforce_tree.eval.report.tables import Table, tables
from triforce_tree.eval.results import Record, Records
from triforce_tree.runtime.files.replacing import replace_file
from triforce_tree.runtime.files.writable import check_writable

PAGE = "report.html"
_NO_PLOTS = "plots need matplotlib: pip install matplotlib"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px; }
caption { text-align: left; font-weight: 600; padding: 0.3em 0; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.7em; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
.about td { text-align: left; overflow-wrap: anywhere; }
img { max-width: 100%; }
details { margin: 1em 0; }
"""


def about(seed: int, words: list[str]) -> Record:
    """What a results file keeps of its run.

    Args:
        words: of the command line, without the program's name.
    """
    return {**results.header(seed), "engine": digest("api"), "arguments": words}


@dataclass(frozen=True)
class Report:
    """What :func:`write` made.

    Attributes:
        page: the HTML file.
        shown: results files in it.
        passed_over: files that are not results of ``bench``.
    """

    page: Path
    shown: list[Path]
    passed_over: list[Path]


def write(folder: str | Path) -> Report:
    """One HTML page, without links to anything outside of it, from the results files in a folder.

    Raises:
        ValueError: there are none.
        OSError: the folder cannot be read or written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no such folder: {str(folder)!r}; give one with results files of bench --out"
        )
    check_writable(folder / PAGE)
    found: dict[Path, Records] = {}
    passed_over = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            records = results.read(path)
            readable = bool(tables(records))
        except ValueError:
            readable = False
        if readable:
            found[path] = records
        else:
            passed_over.append(path)
    if not found:
        raise ValueError(
            f"{str(folder)!r} has no results file with measurements; make one with triforce-tree bench KIND "
            f"--out {folder / 'NAME.jsonl'}"
        )
    sections = [_section(path, records) for path, records in found.items()]
    replace_file(folder / PAGE, _page(sections))
    return Report(folder / PAGE, list(found), passed_over)


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
        f"{known['hardware']}, {versions}, commit {known['commit']}, engine {known['engine']}, seed "
        f"{known['seed']}, {known['date']}. Command: `{known['command']}`"
    )


def _page(sections: list[str]) -> str:
    missing = "" if plots.available() else f"<p>{_NO_PLOTS}</p>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>triforce-tree benchmarks</title>'
        f"<style>{_STYLE}</style></head><body><h1>triforce-tree benchmarks</h1>{missing}"
        + "\n".join(sections)
        + "</body></html>\n"
    )


def _section(path: Path, records: Records) -> str:
    settings = records.settings
    parts = [f"<h2>{_text(settings.get('benchmark', 'results'))}: {_text(path.name)}</h2>"]
    parts += [_table(table) for table in tables(records)]
    image = plots.png(records) if plots.available() else None
    if image is not None:
        data = base64.b64encode(image).decode()
        parts.append(f'<img alt="plot of {_text(path.name)}" src="data:image/png;base64,{data}">')
    parts.append(_details("Where it was measured", _pairs(records.about)))
    parts.append(_details("Settings", _pairs(settings)))
    parts.append(_details(f"All {len(records.all)} measurements", _measurements(records.all)))
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(c)}</td>' for c in cells)}</tr>" for cells in table.rows)
    return (
        f"<table><caption>{_text(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    ) + (f"<p>{_text(table.note)}</p>" if table.note else "")


def _measurements(records: list[Record]) -> str:
    """Every record, but for its tokens, which the results file has."""
    names = list(dict.fromkeys(name for r in records for name in r if name != "tokens"))
    rows = [[_shown(r[name]) if name in r else "" for name in names] for r in records]
    return _table(Table("", names, rows))


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(_shown(value))}</td></tr>" for name, value in values.items()
    )
    return f'<table class="about">{rows}</table>'


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _details(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{content}</details>"


def _text(value: object) -> str:
    return html.escape(str(value))
