"""Tables of docs/cpu.md about the embedded pair on a CPU, and of docs/host_attention.md."""

from collections.abc import Callable, Sequence
from typing import Any

from scripts.benchmarks.common.markdown import Columns, Record, Table, cell, grid, listing, noted
from triforce_tree.eval.baselines import PLAIN_METHOD, labelled

SPEED, PAIR, PREFILL = "cpu_16k.json", "pair.json", "cpu_prefill.json"
FILE, XEON = "host_attention_h200.json", "host_attention_xeon.json"
EPYC, AVX2 = "host_attention_epyc.json", "host_attention_epyc_avx2.json"
COMMAND = "python -m scripts.benchmarks host_attention"
_OLD = "on AVX2"
# Bytes a second of PCIe 4 with 16 lanes, as docs/host_attention.md takes it for its projections.
_PCIE_4_GBPS = 25.0
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
    """A line a method, four columns a temperature."""
    rows = content["rows"]
    plain = {r["temperature"]: r["ms_per_token"] for r in rows if r["method"] == PLAIN_METHOD}
    for r in rows:
        if r["temperature"] in plain:
            r["gain"] = plain[r["temperature"]] / r["ms_per_token"]
    found = {(r["method"], r["temperature"]): r for r in rows}
    columns = [(t, *column) for t in sorted({t for _, t in found}) for column in _BY_TEMPERATURE.items()]
    lines = [
        [labelled(method), *(cell(template, found.get((method, t), {})) for t, _, template in columns)]
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


def _by_way(content: Record) -> list[Record]:
    """A row for each shape, T and number of threads, with the GB/s of every way that was right."""
    found: dict[tuple[Any, ...], Record] = {}
    for row in content["rows"]:
        place = {name: row[name] for name in ("shape", "t", "threads")}
        here = found.setdefault(tuple(place.values()), place | {"gbps": {}})
        here["gbps"] |= {(row["way"], row["spread"]): row["gbps"]} if row["gbps"] else {}
    return list(found.values())


def _ways(content: Record) -> Columns:
    """GB of keys and values a second, of every way; nothing where a way was wrong or does not exist."""

    def figure(row: Record, way: tuple[str, str]) -> str:
        best = max(row["gbps"].values(), default=None)
        gbps = row["gbps"].get(way)
        return "" if gbps is None else f"**{gbps:.1f}**" if gbps == best else f"{gbps:.1f}"

    ways = dict.fromkeys((row["way"], row["spread"]) for row in content["rows"])
    return _PLACE | {", ".join(way): lambda row, way=way: figure(row, way) for way in ways}


def _ways_note(content: Record, rows: Sequence[Record]) -> str:
    cpu, reads = content["cpu"], dict[int, float]()
    for row in content["reading"]:
        reads[row["threads"]] = max(row["gbps"], reads.get(row["threads"], 0.0))
    told = " and ".join(f"{gbps:.1f} GB/s with {threads}" for threads, gbps in reads.items())
    note = (
        f"{cpu['model']}, {cpu['cores']} of {cpu['cores_of_machine']} cores, {', '.join(cpu['flags'])}; "
        f"plain reading of the same memory {told} threads. Medians of {content['times']}. "
    )
    return note + noted("{hardware}, torch {versions[torch]}, {date}. ", FILE)(content, rows)


_PLACE: Columns = {"heads": "{shape}", "T": "{t}", "threads": "{threads}"}
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


def _together(content: Record) -> list[Record]:
    """What the CPU adds to the bus while both work."""
    rows = []
    for row in content["together"]["attention"]:
        gain = (row["cpu_gbps"] + row["bus_gbps"]) / content["together"]["bus_gbps"]
        rows.append(row | {"gain": gain, "projected": 1 + row["cpu_alone_gbps"] / _PCIE_4_GBPS})
    return rows


def _together_note(content: Record, rows: Sequence[Record]) -> str:
    return cell(_TOGETHER_NOTE, {**content["together"], "threads": rows[0]["threads"]})


def ratios(file: str, shown: Callable[[str], bool]) -> Callable[[Record], str | None]:
    """Our kernel to the fastest of torch, where cores are shared and GB a second mean nothing."""

    def rows(content: Record) -> list[Record]:
        found = _by_way(content)
        for row in found:
            torchs = {way: gbps for way, gbps in row["gbps"].items() if way[0] != "our kernel"}
            row["torch"] = max(torchs, key=lambda way: torchs[way])
            row["ratio"] = {way: gbps / torchs[row["torch"]] for way, gbps in row["gbps"].items()}
        return found

    def columns(content: Record) -> Columns:
        ways = dict.fromkeys((row["way"], row["spread"]) for row in content["rows"] if row["gbps"])
        ours = {
            ", ".join(way): lambda row, way=way: f"{row['ratio'][way]:.1f}x"
            for way in ways
            if way[0] == "our kernel" and shown(way[1])
        }
        return {**_PLACE, "fastest of torch = 1": lambda row: ", ".join(row["torch"]), **ours}

    def note(content: Record, rows: Sequence[Record]) -> str:
        cpu = content["cpu"]
        held = "".join(f", {name}={value}" for name, value in content.get("torch_held_to", {}).items())
        machine = f"{cpu['model']}, {cpu['cores']} cores, {', '.join(cpu['flags'])}{held}. "
        return machine + noted("Medians of {times}, torch {versions[torch]}, {date}. ", file)(content, rows)

    return listing(columns, rows, note)


# By the name of its table: a file, and the ways of our kernel that it shows. Torch held to AVX2 stands for
# processors without AVX-512.
_RATIOS: dict[str, tuple[str, Callable[[str], bool], str]] = {
    "host_ratios_xeon": (XEON, lambda name: True, COMMAND),
    "host_ratios": (EPYC, lambda name: name != _OLD, COMMAND),
    "host_ratios_avx2": (
        AVX2, lambda name: name == _OLD, f"ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 {COMMAND}"
    ),
}  # fmt: skip
_acceptance = listing(ACCEPTANCE, lambda content: [row for row in content["rows"] if row["acceptance"]])
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
    "host_ways": Table(FILE, listing(_ways, _by_way, _ways_note), COMMAND),
    "host_together": Table(FILE, listing(TOGETHER, _together, _together_note), COMMAND),
    **{
        name: Table(file, ratios(file, shown), f"{command} --out docs/results/{file}")
        for name, (file, shown, command) in _RATIOS.items()
    },
}
