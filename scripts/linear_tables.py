"""Table of docs/kernel.md from the results of scripts/tune_linear.py."""

from typing import Any

from markdown_tables import table

FILE = "linear_h200.json"
COMMAND = f"python scripts/tune_linear.py --out docs/results/{FILE}"
# What a layer of a 7B model multiplies, q+k+v and gate+up joined, as (outputs, inputs).
_SHAPES = [((4096, 4096, 4096), 4096), ((4096,), 4096), ((11008, 11008), 4096), ((4096,), 11008)]
_ROWS = (1, 16, 32, 64)
_EARLY = "fused, small kernels between, early, prefetch 1"
_WAYS = ("fused", "fused, small kernels between", _EARLY, "one by one")


def layers(result: dict[str, Any]) -> str:
    """Microseconds of all linears of a 7B layer, by bits and rows."""
    measured = {tuple(map(str, row["key"])): row.get("us") for row in result["measurements"]}
    roofs = {
        (cell["bits"], tuple(cell["outs"]), cell["ins"], cell["rows"]): cell["roof_us"]
        for cell in result["cells"]
    }

    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    def layer(bits: int, rows: int, way: str) -> float | None:
        return measured.get(("layer", "7B", str(bits), str(rows), way))

    lines = []
    for bits in (16, 8, 4):
        for rows in _ROWS:
            roof = sum(roofs[bits, outs, ins, rows] for outs, ins in _SHAPES)
            fused, *others = (layer(bits, rows, way) for way in _WAYS)
            peer = [
                measured.get((str(bits), f"[{sum(outs)}, {ins}]", str(rows), "gemlite"))
                for outs, ins in _SHAPES
            ]
            gemlite = sum(one for one in peer if one) if all(peer) else None
            share = "-" if fused is None else f"{100 * roof / fused:.0f}"
            ours = [f"**{us(fused)}**", *map(us, others)]
            theirs = [us(layer(16, rows, "torch")), us(gemlite)]
            lines.append([str(bits), str(rows), *ours, *theirs, f"{roof:.1f}", share])
    columns = [
        "bits", "rows", "**fused**", "+ 4 small kernels", "these early", "one by one", "cuBLAS, bf16",
        "gemlite", "roof", "% of roof",
    ]  # fmt: skip
    note = (
        f"{result['gpu']}, torch {result['torch']}, Triton {result['triton']}; read bandwidth "
        f"{result['read_bandwidth'] / 1e12:.2f} TB/s, measured in the same run; "
        f"{len(result['measurements']):,} measurements, {result['checked']} problems checked against fp64 "
        f"before, {len(result['failed'])} wrong; commit {result['commit']}. File: `docs/results/{FILE}`.\n"
    )
    return table(columns, lines, left=0) + "\n" + note
