"""Speed of the embedded pair on a CPU: docs/results/cpu_16k.json.

    python scripts/bench_cpu.py

Single measurements go to a JSON-lines file beside it, so a run that was cut short goes on where it ended.
Several prompts from different places of Python's help topics, all methods in turns on each; the fastest of
transformers' static cache, dynamic cache and assisted decoding (with our draft) is the baseline.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers.utils import logging

import triforce_tree
from triforce_tree.bench import results, speed, text
from triforce_tree.bench.baselines import METHODS

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--context", type=int, default=16_384, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to write")
    parser.add_argument("--prompts", type=int, default=3, help="different prompts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="what to time")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--target", help="model folder; without it, the embedded pair")
    parser.add_argument("--draft", help="model folder; without it, the embedded draft")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_16k.json", help="results file")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)

    results.check_writable(args.out)
    settings = speed.settings(
        args.context,
        args.new_tokens,
        args.seed,
        text.PYDOC,
        args.target or "embedded",
        args.draft or "default",
    )
    settings["threads"] = args.threads
    records = results.Records(args.out.with_suffix(".jsonl"), settings)
    engine = triforce_tree.load(args.target, args.draft, device="cpu", dtype=torch.float32, profile=False)
    assert engine.tokenizer is not None
    prompts = text.prompts([text.pydoc_text()], engine.tokenizer, args.context, args.prompts)

    with Progress() as progress:
        task = progress.add_task("measuring", total=len(prompts) * len(args.temperatures) * len(args.methods))

        def done(record: dict[str, Any]) -> None:
            ms = 1e3 * record["decode_seconds"] / record["timed_tokens"]
            place = f"prompt {record['prompt']} T={record['temperature']:g}"
            progress.console.print(f"{place} {record['method']}: {ms:.2f} ms a token")
            progress.advance(task)

        speed.measure(
            engine,
            prompts,
            args.methods,
            args.temperatures,
            args.new_tokens,
            records,
            seed=args.seed,
            done=done,
        )
    result = {
        **results.header(args.seed),
        "prompts": len(prompts),
        "options": {k: str(v) for k, v in engine.hierarchy.config.as_options().items()},
        "rows": speed.rows(records, args.context, args.new_tokens),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
