"""Results files: one JSON line for each measurement, from which an interrupted run continues.

The first line is the header. It has ``settings``, which must be the same for a run to continue, and
``about``: command, commit (with "+" if files were changed since), date, hardware, versions and seed. Each
further line is a record. Files of several runs, which the benchmarks of a checkout write, have a header for
each ``part``.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import StoppingCriteria

import triforce_tree
from triforce_tree.runtime.files.writing import check_writable
from triforce_tree.runtime.fingerprint import hardware as hardware

Record = dict[str, Any]


class Records:
    """Measurements of one run, in a JSON-lines file or in memory.

    The first line holds the settings; a file with other settings is refused.

    Args:
        path: the file; None keeps the records in memory only.
        settings: must be the same for old and new records to be comparable.
        about: describes the origin of the measurements; written when the file is made.

    Attributes:
        about: the description in the file.

    Raises:
        ValueError: the file has other settings or is not a results file.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path | None, settings: Record, about: Record | None = None) -> None:
        self.path = check_writable(path) if path is not None else None
        self.settings = json.loads(json.dumps(settings))
        self.about = about or {}
        self.all: list[Record] = []
        if self.path is None:
            return
        if self.path.exists() and self.path.stat().st_size:
            self._resume(self.path)
        else:
            about = {"about": self.about} if self.about else {}
            self._append(self.path, {"settings": self.settings, **about})

    def find(self, **key: Any) -> Record | None:
        """Returns the record with these values, or None if there is none."""
        return next((r for r in self.all if all(r.get(k) == v for k, v in key.items())), None)

    def add(self, record: Record) -> None:
        self.all.append(record)
        if self.path is not None:
            self._append(self.path, record)

    def _resume(self, path: Path) -> None:
        head, rest, complete = _read_lines(path)
        settings = head["settings"]
        for name in sorted({*settings, *self.settings}):
            if settings.get(name) != self.settings.get(name):
                raise ValueError(
                    f"{str(path)!r} was made with {name}={settings.get(name)!r}, now it is "
                    f"{self.settings.get(name)!r}; give another path, or delete the file to start again"
                )
        # If a run was killed while it wrote a measurement, this measurement is repeated.
        with path.open("r+b") as file:
            file.truncate(complete)
        self.all, self.about = rest, head.get("about", {})

    @staticmethod
    def _append(path: Path, record: Record) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class Series:
    """A series of measurements, which runs until all are made or ``wanted`` is False.

    Attributes:
        records: earlier records; new ones are added.
        seed: seed of all draws.
        stop: ends a generation early.
        wanted: returns whether to continue. It is called before and after each measurement; if it is False
            after one, that measurement is discarded.
        done: called with every record, earlier ones included.
    """

    records: Records
    seed: int = 0
    stop: StoppingCriteria | None = None
    wanted: Callable[[], bool] = lambda: True
    done: Callable[[Record], None] = lambda record: None

    def fill(self, keys: Iterable[Record], measure: Callable[[Record], Record]) -> None:
        """Measures the records that are missing.

        Args:
            keys: the keys of all records, in the order of the measurements.
            measure: returns the values for a key.
        """
        for key in keys:
            if not self.wanted():
                return
            record = self.records.find(**key)
            if record is None:
                record = {**key, **measure(key)}
                if not self.wanted():
                    return
                self.records.add(record)
            self.done(record)


def read(path: str | Path) -> Records:
    """Returns the records of a results file, for reading only.

    Raises:
        ValueError: it is not a results file.
        OSError: it cannot be read.
    """
    head, rest, _ = _read_lines(Path(path))
    records = Records(None, head["settings"], head.get("about"))
    records.all = rest
    return records


def _read_lines(path: Path) -> tuple[Record, list[Record], int]:
    """Returns the first line, the other lines, and the number of bytes of all complete lines."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8-sig").rpartition("\n")
        head, *rest = [json.loads(line) for line in whole.splitlines()]
        if not isinstance(head["settings"], dict) or not all(isinstance(record, dict) for record in rest):
            raise TypeError("settings and records are objects")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not a results file of this command; give another path") from error
    return head, rest, len(whole.encode()) + 1


def header(seed: int) -> Record:
    """Returns the command, commit, machine and versions that a result belongs to."""
    return {
        "command": " ".join([_program(), *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "triforce_tree": triforce_tree.__version__,
        },
        "seed": seed,
        "threads": torch.get_num_threads(),
    }


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "python -m triforce_tree" if name == "__main__.py" else name


def commit() -> str | None:
    """Returns the commit of the source tree that this package runs from, with "+" if files were changed
    since.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def repeated_share(tokens: Sequence[int]) -> float:
    """Returns the share of a text's 8-grams that occur earlier in it: 0 without repetition, nearly 1 in a
    loop.
    """
    grams = [tuple(tokens[start : start + 8]) for start in range(len(tokens) - 7)]
    return (len(grams) - len({*grams})) / max(1, len(grams))
