"""What results files of ``bench batch | offload | kernels | workloads`` say: rows, tables, cells and bars."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from triforce_tree.eval.attention import measure as kernels
from triforce_tree.eval.decoding import batch, offload
from triforce_tree.eval.report.table import Place, Table
from triforce_tree.eval.results import Record, Records
from triforce_tree.eval.workloads import attention, decoding
from triforce_tree.eval.workloads.measure import ATTENTION, DECODING

Rows = list[Record]


def of_batches(records: Records) -> Rows:
    """A row for each record: both ratios are of tokens a second."""
    found = _of_kind(records, batch.KIND)
    speed = {_at(r): r["new_tokens"] / r["seconds"] for r in found}
    rows = []
    for r in found:
        own, together = speed[_at(r)], 1 if r["method"] == batch.ALONE else r["batch"]
        plain = speed.get((r["batch"], r["temperature"], batch.PLAIN))
        alone = speed.get((r["batch"], r["temperature"], batch.ALONE))
        rows.append({
            **{name: r[name] for name in ("batch", "temperature", "method")},
            "ms_per_token": 1e3 * r["seconds"] * together / r["new_tokens"], "tokens_per_second": own,
            "to_plain": own / plain if plain else None, "to_one_by_one": own / alone if alone else None,
        })  # fmt: skip
    return rows


def _at(record: Record) -> tuple[int, float, str]:
    return record["batch"], record["temperature"], record["method"]


def of_offloading(records: Records) -> Rows:
    """A row for each method and temperature: medians over prompts, beside the fastest plain decoding."""
    groups: dict[tuple[str, float], Rows] = {}
    for r in _of_kind(records, offload.KIND):
        groups.setdefault((r["method"], r["temperature"]), []).append(r)
    ms = {
        at: statistics.median(1e3 * r["seconds"] / r["new_tokens"] for r in own) for at, own in groups.items()
    }
    rows = []
    for (method, temperature), own in groups.items():
        plain = [value for (m, t), value in ms.items() if t == temperature and m in offload.PLAIN]
        peaks = [r["peak_bytes"] for r in own if r["peak_bytes"] is not None]
        rows.append({
            "method": method, "temperature": temperature, "prompts": len(own),
            "ms_per_token": ms[method, temperature],
            "to_fastest_plain": min(plain) / ms[method, temperature] if plain else None,
            "peak_gib": max(peaks) / 2**30 if peaks else None,
        })  # fmt: skip
    return rows


def of_kernels(records: Records) -> Rows:
    """A row for each record."""
    return [
        {
            **{name: r[name] for name in ("prefix", "tree", "page", "method")},
            "heads": f"{r['query_heads']}/{r['kv_heads']} x {r['dim']}", "us": r.get("us"),
            "megabytes": r["bytes"] / 1e6, "of_roof": r["roof_us"] / r["us"] if r.get("us") else None,
            "reason": r.get("reason", ""),
        }
        for r in _of_kind(records, kernels.KIND)
    ]  # fmt: skip


def of_attention(records: Records) -> Rows:
    """A row for each workload and way, beside attention by sequences."""
    found = _of_kind(records, ATTENTION)
    us = {(r["workload"], r["way"]): r.get("us") for r in found}
    rows = []
    for r in found:
        own, other = r.get("us"), us.get((r["workload"], attention.BY_SEQUENCES))
        rows.append({
            **{name: r[name] for name in ("workload", "texts", "way")}, "us": own,
            "kv_megabytes": r["kv_bytes"] / 1e6, "to_sequences": other / own if own and other else None,
            "of_roof": r["roof_us"] / own if own else None, "reason": r.get("reason", ""),
        })  # fmt: skip
    return rows


def of_decoding(records: Records) -> Rows:
    """A row for each workload and way; a tree's has the time of its attention, as measured alone."""
    found = _of_kind(records, DECODING)
    measured = [r for r in _of_kind(records, ATTENTION) if r.get("us")]
    ways = {r["way"] for r in measured}
    alone = {r["workload"]: r for r in measured if r["way"] == attention.engines(ways, r["seen"])}
    speed = {(r["workload"], r["way"]): _speed(r) for r in found}
    one = next((_speed(r) for r in found if r["texts"] == 1 and r["way"] == decoding.TREE), None)
    rows = []
    for r in found:
        own, batched = _speed(r), speed.get((r["workload"], decoding.BATCH))
        layer = alone.get(r["workload"], {}) if r["way"] == decoding.TREE else {}
        long = r["workload"].startswith("long/") and r["way"] == decoding.TREE
        rows.append({
            **{name: r[name] for name in ("workload", "texts", "way")}, "tokens_per_second": own,
            "ms_per_token": 1e3 * r["texts"] / own if own else None,
            "attention_ms": layer["us"] * layer["layers"] / 1e3 if layer.get("us") else None,
            "to_batch": own / batched if own and batched else None,
            "to_one_branch": own / one if own and one and long else None,
            "kv_gib": r["kv_bytes"] / 2**30 if "kv_bytes" in r else None, "reason": r.get("reason", ""),
        })  # fmt: skip
    return rows


def _speed(record: Record) -> float | None:
    return record["new_tokens"] / record["seconds"] if "seconds" in record else None


def _of_kind(records: Records, kind: str) -> Rows:
    return [r for r in records.all if r.get("kind") == kind]


@dataclass(frozen=True)
class View:
    """How rows are shown.

    Attributes:
        rows: of a results file.
        title: of the table.
        place: what a row is about: fields, and their headings.
        figures: of a row: fields, and their headings and formats. Those of ``compared`` are compared between
            machines.
        bar: field of the plot's bars, and its axis; ``bars`` says which rows have one.
    """

    rows: Callable[[Records], Rows]
    title: str
    place: Mapping[str, str]
    figures: Mapping[str, tuple[str, str]]
    compared: Sequence[str]
    bar: str
    axis: str
    bars: Callable[[Record], bool] = lambda row: True

    def table(self, records: Records) -> Table:
        rows = [row for row in self.rows(records) if not row.get("reason")]
        # A column that no row has a figure for is left out.
        shown = {
            name: how
            for name, how in self.figures.items()
            if any(row[name] not in (None, "") for row in rows)
        }
        columns = [*self.place.values(), *(heading for heading, _ in shown.values())]
        cells = [
            [
                *(_word(row[name]) for name in self.place),
                *("" if row[name] is None else form.format(row[name]) for name, (_, form) in shown.items()),
            ]
            for row in rows
        ]
        return Table(self.title, columns, cells)

    def cells(self, records: Records) -> dict[Place, dict[str, float]]:
        found: dict[Place, dict[str, float]] = {}
        for row in self.rows(records):
            place = tuple((heading, _word(row[name])) for name, heading in self.place.items())
            figures = {self.figures[name][0]: row[name] for name in self.compared if row[name] is not None}
            if figures:
                found[place] = figures
        return found

    def drawn(self, records: Records) -> list[tuple[str, float]]:
        """Labels and lengths of the plot's bars."""
        rows = [row for row in self.rows(records) if row[self.bar] is not None and self.bars(row)]
        return [(", ".join(_word(row[name]) for name in self.place), row[self.bar]) for row in rows]


def _word(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


_SPEED = {"ms_per_token": ("ms/token", "{:.2f}"), "tokens_per_second": ("tokens/s", "{:.1f}")}
VIEWS = (
    View(
        of_batches,
        "batches: decoding alone",
        {"method": "method", "batch": "sequences", "temperature": "T"},
        {
            **_SPEED,
            "to_plain": ("to plain decoding", "{:.2f}x"),
            "to_one_by_one": ("to one by one", "{:.2f}x"),
        },
        ("ms_per_token", "tokens_per_second"),
        "tokens_per_second",
        "tokens a second of all sequences",
    ),
    View(
        of_offloading,
        "offloaded decoding, medians over prompts",
        {"method": "method", "temperature": "T"},
        {
            "prompts": ("prompts", "{}"),
            "ms_per_token": ("ms/token", "{:.2f}"),
            "to_fastest_plain": ("to the fastest plain decoding", "{:.2f}x"),
            "peak_gib": ("peak of the device, GiB", "{:.2f}"),
        },
        ("ms_per_token", "to_fastest_plain"),
        "ms_per_token",
        "ms a token, decoding alone",
    ),
    View(
        of_kernels,
        "tree attention, one layer",
        {"method": "kernel", "heads": "heads", "prefix": "prefix", "tree": "tree", "page": "page"},
        {
            "us": ("microseconds", "{:.1f}"),
            "megabytes": ("MB on paper", "{:.2f}"),
            "of_roof": ("of the roofline", "{:.0%}"),
        },
        ("us",),
        "of_roof",
        "share of the roofline",
    ),
    View(
        of_attention,
        "attention over texts that branch, one layer",
        {"workload": "workload", "way": "grouping"},
        {
            "texts": ("texts", "{:,}"),
            "us": ("microseconds", "{:.1f}"),
            "kv_megabytes": ("KV MB on paper", "{:.2f}"),
            "to_sequences": ("to by sequences", "{:.2f}x"),
            "of_roof": ("of the roofline", "{:.0%}"),
        },
        ("us",),
        "to_sequences",
        "speed-up over attention by sequences",
        lambda row: row["way"] in (attention.FLATTEN, attention.BLOCKS),
    ),
    View(
        of_decoding,
        "decoding texts that branch",
        {"workload": "workload", "way": "decoded by"},
        {
            "texts": ("texts", "{:,}"),
            **_SPEED,
            "attention_ms": ("of it attention, ms", "{:.2f}"),
            "to_batch": ("to a batch", "{:.2f}x"),
            "to_one_branch": ("to one branch", "{:.2f}x"),
            "kv_gib": ("KV, GiB", "{:.2f}"),
        },
        ("ms_per_token", "tokens_per_second"),
        "tokens_per_second",
        "tokens a second of all texts",
    ),
)  # fmt: skip


def tables(records: Records) -> list[Table]:
    """Of all that a results file holds, without empty ones."""
    found = [table for table in (view.table(records) for view in VIEWS) if table.rows]
    return [*found, *_absent(records)]


def _absent(records: Records) -> list[Table]:
    """What has no figures, with the number of measurements by reason."""
    reasons = Counter(
        (r.get("way") or r["method"], r["reason"]) for r in records.all if r.get("kind") and r.get("reason")
    )
    rows = [(what, f"{count:,}", reason) for (what, reason), count in reasons.items()]
    return [Table("not measured", ("what", "measurements", "why"), rows)] if rows else []


def cells(records: Records) -> dict[Place, dict[str, float]]:
    """The figures of each cell."""
    return {place: figures for view in VIEWS for place, figures in view.cells(records).items()}
