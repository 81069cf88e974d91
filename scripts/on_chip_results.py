"""docs/results/on_chip_h200.json: single measurements by part, and the rows made of them."""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from triforce_tree.bench import results
from triforce_tree.config import HierarchyConfig

Record = dict[str, Any]

FILE = "on_chip_h200.json"
ROOT = Path(__file__).parents[1]
OURS, PLAIN, STATIC = "triforce", "autoregressive", "transformers-static"
# What a row is about; a measurement has a prompt and a method besides.
CELL = ("batch", "context", "new_tokens", "temperature", "setting")
_AVERAGED = (
    "ms_per_token",
    "tokens_per_pass",
    "rounds_per_pass",
    "pass_ms",
    "repeated_8grams",
    "prefill_seconds",
)


_ENGINE = (
    "cycle/*.py",
    "kernels/*.py",
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
        fresh: drop them in any case.
        begin: another results file, which a new one begins as a copy of.
        make_rows: of a part's name and content.
    """

    def __init__(
        self,
        path: Path,
        part: str,
        settings: Record,
        fresh: bool = False,
        begin: Path | None = None,
        make_rows: Callable[[str, Record], list[Record]] | None = None,
    ) -> None:
        results.check_writable(path)
        self.path, self._rows = path, make_rows or rows
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
        return next((s for s in self.mine["samples"] if all(s.get(k) == v for k, v in key.items())), None)

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


def rows(part: str, content: Record) -> list[Record]:
    """Medians over prompts, one row for every cell that our engine was measured in."""
    samples: list[Record] = content["samples"]
    cells: dict[str, list[Record]] = {}
    for sample in samples:
        if sample["method"] == OURS:
            cells.setdefault(json.dumps([sample[k] for k in CELL]), []).append(sample)
    return [_row(part, content["settings"], group, samples) for group in cells.values()]


def _row(part: str, settings: Record, group: list[Record], samples: list[Record]) -> Record:
    first = group[0]
    config = HierarchyConfig.from_options(**(settings["options"] | first["setting"]))
    place = {k: first[k] for k in ("batch", "context", "temperature")}
    rivals = {name: _rival(samples, name, place) for name in (PLAIN, STATIC)}
    known = {name: found for name, found in rivals.items() if found is not None}
    best = min(known, key=lambda name: known[name]["ms_per_token"], default=None)
    middle = {k: _median(s[k] for s in group) for k in _AVERAGED}
    ms = middle.pop("ms_per_token")
    row: Record = {
        "part": part,
        "shape": f"{settings['shape']} inflated",
        **{k: first[k] for k in CELL},
        "prompts": len(group),
        "ms_per_token": _rounded(ms),
        "baseline": best,
        "baseline_ms_per_token": _rounded(known[best]["ms_per_token"]) if best else None,
        "speedup": _rounded(known[best]["ms_per_token"] / ms) if best else None,
        "roof_ms": _rounded(first["roof_ms"]),
        "baselines": known,
        "acceptance": _by_name(group, "acceptance"),
        "mean_accepted_length": _by_name(group, "mean_accepted_length"),
        **{k: _rounded(v) for k, v in middle.items()},
        "stages": _stages(group),
        "capture_seconds": _rounded(max(s["capture_seconds"] for s in group)),
        "peak_gib": _rounded(max(s["peak_gib"] for s in group)),
        "middle_bits": config.middle_bits,
        "config": config.as_options(),
    }
    checked = [s["exact"] for s in group if s.get("exact")]
    if checked:
        row["exact"] = {k: sum(e[k] for e in checked) for k in ("compared", "ties", "failures")}
    return row


def _rival(samples: list[Record], method: str, place: Record) -> Record | None:
    """A baseline's median at the same place, or at another temperature, which costs it next to nothing."""
    found = [s for s in samples if s["method"] == method and _same(s, place, ("batch", "context"))]
    exact = [s for s in found if s["temperature"] == place["temperature"]]
    if method != STATIC:
        found = exact
    if not found:
        return None
    chosen = exact or found
    return {
        "ms_per_token": _rounded(_median(s["ms_per_token"] for s in chosen)),
        "tokens": chosen[0]["new_tokens"],
        "prompts": len(chosen),
        "temperature": chosen[0]["temperature"],
    }


def _same(sample: Record, place: Record, keys: Sequence[str]) -> bool:
    return all(sample[k] == place[k] for k in keys)


def _stages(group: list[Record]) -> Record:
    """Milliseconds of one run of each stage, its roof, and its runs a pass."""
    found = {}
    for name in group[0]["stages"]:
        with_it = [s["stages"][name] for s in group if name in s["stages"]]
        found[name] = {k: _rounded(_median(s[k] for s in with_it)) for k in ("ms", "roof_ms", "runs")}
    return found


def _by_name(group: list[Record], key: str) -> Record:
    names = list(dict.fromkeys(name for s in group for name in s[key]))
    return {name: _rounded(_median(s[key][name] for s in group if name in s[key])) for name in names}


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _rounded(value: float) -> float:
    """Four significant places are more than the measurements hold."""
    return float(f"{value:.4g}")
