"""``triforce-tree demo``: three levels against the target alone, on what every installation has.

A long prompt of real English is continued by the embedded pair with three levels, then by the target alone,
in the same process.
"""

import argparse
from typing import Any

from triforce_tree.cli import options
from triforce_tree.cli.console import Interrupt, json_line, levels_table, screen
from triforce_tree.cli.generate import generate
from triforce_tree.eval.compare import compared, summary
from triforce_tree.eval.text import pydoc_text, token_ids
from triforce_tree.generation.options import check_sampling_options

WARM_UP_PROMPT, WARM_UP_TOKENS = 256, 16


def run(args: argparse.Namespace) -> int:
    show = screen()
    check_sampling_options({"temperature": args.temperature})
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    ids = token_ids(engine.tokenizer, pydoc_text())
    stop = args.start + args.prompt_tokens
    if stop > len(ids):
        raise ValueError(
            f"--start {args.start} + --prompt-tokens {args.prompt_tokens} exceeds the help topics' "
            f"{len(ids)} tokens; use less of either"
        )
    prompt = ids[args.start : stop]
    alone = engine.with_options(levels=1)
    greedy = args.temperature == 0
    more: dict[str, Any] = {
        "max_new_tokens": args.new_tokens,
        "seed": args.seed,
        "temperature": args.temperature,
    }
    if not greedy:
        more["top_k"] = 0
    show.print(f"{len(prompt)} tokens of Python's help topics, ending in")
    show.print("  ..." + str(engine.tokenizer.decode(prompt[-48:])).replace("\n", "\n  "), markup=False)
    with Interrupt() as interrupt:
        for each in (engine, alone):
            each.generate(prompt[:WARM_UP_PROMPT], do_sample=False, max_new_tokens=WARM_UP_TOKENS)
        out = generate(engine, prompt, interrupt, show=True, **more)
        show.print(levels_table(out.levels or []))
        comparison = None
        if not interrupt.requested:
            baseline = generate(alone, prompt, interrupt, show=False, **more)
            if not interrupt.requested:
                comparison = compared(engine, prompt, out, baseline, greedy)
                show.print(comparison.verdict())
    json_line(summary(out, comparison))
    if interrupt.requested:
        return 130
    return int(comparison is not None and comparison.failed)
