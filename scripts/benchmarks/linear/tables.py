"""The table of linear layers with few input rows in docs/linear_layers.md."""

from itertools import product

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted, us

FILE = "linear_h200.jsonl"
COMMAND = f"python -m scripts.benchmarks linear --out docs/results/{FILE}"
# The linears of a layer of a 7B model as (outputs, inputs), with q+k+v and gate+up joined.
_SHAPES = [((4096, 4096, 4096), 4096), ((4096,), 4096), ((11008, 11008), 4096), ((4096,), 11008)]
EARLY = "fused, small kernels between, early, prefetch 1"
LAYERS: Columns = {
    "bits": "{bits}", "rows": "{rows}", "**fused**": lambda row: f"**{us(row['fused'])}**",
    "+ 4 small kernels": lambda row: us(row["fused, small kernels between"]),
    "these early": lambda row: us(row[EARLY]), "one by one": lambda row: us(row["one by one"]),
    "cuBLAS, bf16": lambda row: us(row["cublas"]), "gemlite": lambda row: us(row["gemlite"]),
    "roofline": "{roof:.1f}", "% of roofline": "{share:.0f}",
}  # fmt: skip
_NOTE = (
    "{gpu}, torch {torch}, Triton {triton}; read bandwidth {read_bandwidth:tera} TB/s, measured in the same "
    "run; {measured:,} measurements; commit {commit}. "
)


def _layers(content: Record) -> list[Record]:
    """Returns the microseconds of all linears of a 7B layer, by bits and rows."""
    measured = {(row["bits"], row["rows"]): row["us"] for row in content["layers"] if row["layer"] == "7B"}
    peer = {(row["bits"], row["shape"], row["rows"]): row["us"] for row in content["gemlite"]}
    roofs = {(c["bits"], tuple(c["outs"]), c["ins"], c["rows"]): c["roof_us"] for c in content["cells"]}
    found = []
    for bits, rows in product((16, 8, 4), (1, 16, 32, 64)):
        took = measured[bits, rows]
        roof = sum(roofs[bits, outs, ins, rows] for outs, ins in _SHAPES)
        parts = [peer.get((bits, f"[{sum(outs)}, {ins}]", rows)) for outs, ins in _SHAPES]
        row = {"bits": bits, "rows": rows, "roof": roof, "share": 100 * roof / took["fused"], **took}
        row |= {"cublas": measured[16, rows]["torch"], "gemlite": sum(parts) if all(parts) else None}
        found.append(row)
    return found


TABLES = {"linear_layers": Table(FILE, listing(LAYERS, _layers, noted(_NOTE, FILE), left=0), COMMAND)}
