"""Tables of the speed of the embedded pair on a CPU."""

from scripts.benchmarks.common.markdown import Columns, Record, Table, cell, listing, noted
from triforce_tree.bench.baselines import METHODS, PLAIN_METHOD
from triforce_tree.bench.tables import grid

SPEED = "cpu_16k.jsonl"
_BY_TEMPERATURE: Columns = {
    "ms/token, T={t:g}": "?{ms_per_token:.1f}", "to transformers": "?{speedup_vs_best_baseline:.2f}x",
    "to our plain decoding": "?{gain:.2f}x", "repeated 8-grams": "?{repeated_8grams:pct}",
}  # fmt: skip
_SPEED_NOTE = (
    "{first[context]:,} prompt tokens, {first[new_tokens]} new ones, medians over {prompts} prompts, "
    "decode only; {hardware}, {threads} threads, fp32, torch {versions[torch]}, transformers "
    '{versions[transformers]}, commit {commit}. "To transformers": to the fastest of '
    'transformers-static, -dynamic and -assistant; "to our plain decoding": what drafting brings, without '
    "that of the kernels. "
)
ACCEPTANCE: Columns = {
    "method": "{method}", "temperature": "{temperature:g}",
    "acceptance": lambda row: ", ".join(f"{name} {value:.2f}" for name, value in row["acceptance"].items()),
}  # fmt: skip


def speed(content: Record) -> str:
    """Returns a line a method, four columns a temperature."""
    # Methods that are no longer measured have no line.
    rows = [row for row in content["rows"] if row["method"] in METHODS]
    plain = {r["temperature"]: r["ms_per_token"] for r in rows if r["method"] == PLAIN_METHOD}
    for r in rows:
        if r["temperature"] in plain:
            r["gain"] = plain[r["temperature"]] / r["ms_per_token"]
    found = {(r["method"], r["temperature"]): r for r in rows}
    columns = [(t, *column) for t in sorted({t for _, t in found}) for column in _BY_TEMPERATURE.items()]
    lines = [
        [method, *(cell(template, found.get((method, t), {})) for t, _, template in columns)]
        for method in dict.fromkeys(method for method, _ in found)
    ]
    note = noted(_SPEED_NOTE, SPEED)({**content, "first": rows[0]}, rows)
    return grid(["method", *(heading.format(t=t) for t, heading, _ in columns)], lines) + "\n" + note


_acceptance = listing(
    ACCEPTANCE, lambda content: [r for r in content["rows"] if r["acceptance"] and r["method"] in METHODS]
)
TABLES = {
    "cpu_16k": Table(SPEED, speed, "python -m scripts.benchmarks cpu"),
    "cpu_16k_acceptance": Table(SPEED, _acceptance, "python -m scripts.benchmarks cpu"),
}
