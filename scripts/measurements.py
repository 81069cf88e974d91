"""Results files that hold single measurements by part: bench_on_chip.py's and bench_offload.py's."""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from triforce_tree.bench import results

Record = dict[str, Any]

ROOT = Path(__file__).parents[1]
OURS = "triforce"
# What a row is about; a measurement has a prompt and a method besides.
CELL = ("batch", "context", "new_tokens", "temperature", "setting")

_ENGINE = (
    "cycle/*.py",
    "kernels/*.py",
    "kernels/*.[ch]",
    *(
        f"{name}.py"
        for name in ("few_row", "fused_linears", "graphs", "hf_model", "inflate", "sampling", "tree_search")
    ),
)


def engine_digest() -> str:
    """Of the sources that decode: measurements of different engines are not put together."""
    digest = hashlib.sha256()
    package = ROOT / "triforce_tree"
    for pattern in _ENGINE:
        for path in sorted(package.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Book:
    """The results file: every measurement is on disk as soon as it is made.

    Args:
        path: the file.
        part: what is measured now. Its measurements are kept where their settings are these, else dropped.
        settings: of the part.
        make_rows: of a part's name and content.
        fresh: drop them in any case.
        begin: another results file, which a new one begins as a copy of.
    """

    def __init__(
        self,
        path: Path,
        part: str,
        settings: Record,
        make_rows: Callable[[str, Record], list[Record]],
        fresh: bool = False,
        begin: Path | None = None,
    ) -> None:
        results.check_writable(path)
        self.path, self._rows = path, make_rows
        self.all: Record = {"rows": [], "parts": {}}
        source = path if path.exists() or begin is None else begin
        if source.exists():
            self.all = json.loads(source.read_text(encoding="utf-8"))
        settings = json.loads(json.dumps(settings))
        known = self.all["parts"].get(part)
        if fresh or known is None or known["settings"] != settings:
            known = {"settings": settings, "notes": [], "samples": []}
        self.mine: Record = {**known, **results.header(settings["seed"]), "settings": settings}
        self.all["parts"][part] = self.mine

    def find(self, **key: Any) -> Record | None:
        """The measurement with these values."""
        return next(iter(having(self.mine["samples"], **key)), None)

    def add(self, sample: Record) -> None:
        self.mine["samples"].append(sample)
        self.write()

    def note(self, text: str) -> None:
        """Something that a reader of this part's rows should know."""
        if text not in self.mine["notes"]:
            self.mine["notes"].append(text)
            self.write()

    def write(self) -> None:
        parts = self.all["parts"]
        self.all["rows"] = [row for name in sorted(parts) for row in self._rows(name, parts[name])]
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.all, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


def having(samples: Iterable[Record], **key: Any) -> list[Record]:
    """The measurements with these values."""
    return [s for s in samples if all(s.get(k) == v for k, v in key.items())]


def cells(samples: Iterable[Record]) -> list[list[Record]]:
    """Our engine's measurements; those that differ in nothing but the prompt stand together."""
    found: dict[str, list[Record]] = {}
    for sample in having(samples, method=OURS):
        found.setdefault(json.dumps([sample[k] for k in CELL]), []).append(sample)
    return list(found.values())


def head(part: str, shape: str, cell: Sequence[Record], baseline: str | None, plain: float | None) -> Record:
    """What every row begins with: its place, and our median time beside that of the baseline.

    Args:
        part: of the results file.
        shape: what the pair is inflated to.
        cell: our measurements.
        baseline: its name; None where there is none.
        plain: the baseline's milliseconds a token.
    """
    first, ms = cell[0], statistics.median(s["ms_per_token"] for s in cell)
    return {
        "part": part,
        "shape": f"{shape} inflated",
        **{k: first[k] for k in CELL},
        "prompts": len(cell),
        "ms_per_token": rounded(ms),
        "baseline": baseline,
        "baseline_ms_per_token": rounded(plain),
        "speedup": None if plain is None else rounded(plain / ms),
        "roof_ms": rounded(first["roof_ms"]),
    }


def medians(cell: Sequence[Record], keys: Iterable[str]) -> Record:
    return {k: rounded(statistics.median(s[k] for s in cell)) for k in keys}


def medians_by_name(cell: Sequence[Record], key: str) -> Record:
    """Of a figure that each level has, or not: its median over the measurements that have it."""
    names = dict.fromkeys(name for s in cell for name, value in s[key].items() if value is not None)
    return {
        name: rounded(statistics.median(s[key][name] for s in cell if s[key].get(name) is not None))
        for name in names
    }


def rounded(value: float | None) -> float | None:
    """Four significant places are more than the measurements hold."""
    return None if value is None else float(f"{value:.4g}")
