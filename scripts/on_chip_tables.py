"""Tables of docs/benchmarks.md from docs/results/on_chip_h200.json."""

from markdown_tables import Record, not_measured, number, origin, percent, rows_of, table

FILE = "on_chip_h200.json"
COMMAND = "python scripts/bench_on_chip.py --part"
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
    found = rows_of(result, *HEADLINES)
    if not found:
        return not_measured(f"{COMMAND} 7b")
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
                f"{plain['ms_per_token']:.2f} ({percent(row['roof_ms'], plain['ms_per_token'])})"
                if plain
                else "",
                f"{static['ms_per_token']:.1f}" if static else "",
                f"**{row['speedup']:.2f}x**" if row["speedup"] else "",
                f"{paper:.2f}x" if paper and "llama-2-7b" in row["shape"] else "",
                percent(row["repeated_8grams"]),
            ]
        )
    return table(columns, lines) + "\n" + _origin(result, found)


def levels(result: Record) -> str:
    """What each stage of a pass takes, beside its own roof."""
    found = rows_of(result, *HEADLINES)
    if not found:
        return not_measured(f"{COMMAND} 7b")
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
                    percent(stage["roof_ms"], stage["ms"]),
                    percent(stage["runs"] * stage["ms"], row["pass_ms"]),
                ]
            )
            where = ""
        lines.append(["", "a pass, the host's part included", "", f"{row['pass_ms']:.2f}", "", "", ""])
    columns = ["", "level", "runs a pass", "ms a run", "roof", "of its roof", "share of the pass"]
    return table(columns, lines)


def acceptance(result: Record) -> str:
    """How much each level takes over from the one below."""
    found = rows_of(result, *HEADLINES)
    if not found:
        return not_measured(f"{COMMAND} 7b")
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
                number(rate.get("retrieval")),
                number(length.get("retrieval")),
                number(rate.get("target")),
                number(length.get("target")),
                f"{row['rounds_per_pass']:.2f}",
                *([f"{exact[k]:,}" for k in ("compared", "ties", "failures")] if exact else [""] * 3),
            ]
        )
    return table(columns, lines)


def costs(result: Record) -> str:
    """What is paid once: reading the prompts, capturing, memory."""
    found = rows_of(result, *HEADLINES)
    if not found:
        return not_measured(f"{COMMAND} 7b")
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
    return table(columns, list(lines.values()))


def lengths(result: Record) -> str:
    """Speed-up by length of the prompt."""
    found = sorted(rows_of(result, "lengths"), key=lambda r: (r["context"], r["temperature"]))
    if not found:
        return not_measured(f"{COMMAND} lengths")
    columns = ["context", "T", "budget", "ms/token", "plain", "speed-up", "tokens a pass", "repeated 8-grams"]
    lines = [
        [
            f"{row['context']:,}",
            f"{row['temperature']:g}",
            f"{row['config']['budget']:,}",
            f"{row['ms_per_token']:.2f}",
            number(row["baseline_ms_per_token"]),
            number(row["speedup"], "x"),
            f"{row['tokens_per_pass']:.2f}",
            percent(row["repeated_8grams"]),
        ]
        for row in found
    ]
    return table(columns, lines) + "\n" + _origin(result, found)


def outputs(result: Record) -> str:
    """Speed-up by length of the output."""
    found = sorted(rows_of(result, "outputs"), key=lambda r: (r["temperature"], r["new_tokens"]))
    if not found:
        return not_measured(f"{COMMAND} outputs")
    columns = ["new tokens", "T", "ms/token", "speed-up", "repeated 8-grams"]
    lines = [
        [
            f"{row['new_tokens']:,}",
            f"{row['temperature']:g}",
            f"{row['ms_per_token']:.2f}",
            number(row["speedup"], "x"),
            percent(row["repeated_8grams"]),
        ]
        for row in found
    ]
    return table(columns, lines) + "\n" + _origin(result, found)


def ablations_7b(result: Record) -> str:
    """One setting changed at a time, 7B."""
    return _ablations(result, "ablations-7b")


def ablations_8b(result: Record) -> str:
    """One setting changed at a time, 8B."""
    return _ablations(result, "ablations-8b")


def _ablations(result: Record, part: str) -> str:
    found = rows_of(result, part)
    if not found:
        return not_measured(f"{COMMAND} {part}")
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
                number(row["speedup"], "x"),
                f"{row['tokens_per_pass']:.2f}",
                number(row["acceptance"].get("retrieval")),
                number(row["acceptance"].get("target")),
                f"{row['rounds_per_pass']:.2f}",
                number(spent.get("grow")),
                number(sum(spent.get(name, 0.0) for name in _MIDDLE)),
                number(spent.get("full")),
            ]
        )
    defaults = result["parts"][part]["settings"]["options"]
    default = ", ".join(f"{k}={v}" for k, v in defaults.items() if v is not None)
    return table(columns, lines) + f"\nDefault: {default}. " + _origin(result, found)


def texts(result: Record) -> str:
    """The prompts, and what was left out."""
    parts = [p for p in HEADLINES if p in result["parts"]]
    names = dict.fromkeys(
        source for p in parts for sample in result["parts"][p]["samples"] for source in sample["sources"]
    )
    if not names:
        return not_measured(f"{COMMAND} 7b")
    return "".join(f"- {name}\n" for name in names)


TABLES = (
    headline, levels, acceptance, costs, lengths, outputs, ablations_7b, ablations_8b, texts,
)  # fmt: skip


def _by_stage(row: Record) -> list[tuple[str, Record]]:
    return [(name, row["stages"][name]) for name in STAGES if name in row["stages"]]


def _origin(result: Record, rows: list[Record]) -> str:
    return origin(result, rows, FILE, _bandwidth, noted="Not measured in")


def _bandwidth(part: Record) -> str:
    return f"read bandwidth {part['read_bandwidth'] / 1e12:.2f} TB/s measured in the same run"


def setting(change: Record) -> str:
    return ", ".join(f"{k}={v}" for k, v in change.items()) or "nothing"
