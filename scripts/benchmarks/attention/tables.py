"""Tables of docs/kernel.md about tree attention, and about other GPUs than the measured one."""

from statistics import median

from scripts.benchmarks.common.markdown import Columns, Record, Table, cell, file_note, grid, made_on, table

FILE, ARCHIVE = "tree_attention_h200.json", "tree_attention_archive_h200.json"
FITS, TILES = "kernels_by_arch.json", "tiles_h200.json"
COMMAND = "python -m scripts.benchmarks tree_attention --out docs/results"
SHORT = {
    "SDPA dense mask": "SDPA", "FlexAttention": "Flex", "FlashInfer fa2 full mask": "FI full mask",
    "FlashInfer fa2 cascade": "FI cascade", "FlashInfer XQA": "FI XQA", "FlashInfer decode": "FI decode",
}  # fmt: skip
# The aims, in microseconds: (query heads, KV heads, prefix, tree) of one sequence.
AIMS = {
    (32, 32, 122880, 16): 470, (32, 32, 122880, 64): 480, (32, 8, 122880, 1): 122, (32, 8, 122880, 16): 127,
    (32, 8, 122880, 64): 250, (32, 8, 32768, 16): 40, (32, 8, 32768, 64): 70, (32, 32, 4096, 16): 19,
    (32, 8, 4096, 64): 14,
}  # fmt: skip
CARDS = {
    "sm_80": "A100", "sm_86": "RTX 3090", "sm_89": "RTX 4090", "sm_90": "H100, H200", "sm_100": "B200",
    "sm_120": "RTX 5090", "gfx90a": "MI250X", "gfx942": "MI300X", "gfx1100": "RX 7900 XTX",
}  # fmt: skip

CELLS: Columns = {
    "Hq/Hkv": "{hq}/{hkv}", "L": "{l:,}", "T": "{t}", "batch": "{batch}",
    "**ours**": lambda row: f"**{_us(row['ours_us'])}**", "roof": lambda row: _us(row["roof_us"]),
    "% of roof": "{percent_of_roof:.0f}", "best peer / ours": lambda row: (
    f"{min(row['peers'].values()) / row['ours_us']:.2f}" if row["peers"] else "-" ),
    "error": "{error_ratio:.2f}",
}  # fmt: skip
_NOTE = (
    "{gpu}, torch {torch}, Triton {triton}{ours}; read bandwidth {ceilings[read_bandwidth]:tera} TB/s, bf16 "
    "matmul {teraflops:.0f} TFLOP/s, measured in the same run. "
)
FITTING: Columns = {
    "architecture": "{arch}", "such as": "{card}", "kernels compiled": "{compiled}",
    "shared memory of a block": "{limit_bytes:,}", "most asked for": "{shared_bytes:,}",
    "spill over 64 B": "{spilling}", "worst spill of a thread, bytes": "{worst}",
}  # fmt: skip


_FITTED = (
    "Every variant of `scripts/checks/kernel_variants.py`, compiled ahead of time by Triton {triton} and its "
    "assembler; of these cards only sm_90 has run them. Commit {commit}, {date}. "
)


def _us(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def cells(content: Record) -> str:
    """Every cell beside its peers, and under what conditions."""
    rows = content["rows"]
    names = [name for name in SHORT if any(name in row["peers"] for row in rows)]
    peers: Columns = {SHORT[name]: lambda row, name=name: _us(row["peers"].get(name)) for name in names}
    slower = sum(min(row["peers"].values(), default=row["ours_us"]) < row["ours_us"] for row in rows)
    ahead = f"In {slower} of {len(rows)} cells a peer is faster. "
    facts = {**content, "teraflops": content["ceilings"]["matmul_rate"] / 1e12}
    facts["ours"] = f", FlashInfer {content['flashinfer']}" if content.get("flashinfer") else ""
    note = cell(_NOTE, facts) + (ahead if slower else "Ours is ahead of every peer measured in every cell. ")
    return table({**CELLS, **peers}, rows) + "\n" + note + file_note(FILE, {"": content})


def aims(content: Record) -> str:
    """What was aimed for and what was reached, with the fastest peer of the same run."""
    lines = []
    for row in content["rows"]:
        aim = AIMS.get((row["hq"], row["hkv"], row["l"], row["t"]))
        if aim is None or row["batch"] > 1:
            continue
        ours = row["ours_us"]
        peer = min(row["peers"], key=row["peers"].__getitem__)
        place = f"{row['hq']}/{row['hkv']}, L = {row['l']:,}, T = {row['t']}"
        verdict = "yes" if ours <= aim else f"missed by {100 * (ours / aim - 1):.0f}%"
        longer = f"{peer}: {100 * (row['peers'][peer] / ours - 1):+.0f}%"
        lines.append([place, str(aim), _us(ours), verdict, longer])
    return grid(["cell", "aim", "ours", "reached", "fastest peer, time against ours"], lines)


def layouts(content: Record) -> str:
    made: dict[str, dict[str, float]] = {}
    for row in content["layouts"]:
        made.setdefault(row["layout"], {})[row["cell"].partition(" ")[2]] = row["us"]
    heads = {"heads": "`[H, S, D]`", "rows": "`[S, H, D]`"}
    sizes = list(dict.fromkeys(place for found in made.values() for place in found))
    lines = [
        [heads.get(name, name.replace("page", "pages of")), *(_us(found.get(place)) for place in sizes)]
        for name, found in made.items()
    ]
    return grid(["layout", *sizes], lines)


def gate(content: Record) -> str:
    found, every = content["gate"], content["gate"]["replays"]
    lines = [
        ["cases checked / failed", f"{found['cases']} / {len(found['failed'])}"],
        ["worst error in 16 bits, times torch's", str(found.get("worst_error_ratio", "-"))],
        ["worst error in fp32, times torch's", str(found.get("worst_error_ratio_fp32", "-"))],
        ["graph replays / elements that differ", f"{every['replays']:,} / {every['different_elements']}"],
    ]
    return grid(["gate", "of the same run"], lines)


def splits(content: Record) -> str:
    """Microseconds of tree-shaped KV, and in brackets milliseconds of the host's plan."""
    names = list(dict.fromkeys(name for row in content["splits"] for name in row["us"]))

    def took(row: Record, name: str) -> str:
        plan = row["plan_ms"].get(name)
        return _us(row["us"].get(name)) + (f" ({plan:,.1f})" if plan is not None else "")

    lines = [
        [row["tree"], _us(row["roof_us"]), *(took(row, name) for name in names)] for row in content["splits"]
    ]
    return grid(["tree", "roof (KV once)", *names], lines)


def costs(content: Record) -> str:
    """What a plan cost the host, and the bytes it counted beside those of the hardware."""
    plan = content["plan"]
    names = (
        "plan a tree of 64, host",
        "update of mask and lengths from host tensors",
        "update from device tensors",
    )
    keys = ("plan_us", "update_from_host_us", "update_from_device_us")
    lines = [[name, f"{plan[key]:.0f} µs"] for name, key in zip(names, keys, strict=True)]
    for row in content["counters"]:
        sizes = (row["counted_kv_and_queries"], row["dram_bytes_read"], row["l2_bytes"])
        megabytes = " / ".join(f"{size / 1e6:.1f}" for size in sizes)
        lines.append([f"{row['cell']}: bytes counted / read from memory / through L2", f"{megabytes} MB"])
    return grid(["", "measured"], lines)


def fits(content: Record) -> str:
    """By architecture: how many kernels compile, the most shared memory, the most spilled bytes."""
    rows = []
    for arch in content["choices"]:
        kernels = [row for row in content["kernels"] if row["arch"] == arch]
        spills = [(size, k["kernel"], name) for k in kernels for name, size in k["spills"].items()]
        size, kernel, name = max(spills, key=lambda spill: spill[0], default=(0, "", ""))
        row = {"arch": arch, "card": CARDS[arch], "compiled": sum(k["compiled"] for k in kernels)}
        row |= {key: max(k[key] for k in kernels) for key in ("limit_bytes", "shared_bytes")}
        worst = f"{size:,} ({kernel.strip('_')}, {name})" if spills else "-"
        rows.append(row | {"spilling": len(spills), "worst": worst})
    return table(FITTING, rows, left=2) + "\n" + cell(_FITTED, content) + file_note(FITS, {"": content})


def tiles(content: Record) -> str:
    """Microseconds with the tiles of other GPUs, as a multiple of those with this one's own."""
    found = {(row["cell"], row["device"]): row for row in content["rows"]}
    places = list(dict.fromkeys(place for place, _ in found))
    others = list(dict.fromkeys(device for _, device in found if device != "own"))
    lines = [
        [place, f"{found[place, 'own']['us']:.1f}"]
        + [f"{found[place, other]['times_own']:.2f}x" for other in others]
        for place in places
    ]
    middle = [median(found[place, other]["times_own"] for place in places) for other in others]
    lines.append(["median", "", *(f"**{ratio:.2f}x**" for ratio in middle)])
    columns = ["kernel", "own tiles, us", *(f"as {other} ({CARDS[other]})" for other in others)]
    note = "Measured on an H200 that was told to be these cards; times on the cards themselves are unknown. "
    return grid(columns, lines) + "\n" + note + made_on(content, TILES)


_ARCHIVED = "git show fcfaa8f:scripts/bench_tree_attention.py"
TABLES = {
    **{
        f"tree_attention_{make.__name__}": Table(FILE, make, COMMAND) for make in (cells, aims, layouts, gate)
    },
    **{f"tree_attention_{make.__name__}": Table(ARCHIVE, make, _ARCHIVED) for make in (splits, costs)},
    "kernels_by_arch": Table(FITS, fits, "python -m scripts.checks.kernels_by_arch"),
    "tiles": Table(TILES, tiles, "git show ccf3726a5483:scripts/bench_tiles.py"),
}
