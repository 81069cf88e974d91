"""Tables about the embedded pair on a CPU."""

from scripts.benchmarks.common.markdown import Columns, Record, Table, cell, listing, noted
from triforce_tree.bench.baselines import METHODS, PLAIN_METHOD
from triforce_tree.bench.tables import grid

SPEED, PAIR, PREFILL = "cpu_16k.jsonl", "pair.jsonl", "cpu_prefill.jsonl"
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
CPU_PREFILL: Columns = {
    "dtype": "{dtype}", "prompt, tokens": "{context:,}", "ours, s": "{wall[ours]:.2f}",
    "transformers, s": "{wall[transformers]:.2f}", "**speed-up**": "**{wall[speedup]:.2f}x**",
    "lowest to highest": "{wall[lowest]:.2f}x to {wall[highest]:.2f}x",
    "by seconds of the process": "{process[speedup]:.2f}x",
}  # fmt: skip
_PREFILL_NOTE = (
    "The embedded target; {hardware}, {threads} threads, torch {versions[torch]}, transformers "
    "{versions[transformers]} with sdpa, medians of pairs in turns. "
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


def _pair(content: Record) -> list[Record]:
    needles = sorted(content.get("needle", {}).items(), key=lambda item: int(item[0]))
    told = {f"needle, {int(n):,} tokens (exact, greedy)": f"{share:.2f}" for n, share in needles}
    if "loss_16k" in content:
        told["loss at 16K of context, nats a token"] = f"{content['loss_16k']:.3f}"
    if "draft_overlap" in content:
        told["draft against target, mean sum of min(p, q)"] = f"{content['draft_overlap']:.3f}"
    for name, share in content.get("retrieval_overlap", {}).items():
        context, _, budget = name.partition("/")
        what = f"retrieval against full cache, {int(context):,} tokens, budget {int(budget):,}"
        told[what] = f"{share:.3f}"
    return [{"what": what, "figure": figure} for what, figure in told.items()]


_acceptance = listing(
    ACCEPTANCE, lambda content: [r for r in content["rows"] if r["acceptance"] and r["method"] in METHODS]
)
_figures = listing({"embedded pair, held-out text": "{what}", "figure": "{figure}"}, _pair)
TABLES = {
    "cpu_16k": Table(SPEED, speed, "python -m scripts.benchmarks cpu"),
    "cpu_16k_acceptance": Table(SPEED, _acceptance, "python -m scripts.benchmarks cpu"),
    "cpu_prefill": Table(
        PREFILL,
        listing(CPU_PREFILL, caption=noted(_PREFILL_NOTE, PREFILL)),
        "python -m scripts.benchmarks cpu_prefill",
    ),
    "pair": Table(PAIR, _figures, "python -m scripts.train_pair.evaluate"),
}
