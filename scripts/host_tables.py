"""Tables of docs/offloading.md from the results of scripts/host_attention.py."""

from collections.abc import Callable

from markdown_tables import Record, table

FILE = "host_attention_h200.json"
XEON_FILE = "host_attention_xeon.json"
EPYC_FILE, AVX2_FILE = "host_attention_epyc.json", "host_attention_epyc_avx2.json"
COMMAND = "python scripts/host_attention.py"
XEON_COMMAND = f"{COMMAND} --out docs/results/{XEON_FILE}"
EPYC_COMMAND = f"{COMMAND} --out docs/results/{EPYC_FILE}"
AVX2_COMMAND = f"ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 {COMMAND} --out docs/results/{AVX2_FILE}"
_OLD = "on AVX2"
# Bytes a second of PCIe 4 with 16 lanes, as docs/offloading.md takes it for its projections.
_PCIE_4_GBPS = 25.0


def ways(result: Record) -> str:
    """GB of keys and values a second, of every way."""
    rows = result["rows"]
    columns = list(dict.fromkeys((row["way"], row["spread"]) for row in rows))
    lines = []
    for place in dict.fromkeys((row["shape"], row["t"], row["threads"]) for row in rows):
        here = [row for row in rows if (row["shape"], row["t"], row["threads"]) == place]
        found = {(row["way"], row["spread"]): row["gbps"] for row in here}
        best = max((gbps for gbps in found.values() if gbps), default=None)
        lines.append([*map(str, place), *(_number(found.get(column), best) for column in columns)])
    head = ["heads", "T", "threads", *(f"{way}, {spread}" for way, spread in columns)]
    return table(head, lines) + "\n" + _note(result)


def together(result: Record) -> str:
    """What the CPU adds to the bus while both work."""
    both = result["together"]
    alone = both["bus_gbps"]
    lines = [
        [
            row["shape"],
            str(row["t"]),
            row["way"],
            _number(row["cpu_alone_gbps"]),
            _number(row["cpu_gbps"]),
            _number(row["bus_gbps"]),
            f"**{(row['cpu_gbps'] + row['bus_gbps']) / alone:.2f}x**",
            f"{1 + row['cpu_alone_gbps'] / _PCIE_4_GBPS:.2f}x",
        ]
        for row in both["attention"]
    ]
    columns = [
        "heads", "T", "way", "CPU alone, GB/s", "CPU beside the bus", "bus beside the CPU",
        "**both to the bus alone**", f"projected for a bus of {_PCIE_4_GBPS:g} GB/s, not measured",
    ]  # fmt: skip
    read = both["reading"]
    note = (
        f"{both['attention'][0]['threads'] if both['attention'] else 0} threads. The bus alone: "
        f"{_number(alone)} GB/s; beside plain reading at {_number(read['cpu_gbps'])} GB/s: "
        f"{_number(read['bus_gbps'])} GB/s. The projection adds up both bandwidths as they are alone; nobody "
        "has measured it.\n"
    )
    return table(columns, lines) + "\n" + note


TABLES = (ways, together)


def ratios_xeon(result: Record) -> str:
    """All ways of a processor that has them."""
    return _ratios(result, XEON_FILE, lambda name: True)


def ratios(result: Record) -> str:
    """Our kernel to the fastest of torch, where cores are shared and GB a second mean nothing."""
    return _ratios(result, EPYC_FILE, lambda name: name != _OLD)


def ratios_avx2(result: Record) -> str:
    """The same for processors without AVX-512, where torch has been held to AVX2."""
    return _ratios(result, AVX2_FILE, lambda name: name == _OLD)


def _ratios(result: Record, file: str, shown: Callable[[str], bool]) -> str:
    rows = [row for row in result["rows"] if row["gbps"]]
    ours = list(dict.fromkeys(row["spread"] for row in rows if row["way"] == "our kernel"))
    ours = [name for name in ours if shown(name)]
    lines = []
    for place in dict.fromkeys((row["shape"], row["t"], row["threads"]) for row in rows):
        here = [row for row in rows if (row["shape"], row["t"], row["threads"]) == place]
        torchs = max((row for row in here if row["way"] != "our kernel"), key=lambda row: row["gbps"])
        found = {row["spread"]: row["gbps"] / torchs["gbps"] for row in here if row["way"] == "our kernel"}
        told = f"{torchs['way']}, {torchs['spread']}"
        lines.append([*map(str, place), told, *(f"{found[name]:.1f}x" for name in ours)])
    head = ["heads", "T", "threads", "fastest of torch = 1", *(f"our kernel, {name}" for name in ours)]
    cpu = result["cpu"]
    held = "".join(f", {name}={value}" for name, value in result.get("torch_held_to", {}).items())
    return table(head, lines) + (
        f"\n{cpu['model']}, {cpu['cores']} cores, {', '.join(cpu['flags'])}{held}. Medians of "
        f"{result['times']}, torch {result['versions']['torch']}, {result['date']}. File: "
        f"`docs/results/{file}`.\n"
    )


def _note(result: Record) -> str:
    cpu, versions = result["cpu"], result["versions"]
    reads: dict[int, float] = {}
    for row in result["reading"]:
        reads[row["threads"]] = max(row["gbps"], reads.get(row["threads"], 0.0))
    told = " and ".join(f"{_number(gbps)} GB/s with {threads}" for threads, gbps in reads.items())
    return (
        f"{cpu['model']}, {cpu['cores']} of {cpu['cores_of_machine']} cores, {', '.join(cpu['flags'])}; "
        f"plain reading of the same memory {told} threads. Medians of {result['times']}. "
        f"{result['hardware']}, torch {versions['torch']}, {result['date']}. File: `docs/results/{FILE}`.\n"
    )


def _number(value: float | None, best: float | None = None) -> str:
    """Nothing where a way was wrong or does not exist."""
    if value is None:
        return ""
    return f"**{value:.1f}**" if value == best else f"{value:.1f}"
