"""Tables of README.md about the embedded pair on a CPU, and of docs/offloading.md about attention there."""

from collections.abc import Callable
from functools import partial

from scripts.benchmarks.common.markdown import Columns, Record, Table, cell, file_note, grid, table

SPEED, PAIR = "cpu_16k.json", "pair.json"
FILE, XEON = "host_attention_h200.json", "host_attention_xeon.json"
EPYC, AVX2 = "host_attention_epyc.json", "host_attention_epyc_avx2.json"
COMMAND = "python -m scripts.benchmarks host_attention"
_OLD = "on AVX2"
# Bytes a second of PCIe 4 with 16 lanes, as docs/offloading.md takes it for its projections.
_PCIE_4_GBPS = 25.0
_BY_TEMPERATURE: Columns = {
    "ms/token, T={t:g}": "?{ms_per_token:.1f}", "speed-up": "?{speedup_vs_best_baseline:.2f}x",
    "repeated 8-grams": "?{repeated_8grams:pct}",
}  # fmt: skip
_SPEED_NOTE = (
    "{first[context]:,} prompt tokens, {first[new_tokens]} new ones, medians over {prompts} prompts, "
    "decode only; {hardware}, {threads} threads, fp32, torch {versions[torch]}, transformers "
    "{versions[transformers]}, commit {commit}. Speed-up against the fastest of transformers-static, "
    "-dynamic and -assistant. "
)
ACCEPTANCE: Columns = {
    "method": "{method}", "temperature": "{temperature:g}",
    "acceptance": lambda row: ", ".join(f"{name} {value:.2f}" for name, value in row["acceptance"].items()),
}  # fmt: skip


def speed(content: Record) -> str:
    """A line a method, three columns a temperature."""
    rows = content["rows"]
    temperatures = sorted({r["temperature"] for r in rows})
    found = {(r["method"], r["temperature"]): r for r in rows}
    lines = [
        [
            method,
            *(cell(c, found.get((method, t), {})) for t in temperatures for c in _BY_TEMPERATURE.values()),
        ]
        for method in dict.fromkeys(r["method"] for r in rows)
    ]
    columns = ["method", *(heading.format(t=t) for t in temperatures for heading in _BY_TEMPERATURE)]
    note = cell(_SPEED_NOTE, {**content, "first": rows[0]})
    return grid(columns, lines) + "\n" + note + file_note(SPEED, {"": content})


def acceptance(content: Record) -> str:
    return table(ACCEPTANCE, [row for row in content["rows"] if row["acceptance"]])


def pair(content: Record) -> str:
    needles = sorted(content.get("needle", {}).items(), key=lambda item: int(item[0]))
    lines = [[f"needle, {int(length):,} tokens (exact, greedy)", f"{share:.2f}"] for length, share in needles]
    if "loss_16k" in content:
        lines.append(["loss at 16K of context, nats a token", f"{content['loss_16k']:.3f}"])
    if "draft_overlap" in content:
        lines.append(["draft against target, mean sum of min(p, q)", f"{content['draft_overlap']:.3f}"])
    for name, share in content.get("retrieval_overlap", {}).items():
        context, _, budget = name.partition("/")
        what = f"retrieval against full cache, {int(context):,} tokens, budget {int(budget):,}"
        lines.append([what, f"{share:.3f}"])
    return grid(["embedded pair, held-out text", "figure"], lines)


def ways(content: Record) -> str:
    """GB of keys and values a second, of every way."""
    rows = content["rows"]
    columns = list(dict.fromkeys((row["way"], row["spread"]) for row in rows))
    lines = []
    for place, here in _places(rows).items():
        found = {(row["way"], row["spread"]): row["gbps"] for row in here}
        best = max((gbps for gbps in found.values() if gbps), default=None)
        lines.append([*place, *(_number(found.get(column), best) for column in columns)])
    cpu, reads = content["cpu"], dict[int, float]()
    for row in content["reading"]:
        reads[row["threads"]] = max(row["gbps"], reads.get(row["threads"], 0.0))
    told = " and ".join(f"{_number(gbps)} GB/s with {threads}" for threads, gbps in reads.items())
    note = (
        f"{cpu['model']}, {cpu['cores']} of {cpu['cores_of_machine']} cores, {', '.join(cpu['flags'])}; "
        f"plain reading of the same memory {told} threads. Medians of {content['times']}. "
        f"{content['hardware']}, torch {content['versions']['torch']}, {content['date']}. "
    )
    head = ["heads", "T", "threads", *(f"{way}, {spread}" for way, spread in columns)]
    return grid(head, lines) + "\n" + note + file_note(FILE, {"": content})


TOGETHER: Columns = {
    "heads": "{shape}", "T": "{t}", "way": "{way}", "CPU alone, GB/s": "{cpu_alone_gbps:.1f}",
    "CPU beside the bus": "{cpu_gbps:.1f}", "bus beside the CPU": "{bus_gbps:.1f}",
    "**both to the bus alone**": "**{gain:.2f}x**",
    f"projected for a bus of {_PCIE_4_GBPS:g} GB/s, not measured": "{projected:.2f}x",
}  # fmt: skip


_TOGETHER_NOTE = (
    "{threads} threads. The bus alone: {bus_gbps:.1f} GB/s; beside plain reading at {reading[cpu_gbps]:.1f} "
    "GB/s: {reading[bus_gbps]:.1f} GB/s. The projection adds up both bandwidths as they are alone; nobody "
    "has measured it.\n"
)


def together(content: Record) -> str:
    """What the CPU adds to the bus while both work."""
    both = content["together"]
    rows, alone = both["attention"], both["bus_gbps"]
    for row in rows:
        row["gain"] = (row["cpu_gbps"] + row["bus_gbps"]) / alone
        row["projected"] = 1 + row["cpu_alone_gbps"] / _PCIE_4_GBPS
    note = cell(_TOGETHER_NOTE, {**both, "threads": rows[0]["threads"] if rows else 0})
    return table(TOGETHER, rows) + "\n" + note


def ratios(content: Record, file: str, shown: Callable[[str], bool]) -> str:
    """Our kernel to the fastest of torch, where cores are shared and GB a second mean nothing."""
    rows = [row for row in content["rows"] if row["gbps"]]
    ours = list(
        dict.fromkeys(row["spread"] for row in rows if row["way"] == "our kernel" and shown(row["spread"]))
    )
    lines = []
    for place, here in _places(rows).items():
        torchs = max((row for row in here if row["way"] != "our kernel"), key=lambda row: row["gbps"])
        found = {row["spread"]: row["gbps"] / torchs["gbps"] for row in here if row["way"] == "our kernel"}
        told = f"{torchs['way']}, {torchs['spread']}"
        lines.append([*place, told, *(f"{found[name]:.1f}x" for name in ours)])
    head = ["heads", "T", "threads", "fastest of torch = 1", *(f"our kernel, {name}" for name in ours)]
    cpu = content["cpu"]
    held = "".join(f", {name}={value}" for name, value in content.get("torch_held_to", {}).items())
    note = (
        f"{cpu['model']}, {cpu['cores']} cores, {', '.join(cpu['flags'])}{held}. Medians of "
        f"{content['times']}, torch {content['versions']['torch']}, {content['date']}. "
    )
    return grid(head, lines) + "\n" + note + file_note(file, {"": content})


def _places(rows: list[Record]) -> dict[tuple[str, str, str], list[Record]]:
    found: dict[tuple[str, str, str], list[Record]] = {}
    for row in rows:
        found.setdefault((row["shape"], str(row["t"]), str(row["threads"])), []).append(row)
    return found


def _number(value: float | None, best: float | None = None) -> str:
    """Nothing where a way was wrong or does not exist."""
    if value is None:
        return ""
    return f"**{value:.1f}**" if value == best else f"{value:.1f}"


# By the name of its table: a file, and the ways of our kernel that it shows. Torch held to AVX2 stands for
# processors without AVX-512.
_RATIOS: dict[str, tuple[str, Callable[[str], bool], str]] = {
    "host_ratios_xeon": (XEON, lambda name: True, COMMAND),
    "host_ratios": (EPYC, lambda name: name != _OLD, COMMAND),
    "host_ratios_avx2": (
        AVX2, lambda name: name == _OLD, f"ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 {COMMAND}"
    ),
}  # fmt: skip
TABLES = {
    "cpu_16k": Table(SPEED, speed, "python -m scripts.benchmarks cpu"),
    "cpu_16k_acceptance": Table(SPEED, acceptance, "python -m scripts.benchmarks cpu"),
    "pair": Table(PAIR, pair, "python -m scripts.train_pair.evaluate"),
    "host_ways": Table(FILE, ways, COMMAND),
    "host_together": Table(FILE, together, COMMAND),
    **{
        name: Table(file, partial(ratios, file=file, shown=shown), f"{command} --out docs/results/{file}")
        for name, (file, shown, command) in _RATIOS.items()
    },
}
