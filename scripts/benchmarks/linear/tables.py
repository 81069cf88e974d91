"""Table of docs/kernel.md about few-row linear layers."""

from scripts.benchmarks.common.markdown import Record, Table, cell, file_note, grid

FILE = "linear_h200.json"
COMMAND = f"python -m scripts.benchmarks linear --out docs/results/{FILE}"
# What a layer of a 7B model multiplies, q+k+v and gate+up joined, as (outputs, inputs).
_SHAPES = [((4096, 4096, 4096), 4096), ((4096,), 4096), ((11008, 11008), 4096), ((4096,), 11008)]
_ROWS = (1, 16, 32, 64)
EARLY = "fused, small kernels between, early, prefetch 1"
_WAYS = ("fused", "fused, small kernels between", EARLY, "one by one")
_COLUMNS = (
    "bits", "rows", "**fused**", "+ 4 small kernels", "these early", "one by one", "cuBLAS, bf16", "gemlite",
    "roof", "% of roof",
)  # fmt: skip
_NOTE = (
    "{gpu}, torch {torch}, Triton {triton}; read bandwidth {read_bandwidth:tera} TB/s, measured in the same "
    "run; {measured:,} measurements, {checked} problems checked against fp64 before, {wrong} wrong; commit "
    "{commit}. "
)


def layers(content: Record) -> str:
    """Microseconds of all linears of a 7B layer, by bits and rows."""
    measured = {(row["bits"], row["rows"]): row["us"] for row in content["layers"] if row["layer"] == "7B"}
    peer = {(row["bits"], row["shape"], row["rows"]): row["us"] for row in content["gemlite"]}
    roofs = {(c["bits"], tuple(c["outs"]), c["ins"], c["rows"]): c["roof_us"] for c in content["cells"]}

    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    lines = []
    for bits in (16, 8, 4):
        for rows in _ROWS:
            roof = sum(roofs[bits, outs, ins, rows] for outs, ins in _SHAPES)
            took = measured.get((bits, rows), {})
            fused, *others = (took.get(way) for way in _WAYS)
            parts = [peer.get((bits, f"[{sum(outs)}, {ins}]", rows)) for outs, ins in _SHAPES]
            gemlite = sum(part for part in parts if part) if all(parts) else None
            theirs = [us(measured.get((16, rows), {}).get("torch")), us(gemlite)]
            share = "-" if fused is None else f"{100 * roof / fused:.0f}"
            lines.append(
                [str(bits), str(rows), f"**{us(fused)}**", *map(us, others), *theirs, f"{roof:.1f}", share]
            )
    note = cell(_NOTE, {**content, "wrong": len(content["failed"])})
    return grid(_COLUMNS, lines, left=0) + "\n" + note + file_note(FILE, {"": content})


TABLES = {"linear_layers": Table(FILE, layers, COMMAND)}
