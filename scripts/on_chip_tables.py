"""Tables of docs/benchmarks.md from docs/results/on_chip_h200.json."""

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

FILE = "on_chip_h200.json"
# Speed-ups that TriForce (arXiv 2404.11912) reports for Llama-2-7B on an A100, by batch,
# context and temperature.
TRIFORCE = {
    (1, 122_880, 0.0): 2.31,
    (1, 122_880, 0.6): 2.19,
    (1, 122_880, 1.0): 2.08,
    (6, 19_456, 0.0): 1.90,
}
STAGES = {
    "grow": "0: draft grows a tree",
    "choose": "1: first pass, chooses chunks",
    "middle": "1: further passes",
    "full": "2: target on the full cache",
}
HEADLINES = ("7b", "8b", "batch")
_MIDDLE = ("choose", "middle")


def headline(result: Record) -> str:
    """Every shape, batch and temperature beside the faster baseline."""
    found = [r for part in HEADLINES for r in of_part(result, part)]
    if not found:
        return _missing("7b")
    columns = [
        "model", "prompts", "T", "**ms/token**", "our plain decoding (of its roof)", "transformers static",
        "**speed-up**", "TriForce, A100", "repeated 8-grams",
    ]  # fmt: skip
    lines = []
    for row in found:
        plain, static = (row["baselines"].get(n) for n in ("autoregressive", "transformers-static"))
        paper = TRIFORCE.get((row["batch"], row["context"], row["temperature"]))
        lines.append(
            [
                row["shape"],
                f"{row['prompts']} x {row['batch']} x {row['context']:,}",
                f"{row['temperature']:g}",
                f"**{row['ms_per_token']:.2f}**",
                f"{plain['ms_per_token']:.2f} ({_percent(row['roof_ms'], plain['ms_per_token'])})"
                if plain
                else "",
                f"{static['ms_per_token']:.1f}" if static else "",
                f"**{row['speedup']:.2f}x**" if row["speedup"] else "",
                f"{paper:.2f}x" if paper and "llama-2-7b" in row["shape"] else "",
                f"{100 * row['repeated_8grams']:.0f} %",
            ]
        )
    return _table(columns, lines) + "\n" + _note(result, [p for p in HEADLINES if of_part(result, p)])


def levels(result: Record) -> str:
    """What each stage of a pass takes, beside its own roof."""
    found = [r for part in HEADLINES for r in of_part(result, part)]
    if not found:
        return _missing("7b")
    lines = []
    for row in found:
        where = f"{row['shape']}, {row['batch']} x {row['context']:,}, T={row['temperature']:g}"
        for name, stage in _by_stage(row):
            lines.append(
                [
                    where,
                    STAGES[name],
                    f"{stage['runs']:.2f}",
                    f"{stage['ms']:.2f}",
                    f"{stage['roof_ms']:.2f}",
                    _percent(stage["roof_ms"], stage["ms"]),
                    _percent(stage["runs"] * stage["ms"], row["pass_ms"]),
                ]
            )
            where = ""
        lines.append(["", "a pass, the host's part included", "", f"{row['pass_ms']:.2f}", "", "", ""])
    columns = ["", "level", "runs a pass", "ms a run", "roof", "of its roof", "share of the pass"]
    return _table(columns, lines)


def acceptance(result: Record) -> str:
    """How much each level takes over from the one below."""
    found = [r for part in HEADLINES for r in of_part(result, part)]
    if not found:
        return _missing("7b")
    columns = [
        "model", "batch x context", "T", "retrieval accepts", "tokens a pass of level 1", "target accepts",
        "tokens a pass of level 2", "passes of level 1 a pass of level 2", "greedy tokens compared",
        "ties", "failures",
    ]  # fmt: skip
    lines = []
    for row in found:
        rate, length, exact = row["acceptance"], row["mean_accepted_length"], row.get("exact")
        lines.append(
            [
                row["shape"],
                f"{row['batch']} x {row['context']:,}",
                f"{row['temperature']:g}",
                _number(rate.get("retrieval")),
                _number(length.get("retrieval")),
                _number(rate.get("target")),
                _number(length.get("target")),
                f"{row['rounds_per_pass']:.2f}",
                *([f"{exact[k]:,}" for k in ("compared", "ties", "failures")] if exact else [""] * 3),
            ]
        )
    return _table(columns, lines)


def costs(result: Record) -> str:
    """What is paid once: reading the prompts, capturing, memory."""
    found = [r for part in HEADLINES for r in of_part(result, part)]
    if not found:
        return _missing("7b")
    columns = [
        "model",
        "batch x context",
        "prefill, s",
        "compile and capture, s",
        "peak, GiB",
        "level 1, bits",
    ]
    lines = {
        (row["shape"], row["batch"], row["context"]): [
            row["shape"],
            f"{row['batch']} x {row['context']:,}",
            f"{row['prefill_seconds']:.1f}",
            f"{row['capture_seconds']:.0f}",
            f"{row['peak_gib']:.0f}",
            str(row["middle_bits"]),
        ]
        for row in found
    }
    return _table(columns, list(lines.values()))


def lengths(result: Record) -> str:
    """Speed-up by length of the prompt."""
    found = sorted(of_part(result, "lengths"), key=lambda r: (r["context"], r["temperature"]))
    if not found:
        return _missing("lengths")
    columns = ["context", "T", "budget", "ms/token", "plain", "speed-up", "tokens a pass", "repeated 8-grams"]
    lines = [
        [
            f"{row['context']:,}",
            f"{row['temperature']:g}",
            f"{row['config']['budget']:,}",
            f"{row['ms_per_token']:.2f}",
            _number(row["baseline_ms_per_token"]),
            _times(row["speedup"]),
            f"{row['tokens_per_pass']:.2f}",
            f"{100 * row['repeated_8grams']:.0f} %",
        ]
        for row in found
    ]
    return _table(columns, lines) + "\n" + _note(result, ["lengths"])


def outputs(result: Record) -> str:
    """Speed-up by length of the output."""
    found = sorted(of_part(result, "outputs"), key=lambda r: (r["temperature"], r["new_tokens"]))
    if not found:
        return _missing("outputs")
    columns = ["new tokens", "T", "ms/token", "speed-up", "repeated 8-grams"]
    lines = [
        [
            f"{row['new_tokens']:,}",
            f"{row['temperature']:g}",
            f"{row['ms_per_token']:.2f}",
            _times(row["speedup"]),
            f"{100 * row['repeated_8grams']:.0f} %",
        ]
        for row in found
    ]
    return _table(columns, lines) + "\n" + _note(result, ["outputs"])


def ablations_7b(result: Record) -> str:
    """One setting changed at a time, 7B."""
    return _ablations(result, "ablations-7b")


def ablations_8b(result: Record) -> str:
    """One setting changed at a time, 8B."""
    return _ablations(result, "ablations-8b")


def _ablations(result: Record, part: str) -> str:
    found = of_part(result, part)
    if not found:
        return _missing(part)
    columns = [
        "changed", "ms/token", "speed-up", "tokens a pass", "retrieval accepts", "target accepts", "rounds",
        "level 0, ms a pass", "level 1", "level 2",
    ]  # fmt: skip
    lines = []
    for row in found:
        spent = {name: s["runs"] * s["ms"] for name, s in _by_stage(row)}
        lines.append(
            [
                setting(row["setting"]),
                f"{row['ms_per_token']:.2f}",
                _times(row["speedup"]),
                f"{row['tokens_per_pass']:.2f}",
                _number(row["acceptance"].get("retrieval")),
                _number(row["acceptance"].get("target")),
                f"{row['rounds_per_pass']:.2f}",
                _number(spent.get("grow")),
                _number(sum(spent.get(name, 0.0) for name in _MIDDLE)),
                _number(spent.get("full")),
            ]
        )
    defaults = result["parts"][part]["settings"]["options"]
    default = ", ".join(f"{k}={v}" for k, v in defaults.items() if v is not None)
    return _table(columns, lines) + f"\nDefault: {default}. " + _note(result, [part])


def texts(result: Record) -> str:
    """The prompts, and what was left out."""
    parts = [p for p in HEADLINES if p in result["parts"]]
    names = dict.fromkeys(
        source for p in parts for sample in result["parts"][p]["samples"] for source in sample["sources"]
    )
    if not names:
        return _missing("7b")
    return "".join(f"- {name}\n" for name in names)


TABLES = (
    headline, levels, acceptance, costs, lengths, outputs, ablations_7b, ablations_8b, texts,
)  # fmt: skip


def of_part(result: Record, part: str) -> list[Record]:
    return [row for row in result["rows"] if row["part"] == part]


def _by_stage(row: Record) -> list[tuple[str, Record]]:
    return [(name, row["stages"][name]) for name in STAGES if name in row["stages"]]


def _missing(part: str) -> str:
    return f"Not measured yet: `python scripts/bench_on_chip.py --part {part}`.\n"


def _note(result: Record, parts: Sequence[str]) -> str:
    """Where the figures come from, and what could not be measured."""
    runs: dict[str, list[str]] = {}
    notes = []
    for name in parts:
        part = result["parts"][name]
        versions = part["versions"]
        run = (
            f"{part['hardware']}, read bandwidth {part['read_bandwidth'] / 1e12:.2f} TB/s measured in the "
            f"same run, torch {versions['torch']}, transformers {versions['transformers']}, engine "
            f"{part['settings']['engine']}, {part['date']}."
        )
        runs.setdefault(run, []).append(name)
        notes += [f"Not measured in {name}: {note}." for note in part["notes"]]
    lines = [f"{', '.join(names)}: {run}" for run, names in runs.items()]
    return " ".join([*lines, *notes]) + f" File: `docs/results/{FILE}`.\n"


def setting(change: Record) -> str:
    return ", ".join(f"{k}={v}" for k, v in change.items()) or "nothing"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "".join("| " + " | ".join(line) + " |\n" for line in (columns, rule, *rows))
