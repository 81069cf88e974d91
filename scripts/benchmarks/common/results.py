"""Results files: where they come from, the statistics they keep, and single measurements that a run goes on
from.

A file in docs/results holds rows: medians, their 20th and 80th percentile and counts. The measurements that
rows are made of lie beside it, one JSON line each in FILE.PART.jsonl, which git ignores.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.common.code_digest import ROOT, digest, digests
from triforce_tree.eval import results

Record = dict[str, Any]

RESULTS = ROOT / "docs" / "results"
OURS = "triforce"
# What a row is about; a measurement has a prompt and a method besides.
CELL = ("batch", "context", "new_tokens", "temperature", "setting")


def header(seed: int, *areas: str) -> Record:
    """Command, commit ("+": changed since), date, hardware, versions, seed, digests of the measured code."""
    command = " ".join(["python", *sys.orig_argv[1:]])
    return results.header(seed) | {"command": command, "code": digests(areas)}


def write(path: Path, content: Record) -> None:
    """As a whole or not at all."""
    beside = path.with_suffix(".tmp")
    beside.write_text(dumps(content) + "\n", encoding="utf-8")
    beside.replace(path)


def dumps(value: Any, depth: int = 0) -> str:
    """JSON that git compares well: a line for each key of outer dictionaries and each member of a list."""
    pad, end = " " * (depth + 1), " " * depth
    if isinstance(value, dict) and value and depth < 3:
        members = [f"{pad}{json.dumps(key)}: {dumps(member, depth + 1)}" for key, member in value.items()]
        return "{\n" + ",\n".join(members) + f"\n{end}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(pad + json.dumps(member) for member in value) + f"\n{end}]"
    return json.dumps(value)


class ResultsFile:
    """A results file in parts; every measurement is on disk as soon as it is made.

    Args:
        path: the file.
        part: what is measured now. Its measurements are kept where their settings are these, else dropped.
        settings: of the part, with a ``seed``.
        make_rows: of a part's name, header and measurements.
        areas: of the package that the part measures.
        fresh: drop them in any case.
        begin: another results file, which a new one begins as a copy of.
    """

    def __init__(
        self,
        path: Path,
        part: str,
        settings: Record,
        make_rows: Callable[[str, Record, list[Record]], list[Record]],
        areas: Sequence[str],
        fresh: bool = False,
        begin: Path | None = None,
    ) -> None:
        results.check_writable(path)
        self.path, self.part, self._rows = path, part, make_rows
        source = path if path.exists() or begin is None else begin
        self.all: Record = {"parts": {}, "rows": []}
        if source.exists():
            self.all = json.loads(source.read_text(encoding="utf-8"))
        kept = path.with_name(f"{path.stem}.{part}.jsonl")
        if fresh:
            kept.unlink(missing_ok=True)
        try:
            self._records = results.Records(kept, settings)
        except ValueError:  # made with other settings, or by another engine
            kept.unlink()
            self._records = results.Records(kept, settings)
        header_now = header(settings["seed"], *areas)
        known = self.all["parts"].get(part, {}) if self.samples else {}
        self.mine: Record = {"notes": [], **known, **header_now, "settings": self._records.settings}

    @property
    def samples(self) -> list[Record]:
        """The part's measurements so far."""
        return self._records.all

    @property
    def rows(self) -> list[Record]:
        """The part's rows."""
        return [row for row in self.all["rows"] if row["part"] == self.part]

    def find(self, **key: Any) -> Record | None:
        """The measurement with these values."""
        return self._records.find(**key)

    def add(self, sample: Record) -> None:
        self._records.add(sample)
        self.write()

    def note(self, text: str) -> None:
        """Something that a reader of this part's rows should know."""
        if text not in self.mine["notes"]:
            self.mine["notes"].append(text)
            self.write()

    def write(self) -> None:
        """Make the part's rows anew; other parts stay as they are, and so does this one before it has any."""
        if not self.samples:
            return
        self.all["parts"][self.part] = self.mine
        others = [row for row in self.all["rows"] if row["part"] != self.part]
        mine = self._rows(self.part, self.mine, self.samples)
        self.all["rows"] = sorted([*others, *mine], key=lambda row: row["part"])
        write(self.path, self.all)


def settings_of(plan: Record, seed: int, tiny: bool) -> Record:
    """What must agree for measurements to be put together: a part's plan, the engine, the machine."""
    dtype = "float32" if tiny else "bfloat16"
    return {**plan, "seed": seed, "engine": digest("engine")[:12], "gpu": results.hardware(), "dtype": dtype}


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
    first, times = cell[0], [s["ms_per_token"] for s in cell]
    ms = statistics.median(times)
    return {
        "part": part,
        "shape": f"{shape} inflated",
        **{k: first[k] for k in CELL},
        "prompts": len(cell),
        "ms_per_token": rounded(ms),
        "ms_per_token_p20": rounded(percentile(times, 0.2)),
        "ms_per_token_p80": rounded(percentile(times, 0.8)),
        "baseline": baseline,
        "baseline_ms_per_token": rounded(plain),
        "speedup": None if plain is None else rounded(plain / ms),
        "roof_ms": rounded(first["roof_ms"]),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, in proportion."""
    ordered, at = sorted(values), share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


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
