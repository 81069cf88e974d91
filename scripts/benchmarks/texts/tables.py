"""Tables and plots of ``any_text``, ``never_slower``, ``long_outputs`` and ``real_model``."""

import statistics
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from scripts.benchmarks.common.markdown import Columns, Record, Table, file_note, listing
from scripts.benchmarks.common.results import grouped
from scripts.benchmarks.sources.registry import KINDS, SOURCES
from triforce_tree.bench.tables import grid

ANY_TEXT, ANY_TEXT_CPU, NEVER_SLOWER, NEVER_SLOWER_CPU = (
    "any_text_h200.jsonl",
    "any_text_cpu.jsonl",
    "never_slower_h200.jsonl",
    "never_slower_cpu.jsonl",
)
COMMAND = "python -m scripts.benchmarks any_text --texts texts.json.xz"
GRID_COMMAND = "python -m scripts.benchmarks never_slower --texts texts.json.xz"
# Slower than this counts as slower: clocks differ by as much from run to run.
SLOWER = 0.98
_MEDIANS = ("ms_per_token", "plain_ms_per_token", "repeated_8grams")
_WHAT = {source.name: source.what for source in SOURCES}


def _levels(row: Record) -> str:
    """Returns acceptance by level, the lowest first."""
    return ", ".join(f"{name} {value:.2f}" for name, value in row["acceptance"].items())


def _model(row: Record) -> str:
    """Returns the model, and engine options that are not the defaults."""
    return ", ".join([row["model"], *(f"{name}={value}" for name, value in row.get("settings", {}).items())])


ANY_TEXT_COLUMNS: Columns = {
    "kind": "{kind}", "text": lambda row: _WHAT.get(row["text"], row["text"]), "model": _model,
    "context": "{context:,}", "T": "{temperature:g}", "ms/token": "{ms_per_token:.2f}",
    "plain": "{plain_ms_per_token:.2f}", "**speed-up**": "**{speedup:.2f}x**",
    "slowest run": "{worst:.2f}x", "fastest run": "{best:.2f}x",
    "repeated 8-grams": "{repeated_8grams:pct}", "tokens a pass": "{tokens_per_pass:.1f}",
    "accepted by": _levels,
}  # fmt: skip
SUMMARY: Columns = {
    "model": _model, "context": "{context:,}", "T": "{temperature:g}", "texts": "{texts}",
    "lowest": "{lowest:.2f}x ({lowest_text})", "median": "**{median:.2f}x**",
    "highest": "{highest:.2f}x ({highest_text})",
}  # fmt: skip


def _kind(row: Record) -> int:
    return KINDS.index(row["kind"])


def _sorted(content: Record) -> list[Record]:
    """Returns the rows by model and options, temperature, then kind."""
    return sorted(
        content["rows"],
        key=lambda r: (r["model"], r["part"], r["context"], r["temperature"], _kind(r), r["text"]),
    )


def summary(content: Record) -> list[Record]:
    """Returns the lowest, the median and the highest speed-up over all texts, and the medians of times."""
    made = []
    cells = grouped(_sorted(content), "part", "context", "temperature")
    for (part, context, temperature), found in cells.items():
        low, high = (choose(found, key=lambda r: r["speedup"]) for choose in (min, max))
        made.append(
            {
                "model": found[0]["model"], "settings": found[0]["settings"], "part": part,
                "context": context, "temperature": temperature, "texts": len(found),
                "lowest": low["speedup"], "lowest_text": low["kind"],
                "median": statistics.median(r["speedup"] for r in found),
                "highest": high["speedup"], "highest_text": high["kind"],
                "machine": found[0]["machine"],
                "kinds": len({r["kind"] for r in found}),
                **{name: statistics.median(r[name] for r in found) for name in _MEDIANS},
            }
        )  # fmt: skip
    return made


def by_context(content: Record) -> str | None:
    """Returns a line for each model, kind and temperature, a column for each context.

    Below 0.98 is in bold, with a standard error by more than two of them.
    """
    if not (rows := _sorted(content)):
        return None
    contexts = sorted({row["context"] for row in rows})
    lines: dict[tuple[Any, ...], dict[int, Record]] = {}
    for row in rows:
        place = (_model(row), row["kind"], row["text"], f"{row['temperature']:g}")
        lines.setdefault(place, {})[row["context"]] = row

    def surely(row: Record) -> bool:
        return bool(row["speedup"] + 2 * row.get("speedup_error", 0.0) < SLOWER)

    def shown(row: Record | None) -> str:
        if row is None:
            return ""
        error = f" ± {row['speedup_error']:.2f}" if "speedup_error" in row else ""
        text = f"{row['speedup']:.2f}{error}"
        return f"**{text}**" if surely(row) else text

    cells = [
        [model, kind, t, *(shown(found.get(n)) for n in contexts)]
        for (model, kind, _, t), found in lines.items()
    ]
    slower = [row for row in rows if row["speedup"] < SLOWER]
    least = min(row["speedup"] for row in rows)
    errors = any("speedup_error" in row for row in rows)
    clearly = f", {sum(map(surely, slower))} by more than two standard errors" if errors else ""
    note = (
        f"Speed-up over plain decoding in the same process; of {len(rows)} cells {len(slower)} are below "
        f"{SLOWER:g}{clearly}, the lowest is {least:.2f}. "
    )
    headings = ["model", "kind of text", "T", *(f"{n:,}" for n in contexts)]
    return grid(headings, cells, left=2) + "\n" + note + origin_of(content) + "\n"


def origin_of(content: Record) -> str:
    """Returns machine, versions and what was not measured."""
    machines, notes = dict[str, list[str]](), dict[str, list[str]]()
    for name, part in content["parts"].items():
        versions = part["versions"]
        machine = (
            f"{part['hardware']}, torch {versions['torch']}, transformers {versions['transformers']}, "
            f"vocabulary of {part['settings']['vocabulary']:,} entries, {part['date']}"
        )
        machines.setdefault(machine, []).append(name)
        for text in part["notes"]:
            notes.setdefault(text, []).append(name)
    several = len(machines) > 1
    told = [f"{', '.join(names)}: {text}." if several else f"{text}." for text, names in machines.items()]
    told += [f"Not measured in {', '.join(names)}: {text}." for text, names in notes.items()]
    return " ".join(told)


def _caption(file: str) -> Callable[[Record, Sequence[Record]], str]:
    return lambda content, rows: f"{origin_of(content)} {file_note(file, content['parts'])}"


def _by_context(file: str) -> Callable[[Record], str | None]:
    def make(content: Record) -> str | None:
        found = by_context(content)
        return found and f"{found.rstrip()} {file_note(file, content['parts'])}"

    return make


# Prefills with a part of the keys and values in host memory.
PREFILL: Columns = {
    "model": "{model}", "tokens": "{context:,}", "limit": "{limit}", "texts": "{offloaded[texts]}",
    "on the device, s": "{device[median]:.2f} ({device[least]:.2f} to {device[most]:.2f})",
    "offloaded, s": "{offloaded[median]:.2f} ({offloaded[least]:.2f} to {offloaded[most]:.2f})",
    "ratio": "{ratio:.2f}x",
}  # fmt: skip


def _prefill_rows(content: Record) -> list[Record]:
    """Returns seconds of prefills with a limit of device memory, and without one; over texts, each once."""
    texts: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    parts: dict[tuple[str, int, str], str] = {}
    for row in content["rows"]:
        limit = row["settings"].get("gpu_memory", "")
        of_limit = texts.setdefault((row["model"], row["context"]), {}).setdefault(limit, {})
        of_limit.setdefault(row["text"], row["prefill_seconds"])
        parts[row["model"], row["context"], limit] = row["part"]
    found = []
    for (model, context), by_limit in texts.items():
        for limit in by_limit.keys() - {""} if "" in by_limit else ():
            part = parts[model, context, limit]
            made: Record = {"model": model, "context": context, "limit": limit.replace("GiB", " GiB")}
            for name, seconds in (("device", by_limit[""]), ("offloaded", by_limit[limit])):
                # The first text of a run waits for the compiler.
                values = sorted([*seconds.values()][1:])
                made[name] = {"median": statistics.median(values), "least": values[0], "most": values[-1]}
                made[name]["texts"] = len(values)
            ratio = made["offloaded"]["median"] / made["device"]["median"]
            found.append(made | {"ratio": ratio, "parts": [parts[model, context, ""], part]})
    return found


def _prefill_note(content: Record, rows: Sequence[Record]) -> str:
    used = {name: content["parts"][name] for row in rows for name in row["parts"]}
    hardware = ", ".join(dict.fromkeys(part["hardware"] for part in used.values()))
    return f"{hardware}, medians over texts, lowest and highest. {file_note(ANY_TEXT, used)}"


# A model that others trained beside the embedded pair; see ``real_model.py``.
REAL_MODEL, REAL_MODEL_CPU = "real_model_h200.jsonl", "real_model_cpu.jsonl"
REAL_MODEL_COMMAND = "python -m scripts.benchmarks real_model --draft smollm2"
REAL_MODEL_COLUMNS: Columns = {
    "model": _model, "kind of text": "{kind}", "context": "{context:,}", "T": "{temperature:g}",
    "retrieval accepts": "?{acceptance[retrieval]:.2f}", "target accepts": "?{acceptance[target]:.2f}",
    "tokens a pass": "{tokens_per_pass:.1f}", "ms/token": "{ms_per_token:.2f}",
    "plain": "{plain_ms_per_token:.2f}", "**speed-up**": "**{speedup:.2f}x**",
    "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip


# Texts of thousands of tokens by position; see ``long_outputs.py``.
LONG_OUTPUTS, LONG_OUTPUTS_CPU = "long_outputs_h200.jsonl", "long_outputs_cpu.jsonl"
LONG_OUTPUTS_COMMAND = "python -m scripts.benchmarks long_outputs --texts texts.json.xz"
# A bin with a larger share of repeated 8-grams repeats itself.
_REPEATS = 0.02
LONG_OUTPUTS_COLUMNS: Columns = {
    "model": _model, "prompt": "{context:,}", "T": "{temperature:g}", "new tokens": "{from:,} to {to:,}",
    "texts": "{texts}", "ms/token": "{ms_per_token:.2f}", "plain": "{plain_ms_per_token:.2f}",
    "**speed-up**": "**{speedup:.2f}x** ({lowest:.2f}x to {highest:.2f}x)",
    f"of texts with at most {100 * _REPEATS:.0f} % repeated": "?{fresh:.2f}x ({fresh_texts})",
    "repeated 8-grams": "{repeated_8grams:pct}", "tokens a pass": "{tokens_per_pass:.1f}",
    "passes of three levels": "{passes[three]:pct}", "two": "{passes[two]:pct}",
    "copied": "{passes[copied]:pct}", "one": "{passes[one]:pct}", "budget": "?{budget:,}",
    "captures, s": "{capture_seconds:.1f}",
}  # fmt: skip


def by_position(content: Record) -> list[Record]:
    """Returns a row for each model, prompt, temperature and bin of new tokens, with medians over texts, but
    mean shares of passes.
    """
    made = []
    cells = grouped(content["rows"], "part", "context", "temperature", "from", "to")
    for _, found in sorted(cells.items(), key=itemgetter(0)):
        fresh = [row["speedup"] for row in found if row["repeated_8grams"] <= _REPEATS]
        speedups = [row["speedup"] for row in found]
        names = (*_MEDIANS, "speedup", "tokens_per_pass", "capture_seconds")
        made.append(
            found[0] | {name: statistics.median(row[name] for row in found) for name in names} | {
                "passes": {
                    name: statistics.fmean(row["passes"][name] for row in found)
                    for name in found[0]["passes"]
                },
                "texts": len(found), "lowest": min(speedups), "highest": max(speedups),
                "fresh": statistics.median(fresh) if fresh else None, "fresh_texts": len(fresh),
            }
        )  # fmt: skip
    return made


def _long_outputs(file: str, command: str) -> Table:
    return Table(file, listing(LONG_OUTPUTS_COLUMNS, by_position, _caption(file)), command)


def _real_model(file: str) -> Table:
    return Table(file, listing(REAL_MODEL_COLUMNS, _sorted, _caption(file), left=2), REAL_MODEL_COMMAND)


def _any_text(file: str, command: str) -> Table:
    return Table(file, listing(ANY_TEXT_COLUMNS, _sorted, _caption(file), left=2), command)


TABLES = {
    "any_text_summary": Table(ANY_TEXT, listing(SUMMARY, summary, _caption(ANY_TEXT)), COMMAND),
    "any_text": _any_text(ANY_TEXT, COMMAND),
    "offload_prefill": Table(ANY_TEXT, listing(PREFILL, _prefill_rows, _prefill_note), COMMAND),
    "any_text_cpu": _any_text(ANY_TEXT_CPU, f"{COMMAND} --shapes pair --contexts 16384 --temperatures 0 0.8"),
    "real_model_summary": Table(
        REAL_MODEL, listing(SUMMARY, summary, _caption(REAL_MODEL)), REAL_MODEL_COMMAND
    ),
    "real_model": _real_model(REAL_MODEL),
    "real_model_cpu": _real_model(REAL_MODEL_CPU),
    "long_outputs": _long_outputs(LONG_OUTPUTS, LONG_OUTPUTS_COMMAND),
    "long_outputs_cpu": _long_outputs(
        LONG_OUTPUTS_CPU, f"{LONG_OUTPUTS_COMMAND} --shapes pair --contexts 2048 --new-tokens 6144"
    ),
    "never_slower": Table(NEVER_SLOWER, _by_context(NEVER_SLOWER), GRID_COMMAND),
    "never_slower_cpu": Table(
        NEVER_SLOWER_CPU, _by_context(NEVER_SLOWER_CPU), f"{GRID_COMMAND} --shapes pair --contexts 1024 4096"
    ),
}


def plot_texts(axis: Any, rows: list[Record]) -> None:
    """Plots the speed-up of each text, a bar for each temperature."""
    names = list(dict.fromkeys((_model(r), r["text"]) for r in rows))
    temperatures = sorted({r["temperature"] for r in rows})
    height = 0.8 / len(temperatures)
    for index, temperature in enumerate(temperatures):
        found = {(_model(r), r["text"]): r for r in rows if r["temperature"] == temperature}
        places = [(at, found[name]) for at, name in enumerate(names) if name in found]
        axis.barh(
            [at + index * height for at, _ in places], [r["speedup"] for _, r in places], height,
            xerr=[
                [r["speedup"] - r["worst"] for _, r in places], [r["best"] - r["speedup"] for _, r in places]
            ],
            label=f"T={temperature:g}",
        )  # fmt: skip
    middle = height * (len(temperatures) - 1) / 2
    axis.set_yticks(
        [at + middle for at in range(len(names))], [", ".join(name) for name in names], fontsize=7
    )
    axis.invert_yaxis()
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set_xlabel("speed-up over plain decoding; lines: slowest and fastest run")
    axis.legend(fontsize=7)


def over_contexts(axis: Any, rows: Sequence[Record]) -> None:
    """Gives a plot the lengths of the prompts as its horizontal axis."""
    axis.set_xscale("log", base=2)
    ticks = sorted({row["context"] for row in rows})
    axis.set_xticks(ticks, [f"{n / 1024:g}K" for n in ticks], fontsize=7)
    axis.set_xlabel("prompt, tokens")


def plot_contexts(axis: Any, rows: list[Record]) -> None:
    """Speed-up over the length of the prompt, a line for each kind; of one model and temperature."""
    model, temperature = rows[0]["model"], min(r["temperature"] for r in rows)
    for kind in KINDS:
        mine = [r for r in rows if (r["kind"], r["model"], r["temperature"]) == (kind, model, temperature)]
        mine.sort(key=lambda r: r["context"])
        if mine:
            axis.plot([r["context"] for r in mine], [r["speedup"] for r in mine], "o-", label=kind)
    over_contexts(axis, rows)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("speed-up over plain decoding")
    axis.set_title(f"{model}, T={temperature:g}", fontsize=9)
    axis.legend(fontsize=7)


def plot_positions(axis: Any, rows: list[Record]) -> None:
    """Plots ms a token over the position, ours and plain; a pair of lines for each model, prompt and T."""
    lines: dict[str, list[Record]] = {}
    for row in rows:
        label = f"{_model(row)}, prompt {row['context']:,}, T={row['temperature']:g}"
        lines.setdefault(label, []).append(row)
    for label, found in lines.items():
        middles = [(row["from"] + row["to"]) / 2 for row in found]
        [line] = axis.plot(middles, [row["ms_per_token"] for row in found], "o-", markersize=3, label=label)
        axis.plot(middles, [row["plain_ms_per_token"] for row in found], "--", color=line.get_color())
    axis.set_ylim(bottom=0)
    axis.set(xlabel="new tokens", ylabel="ms a token; dashed: plain decoding")
    axis.legend(fontsize=6)


PLOTS = {
    "long_outputs": (LONG_OUTPUTS, by_position, (8, 4.5, 0), plot_positions),
    "any_text": (ANY_TEXT, _sorted, (8, 1.5, 0.12), plot_texts),
    "never_slower": (NEVER_SLOWER, _sorted, (7, 4, 0), plot_contexts),
}
