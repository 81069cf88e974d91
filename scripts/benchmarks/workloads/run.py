"""Texts that branch: what ``bench workloads`` measures, with the pair in the shape of Llama-3.1-8B.

    python -m scripts.benchmarks workloads                      # docs/results/tree_workloads_MACHINE.jsonl
    python -m scripts.benchmarks workloads --workloads deft long

Measurements lie beside the results file, one JSON line each; a run that was ended goes on from there.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import triforce_tree
from scripts.benchmarks.common.command import (
    TINY_DRAFT,
    TINY_SHAPES,
    device_of,
    machine_of,
    parser,
    results_folder,
)
from scripts.benchmarks.common.results import Record, content_at, header, open_records, write
from scripts.benchmarks.workloads import measure as workloads
from scripts.benchmarks.workloads.shapes import FAMILIES, chosen
from scripts.inflate.pair import inflate_pair
from triforce_tree.bench.results import Records, Series
from triforce_tree.bench.texts import prompts, pydoc_text

_TINY_SCALE = 0.005


def rows_of(part: str, records: Records) -> list[Record]:
    """Returns the rows of one part of the results file."""
    made = workloads.of_attention if part == workloads.ATTENTION else workloads.of_decoding
    return [{"part": part, **row} for row in made(records)]


class Part:
    """One part of the results file. The rows and the header of the other part are kept.

    Args:
        path: the results file. A file beside it has the measurements.
        name: "attention" or "decoding".
        settings: measurements with other settings, or of another commit, are dropped.
    """

    def __init__(self, path: Path, name: str, settings: Record) -> None:
        self._path, self._name = path, name
        own = header(settings["seed"])
        kept = path.with_name(f"{path.stem}.{name}.jsonl")
        self.records = open_records(kept, settings | {"commit": own["commit"]})
        content = content_at(path)
        self._head = {"parts": content["parts"] | {name: own | settings}}
        self._others = [row for row in content["rows"] if row["part"] != name]

    def write(self, record: Record) -> None:
        print(record, file=sys.stderr, flush=True)
        rows = sorted([*self._others, *rows_of(self._name, self.records)], key=lambda row: row["part"])
        write(self._path, self._head | {"rows": rows})


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks workloads", __doc__)
    made.add_argument("--shape", default="llama-3.1-8b", help="what the embedded pair is inflated to")
    made.add_argument("--workloads", nargs="+", default=list(FAMILIES), metavar="NAME")
    made.add_argument("--parts", nargs="+", choices=workloads.PARTS, default=list(workloads.PARTS))
    made.add_argument("--new", type=int, default=64, help="tokens of each text that is decoded")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    scale, new = (_TINY_SCALE, 2) if args.tiny else (1.0, args.new)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    shape, draft = (TINY_SHAPES[args.shape], TINY_DRAFT) if args.tiny else (args.shape, "llama-68m")
    named = [workload.scaled(scale) for workload in chosen(args.workloads)]
    path = results_folder(args.out, args.tiny) / f"tree_workloads_{machine_of(device)}.jsonl"
    target, drafted, tokenizer = inflate_pair(shape, device, dtype, draft, args.seed)
    engine = triforce_tree.load(target, drafted, tokenizer=tokenizer)
    longest = max(max(workload.lengths) for workload in named)
    [tokens] = prompts([pydoc_text()], tokenizer, longest, 1)
    torch.manual_seed(args.seed)
    for name in args.parts:
        run = workloads.Run(engine, named, tokens, new, name)
        heads = run.heads
        part = Part(path, name, {
            "target": f"{args.shape} inflated", "heads": f"{heads.query}/{heads.kv} x {heads.dim}",
            "layers": len(engine.target.kv_shapes), "dtype": str(dtype).removeprefix("torch."),
            "new_tokens": new, "scale": scale, "seed": args.seed,
        })  # fmt: skip
        workloads.measure(run, Series(part.records, args.seed, done=part.write))
        print(*rows_of(name, part.records), sep="\n")
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
