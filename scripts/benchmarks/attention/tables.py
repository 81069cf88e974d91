"""Tables of docs/results/kernels.md about tree attention, and about other GPUs than the measured one."""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import Columns, Record, Table, cell, file_note, listing, noted, us

FILE, FITS = "tree_attention_h200.jsonl", "kernels_by_arch.jsonl"
COMMAND = "python -m scripts.benchmarks tree_attention --out docs/results"
SHORT = {
    "SDPA dense mask": "SDPA", "FlexAttention": "Flex", "FlashInfer fa2 full mask": "FI full mask",
    "FlashInfer fa2 cascade": "FI cascade", "FlashInfer XQA": "FI XQA", "FlashInfer decode": "FI decode",
}  # fmt: skip
# Goals in microseconds for (query heads, KV heads, prefix, tree) of one sequence.
AIMS = {
    (32, 32, 122880, 16): 470, (32, 32, 122880, 64): 480, (32, 8, 122880, 1): 122, (32, 8, 122880, 16): 127,
    (32, 8, 122880, 64): 235, (32, 8, 32768, 16): 40, (32, 8, 32768, 64): 70, (32, 32, 4096, 16): 19,
    (32, 8, 4096, 64): 14,
}  # fmt: skip
CARDS = {
    "sm_80": "A100", "sm_86": "RTX 3090", "sm_89": "RTX 4090", "sm_90": "H100, H200", "sm_100": "B200",
    "sm_120": "RTX 5090", "gfx90a": "MI250X", "gfx942": "MI300X", "gfx1100": "RX 7900 XTX",
}  # fmt: skip
STORAGE = {"heads": "`[H, S, D]`", "rows": "`[S, H, D]`"}

CELLS: Columns = {
    "Hq/Hkv": "{hq}/{hkv}", "L": "{l:,}", "T": "{t}", "batch": "{batch}",
    "**ours**": lambda row: f"**{us(row['ours_us'])}**", "roofline": lambda row: us(row["roof_us"]),
    "% of roofline": "{percent_of_roof:.0f}", "best peer / ours": lambda row: (
    f"{min(row['peers'].values()) / row['ours_us']:.2f}" if row["peers"] else "-" ),
    "error": "{error_ratio:.2f}",
}  # fmt: skip
_NOTE = (
    "{gpu}, torch {torch}, Triton {triton}{ours}; read bandwidth {ceilings[read_bandwidth]:tera} TB/s, bf16 "
    "matmul {teraflops:.0f} TFLOP/s, measured in the same run. "
)
REACHED: Columns = {
    "cell": "{hq}/{hkv}, L = {l:,}, T = {t}", "aim": "{aim}", "ours": lambda row: us(row["ours_us"]),
    "reached": "{reached}", "fastest peer, time against ours": "{peer}: {longer:+.0f}%",
}  # fmt: skip
FITTING: Columns = {
    "architecture": "{arch}", "such as": "{card}", "kernels compiled": "{compiled}",
    "shared memory of a block": "{limit_bytes:,}", "most asked for": "{shared_bytes:,}",
    "spill over 64 B": "{spilling}", "worst spill of a thread, bytes": "{worst}",
}  # fmt: skip
_FITTED = (
    "Every variant of `scripts/checks/kernels_by_arch`, compiled ahead of time by Triton {triton} and its "
    "assembler; of these cards only sm_90 has run them. Commit {commit}, {date}. "
)


def _cells(content: Record) -> Columns:
    """Returns the columns of our kernel and of the peers that have a time in any cell."""
    names = [name for name in SHORT if any(name in row["peers"] for row in content["rows"])]
    return {**CELLS, **{SHORT[name]: lambda row, name=name: us(row["peers"].get(name)) for name in names}}


def _cells_note(content: Record, rows: Sequence[Record]) -> str:
    slower = sum(min(row["peers"].values(), default=row["ours_us"]) < row["ours_us"] for row in rows)
    ahead = f"In {slower} of {len(rows)} cells a peer is faster. "
    facts = {**content, "teraflops": content["ceilings"]["matmul_rate"] / 1e12}
    facts["ours"] = f", FlashInfer {content['flashinfer']}" if content.get("flashinfer") else ""
    note = cell(_NOTE, facts) + (ahead if slower else "Ours is ahead of every peer measured in every cell. ")
    return note + file_note(FILE, {"": content})


def _aimed(content: Record) -> list[Record]:
    """Returns a row for each goal, with our time and the fastest peer of the same run."""
    rows = []
    for row in (row for row in content["rows"] if row["batch"] == 1):
        aim, ours = AIMS.get((row["hq"], row["hkv"], row["l"], row["t"])), row["ours_us"]
        if aim is not None:
            peer = min(row["peers"], key=row["peers"].__getitem__)
            reached = "yes" if ours <= aim else f"missed by {100 * (ours / aim - 1):.0f}%"
            longer = 100 * (row["peers"][peer] / ours - 1)
            rows.append(row | {"aim": aim, "reached": reached, "peer": peer, "longer": longer})
    return rows


def _layouts(content: Record) -> list[Record]:
    """Returns a row for each layout, with the microseconds of each size."""
    found: dict[str, Record] = {}
    for row in content["layouts"]:
        name = STORAGE.get(row["layout"], row["layout"].replace("page", "pages of"))
        found.setdefault(name, {"layout": name})[row["cell"].partition(" ")[2]] = row["us"]
    return list(found.values())


def _layout_columns(content: Record) -> Columns:
    sizes = dict.fromkeys(row["cell"].partition(" ")[2] for row in content["layouts"])
    return {"layout": "{layout}", **{size: lambda row, size=size: us(row.get(size)) for size in sizes}}


def _fits(content: Record) -> list[Record]:
    """Returns a row for each architecture: compiled kernels, most shared memory, most spilled bytes."""
    rows = []
    for arch in dict.fromkeys(kind["arch"] for kind in content["kernels"]):
        kernels = [row for row in content["kernels"] if row["arch"] == arch]
        spills = [(size, k["kernel"], name) for k in kernels for name, size in k["spills"].items()]
        size, kernel, name = max(spills, key=lambda spill: spill[0], default=(0, "", ""))
        row = {"arch": arch, "card": CARDS[arch], "compiled": sum(k["compiled"] for k in kernels)}
        row |= {key: max(k[key] for k in kernels) for key in ("limit_bytes", "shared_bytes")}
        worst = f"{size:,} ({kernel.strip('_')}, {name})" if spills else "-"
        rows.append(row | {"spilling": len(spills), "worst": worst})
    return rows


cells = listing(_cells, caption=_cells_note)
_fitting = listing(FITTING, _fits, noted(_FITTED, FITS), left=2)
TABLES = {
    "tree_attention_cells": Table(FILE, cells, COMMAND),
    "tree_attention_aims": Table(FILE, listing(REACHED, _aimed), COMMAND),
    "tree_attention_layouts": Table(FILE, listing(_layout_columns, _layouts), COMMAND),
    "kernels_by_arch": Table(FITS, _fitting, "python -m scripts.checks.kernels_by_arch"),
}
