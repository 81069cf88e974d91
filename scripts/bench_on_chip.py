"""Speed of the inflated pair on one GPU: docs/results/on_chip_h200.json, one part at a time.

    python scripts/bench_on_chip.py --part 7b 8b              # also: batch, lengths, outputs,
    python scripts/bench_on_chip.py --part ablations-7b       # ablations-8b, all
    python scripts/bench_on_chip.py --part all --smoke        # the same code, tiny, on a CPU
    python scripts/make_tables.py --plots                     # tables of docs/ and pictures, from the file

Prompts are real texts (``prompt_library.py``), models the embedded pair inflated to real size. Each prompt
is read once; all laws, plain decoding and transformers' static cache then decode behind the same rows, in
the same process, from captured graphs that were made before. Times are of decoding alone, texts have no
early end. A call measures what the part lacks until its time is over, and writes after each prompt; a file
that was made with other settings or another engine is not continued.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from bench_command import RESULTS, prepare, results_folder, setting, settings_of
from on_chip_parts import PARTS, Part, Plan
from on_chip_results import FILE, book, rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    add("--part", choices=[*PARTS, "all"], nargs="+", required=True, help="what to measure")
    add(
        "--out",
        type=Path,
        help="folder of the results file; without it docs/results, or none for a smoke run",
    )
    add("--seconds", type=float, default=540, help="begin nothing that would not end within this time")
    add("--set", type=setting, nargs="*", default=[], metavar="NAME=VALUE", help="options of the hierarchy")
    add("--prompts", type=int, help="prompts, or sets of them in a batch; by default as the part has it")
    add("--new-tokens", type=int, help="tokens of each text")
    add("--temperatures", type=float, nargs="+", help="0 is greedy")
    add("--only", nargs="*", help="of the ablations these settings alone")
    add("--no-rival", action="store_true", help="leave out transformers' static cache")
    add("--fresh", action="store_true", help="drop what the part has measured before")
    add("--seed", type=int, default=0, help="of all draws, and of the weights without effect")
    add("--smoke", action="store_true", help="tiny shapes and prompts, on any machine")
    return made


def plans(args: argparse.Namespace) -> Iterator[tuple[str, Plan, Callable[..., None]]]:
    for name in PARTS if "all" in args.part else args.part:
        part: Part = PARTS[name]
        plan = part.plan(smoke=args.smoke)
        plan = plan.changed(
            options=dict(args.set),
            prompts=args.prompts,
            new_tokens=args.new_tokens,
            temperatures=args.temperatures,
            only=args.only,
        )
        yield name, plan, part.measure


def main(words: Sequence[str] | None = None) -> None:
    made = parser()
    args = made.parse_args(words)
    if not args.smoke and not torch.cuda.is_available():
        made.error("there is no GPU here; --smoke runs the same code with tiny models on the CPU")
    prepare()
    out = results_folder(args.out, args.smoke)
    end = time.perf_counter() + args.seconds
    device = torch.device("cpu" if args.smoke else "cuda")
    done = {}
    for name, plan, measure in plans(args):
        settings = settings_of(plan.as_dict(), args.seed, args.smoke)
        written = book(out / FILE, name, settings, args.fresh, begin=None if args.smoke else RESULTS / FILE)
        measure(plan, written, device, args.seed, end - time.perf_counter(), rival=not args.no_rival)
        done[name] = [
            {k: row[k] for k in ("batch", "context", "temperature", "setting", "ms_per_token", "speedup")}
            for row in rows(name, written.mine)
        ]
    print(json.dumps(done))


if __name__ == "__main__":
    main()
