"""TriForce's tables and figures (arXiv 2404.11912), measured with any pair, beside the published numbers."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from scripts.benchmarks.paper import plan, published, tables
from scripts.benchmarks.paper.cells import Cells
from scripts.inflate.pair import inflate_pair
from triforce_tree.api import load
from triforce_tree.bench.results import Record, header
from triforce_tree.cli import options
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.cli.groups import (
    add_hierarchy,
    add_models,
    add_seed_and_out,
    add_text_source,
    engine_options,
)
from triforce_tree.cli.parsing import positive
from triforce_tree.cli.texts import documents
from triforce_tree.config import load_arguments
from triforce_tree.engine import Engine
from triforce_tree.runtime.devices import device_of

_SHAPE = "llama-2-7b"
# Documents of a data set that prompts are taken from.
_DOCUMENTS = 40
_COMPARED = ("table-1", "figure-3")


@dataclass(frozen=True)
class _Defaults:
    """Holds the default sizes of a device: the paper's on a GPU, small ones on a CPU."""

    context: int
    new_tokens: int
    shape: str | None

    @classmethod
    def of(cls, device: torch.device, own_target: bool) -> "_Defaults":
        if device.type != "cuda":
            return cls(2048, 32, None)
        return cls(plan.CONTEXT, 256, None if own_target else _SHAPE)


def main(words: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m scripts.benchmarks paper", description=__doc__)
    made.add_argument(
        "--items",
        nargs="+",
        choices=[*published.items()],
        metavar="NAME",
        help="without it all; table-3 (offloading) is measured only where it is named; of: "
        + ", ".join(published.items()),
    )
    made.add_argument(
        "--context",
        type=positive,
        help="tokens of a prompt, which other lengths are scaled with; by default 2048, on a GPU the paper's "
        "122,880",
    )
    made.add_argument(
        "--new-tokens", type=positive, help="tokens to generate; by default 32, on a GPU the paper's 256"
    )
    made.add_argument("--prompts", type=positive, default=1, help="different prompts for each cell")
    made.add_argument(
        "--shape",
        metavar="NAME",
        help="time the embedded pair inflated to this shape, as in llama-2-7b, or none; by default "
        "llama-2-7b on a GPU without --target",
    )
    made.add_argument("--json", action="store_true", help="end with one JSON object")
    add_seed_and_out(made)
    add_text_source(made)
    add_models(made)
    add_hierarchy(made)
    args = made.parse_args(words)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        made.error(str(error))


def run(args: argparse.Namespace) -> int:
    device = device_of(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = _Defaults.of(device, args.target is not None)
    shape = None if args.shape == "none" else args.shape or usual.shape
    if shape is not None and (args.target or args.draft or args.drafter):
        raise ValueError(
            f"--shape {shape} inflates the embedded pair; leave out --target, --draft and --drafter"
        )
    sizes = plan.Sizes(
        args.context or usual.context, args.new_tokens or usual.new_tokens, args.prompts,
        args.budget if "budget" in args.given else None,
    )  # fmt: skip
    wanted = args.items or [name for name in published.items() if name not in plan.BY_NAME_ALONE]
    source, texts = documents(args)
    settings = {
        "benchmark": tables.BENCHMARK,
        "context": sizes.context,
        "new_tokens": sizes.new_tokens,
        "prompts": sizes.prompts,
        "budget": sizes.budget,
        "seed": args.seed,
        "text": source,
        **options.pair_names(args),
        "shape": shape,
        **options.recorded(args),
    }
    records = records_of(args, settings)
    compared = options.engine_of(args)
    _check(compared, wanted)
    timed = compared if shape is None else _inflated(args, shape, device)
    longest = sizes.context + max(8 * sizes.new_tokens, 128)
    for engine in (timed, compared):
        engine.target.check_length(sizes.context, longest - sizes.context)
    for name in args.items or published.items():
        if records.find(cell=plan.ASKED, item=name) is None:
            records.add({"cell": plan.ASKED, "item": name})
    keys = [key for name in wanted for key in plan.cells_of(name, sizes)]
    keys = [key for at, key in enumerate(keys) if key not in keys[:at]]
    progress = bar("cells")
    task = progress.add_task("measuring", total=len(keys))
    with Interrupt() as interrupt, progress:
        cells = Cells(
            timed, compared, list(islice(texts, _DOCUMENTS)), sizes, "budget" in args.given, args.seed,
            lambda: not interrupt.requested,
        )  # fmt: skip
        series_of(args, records, interrupt, (progress, task), _described).fill(keys, cells.measure)
    code = finish(args, records, tables.tables(records), interrupt.requested)
    if args.json:
        rows = [
            {**dict(place), "figure": name, "value": number}
            for place, figures in tables.cells(records).items()
            for name, number in figures.items()
        ]
        json_line({**header(args.seed), "interrupted": interrupt.requested, "rows": rows})
    return code


def _check(engine: Engine, wanted: list[str]) -> None:
    """Raises ValueError for items that need a draft model where there is none."""
    timed = [name for name in wanted if name not in _COMPARED]
    if engine.draft is None and timed:
        raise ValueError(
            f"{timed[0]} drafts chains with a draft model, as the paper does; give --draft, or --items "
            f"{' '.join(_COMPARED)}"
        )


def _inflated(args: argparse.Namespace, shape: str, device: torch.device) -> Engine:
    """Returns an engine of the embedded pair inflated to a shape, with the options that were given."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    target, draft, tokenizer = inflate_pair(shape, device, getattr(torch, args.dtype or dtype))
    given = engine_options(args)
    return load(target, draft, tokenizer=tokenizer, **load_arguments(given))


def _described(record: Record) -> str:
    if record["cell"] != "speed":
        return f"{record['cell']}, {record['context']:,} tokens"
    changes = ", ".join(f"{name}={value}" for name, value in record["changes"].items())
    return f"{record['decoder']} T={record['temperature']:g} {changes}: {record['ms']:.1f} ms a token"
