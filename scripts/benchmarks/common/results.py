"""Results files: where they come from, the statistics they keep, and measurements to resume from.

All have the form that ``triforce_tree.bench.results`` defines. A file in docs/results holds rows: medians,
their 20th and 80th percentile and counts. The measurements that rows are made of lie beside it in
FILE.PART.jsonl, which git ignores.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from scripts.inflate.shapes import Shape
from triforce_tree.bench import results
from triforce_tree.runtime.distributed import world_size
from triforce_tree.runtime.files.writing import check_writable, replace_file

Record = dict[str, Any]
# Rows of a part from its name, header and measurements.
Rows = Callable[[str, Record, list[Record]], list[Record]]

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
# Methods: our engine, ours without drafts, and transformers' static cache.
OURS, PLAIN, STATIC = "triforce", "autoregressive", "transformers-static"
# The embedded pair's. Results that name no vocabulary were measured with it, in models of any shape.
PAIR_VOCABULARY = 4096


def header(seed: int) -> Record:
    """Returns command, commit ("+": files were changed since), date, hardware, versions and seed."""
    return results.header(seed) | {"command": _command()}


def _command() -> str:
    """Returns the command of this process, or for a rank that of torchrun, which starts ranks with "-u"."""
    words = sys.orig_argv[1:]
    if (ranks := world_size()) == 1:
        return shlex.join(["python", *words])
    return shlex.join(["torchrun", "--nproc-per-node", str(ranks), *words[words[:1] == ["-u"] :]])


def write(path: Path, content: Record) -> None:
    """Writes a results file as a whole or not at all.

    It has the form of ``triforce_tree.bench.results``: a line with the header, then a line for each record.
    Where several runs are in one file, a line with the header of each part comes before the records. Records
    of other tables than ``rows`` name theirs.

    Args:
        content: the header's values; ``settings``; headers by name in ``parts``; lists of records.
    """
    tables = {name: value for name, value in content.items() if _is_table(value)}
    about = {
        name: value for name, value in content.items() if name not in (*tables, "parts", "settings", "rows")
    }
    lines: list[Record] = [{"settings": content.get("settings", {}), "about": about}]
    for name, part in content.get("parts", {}).items():
        own = {key: value for key, value in part.items() if key != "settings"}
        lines.append({"part": name, "settings": part.get("settings", {}), "about": own})
    for name, records in tables.items():
        lines += records if name == "rows" else [{"table": name, **record} for record in records]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(member, dict) for member in value)


def content_at(path: Path) -> Record:
    """Returns the content that :func:`write` was given; without parts and rows where there is no file.

    Raises:
        ValueError: it is not a results file.
    """
    if not path.exists():
        return {"parts": {}, "rows": []}
    file = results.read(path)
    content: Record = {**file.about, "rows": []}
    if file.settings:
        content["settings"] = file.settings
    for line in file.all:
        if "about" in line:
            part = line["about"] | ({"settings": line["settings"]} if line["settings"] else {})
            content.setdefault("parts", {})[line["part"]] = part
        elif "table" in line:
            record = {name: value for name, value in line.items() if name != "table"}
            content.setdefault(line["table"], []).append(record)
        else:
            content["rows"].append(line)
    return content


def open_records(path: Path, settings: Record) -> results.Records:
    """Returns the records of an earlier run with the same settings. Those of other settings are renamed."""
    try:
        return results.Records(path, settings)
    except ValueError:
        names = (path.with_name(f"{path.stem}.{n}.jsonl") for n in count(1))
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        print(f"{path.name} had other settings; its measurements are now in {kept.name}", file=sys.stderr)
        return results.Records(path, settings)


class ResultsFile:
    """A results file in parts; every measurement is on disk as soon as it is made.

    Args:
        path: the file.
        part: what is measured now. It begins anew where its measurements had other settings.
        settings: of the part, with a ``seed``.
        make_rows: of a part's name, header and measurements.
        begin: another results file, which a new one begins as a copy of.
    """

    def __init__(
        self,
        path: Path,
        part: str,
        settings: Record,
        make_rows: Rows,
        begin: Path | None = None,
    ) -> None:
        check_writable(path)
        self.path, self.part, self._rows = path, part, make_rows
        source = path if path.exists() or begin is None else begin
        self.all = content_at(source)
        kept = path.with_name(f"{path.stem}.{part}.jsonl")
        self._records = open_records(kept, settings)
        header_now = header(settings["seed"])
        known = self.all["parts"].get(part, {}) if self.samples else {}
        self.mine: Record = {"notes": [], **known, **header_now, "settings": self._records.settings}

    @property
    def samples(self) -> list[Record]:
        """Returns the part's measurements so far."""
        return self._records.all

    @property
    def rows(self) -> list[Record]:
        """Returns the part's rows."""
        return [row for row in self.all["rows"] if row["part"] == self.part]

    def find(self, **key: Any) -> Record | None:
        """Returns the measurement with these values."""
        return self._records.find(**key)

    def add(self, sample: Record) -> None:
        self._records.add(sample)
        self.write()

    def note(self, text: str) -> None:
        """Adds something that a reader of this part's rows should know."""
        if text not in self.mine["notes"]:
            self.mine["notes"].append(text)
            self.write()

    def write(self) -> None:
        """Makes the part's rows anew, if it has samples. Other parts stay as they are."""
        if not self.samples:
            return
        self.all["parts"][self.part] = self.mine
        others = [row for row in self.all["rows"] if row["part"] != self.part]
        mine = self._rows(self.part, self.mine, self.samples)
        self.all["rows"] = sorted([*others, *mine], key=lambda row: row["part"])
        write(self.path, self.all)


def settings_of(plan: Record, seed: int, tiny: bool) -> Record:
    """Returns what must agree for measurements to be put together: a part's plan, commit and machine."""
    dtype = "float32" if tiny else "bfloat16"
    return {**plan, "seed": seed, "commit": results.commit(), "gpu": results.hardware(), "dtype": dtype}


def inflated_vocabulary(shape: str) -> int:
    """Entries of the vocabulary of the embedded pair inflated to this shape."""
    return Shape.parse(shape).vocabulary or PAIR_VOCABULARY


def grouped(rows: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Returns the rows by their values of these fields."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def rounded(value: float | None) -> float | None:
    """Returns a value rounded to four significant digits, more than measurements are accurate to."""
    return None if value is None else float(f"{value:.4g}")
