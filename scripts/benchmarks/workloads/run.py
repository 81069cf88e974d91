"""Texts that branch: what ``bench workloads`` measures, with the pair in the shape of Llama-3.1-8B.

    python -m scripts.benchmarks workloads                      # docs/results/tree_workloads_MACHINE.json
    python -m scripts.benchmarks workloads --workloads deft long

Measurements lie beside the results file, one JSON line each; a run that was ended goes on from there.
"""

import sys
from collections.abc import Sequence

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
from scripts.benchmarks.common.results import Record, header, open_records, write
from triforce_tree.eval.report import machine
from triforce_tree.eval.report.code_digest import digest
from triforce_tree.eval.results import Records, Series
from triforce_tree.eval.text import prompts, pydoc_text
from triforce_tree.eval.workloads import measure as workloads
from triforce_tree.eval.workloads.shapes import FAMILIES, chosen
from triforce_tree.loading.inflate import inflate_pair

_TINY_SCALE = 0.005


def rows_of(records: Records) -> list[Record]:
    """Of both parts."""
    return [
        {"part": part, **row}
        for part, rows in (
            (workloads.ATTENTION, machine.of_attention(records)),
            (workloads.DECODING, machine.of_decoding(records)),
        )
        for row in rows
    ]


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
    path = results_folder(args.out, args.tiny) / f"tree_workloads_{machine_of(device)}.json"
    settings = {
        "shape": shape,
        "scale": scale,
        "new_tokens": new,
        "seed": args.seed,
        "code": digest("engine") + digest("branching"),
    }
    records = open_records(path.with_suffix(".jsonl"), settings)
    target, drafted, tokenizer = inflate_pair(shape, device, dtype, draft, args.seed)
    engine = triforce_tree.load(target, drafted, tokenizer=tokenizer, profile=False)
    longest = max(max(workload.lengths) for workload in named)
    [tokens] = prompts([pydoc_text()], tokenizer, longest, 1)
    run = workloads.Run(engine, named, tokens, new, args.parts)
    heads = run.heads
    head = header(args.seed, "engine", "branching") | {
        "target": f"{args.shape} inflated", "heads": f"{heads.query}/{heads.kv} x {heads.dim}",
        "dtype": str(dtype).removeprefix("torch."), "new_tokens": new, "scale": scale,
    }  # fmt: skip

    def done(record: Record) -> None:
        print(record, file=sys.stderr, flush=True)
        write(path, head | {"rows": rows_of(records)})

    torch.manual_seed(args.seed)
    workloads.measure(run, Series(records, args.seed, done=done))
    engine.close()
    print(*rows_of(records), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
