"""``triforce-tree explain``: which passes decoding chose for a prompt, and why."""

import argparse

from rich.console import Console

from triforce_tree.cli import options
from triforce_tree.cli.console import Interrupt, PrefillBar, json_line, plain_table, results
from triforce_tree.decoding.explain.explanation import Explanation, by_rank
from triforce_tree.decoding.explain.tally import as_lines
from triforce_tree.requests.chat import encoded


def run(args: argparse.Namespace) -> int:
    engine = options.engine_of(args, args.given_prompt, args.max_new_tokens)
    assert engine.tokenizer is not None
    prompt = encoded(engine.tokenizer, args.given_prompt, engine.target.max_positions)
    # Ctrl-C is not held back: of half an explanation nothing is kept.
    with PrefillBar(len(prompt) - 1, Interrupt()) as progress:
        found = engine.explain(prompt, args.max_new_tokens, args.temperature, args.seed, progress)
    _show(found, results(args))
    if args.json:
        json_line(found.as_dict())
    return 0


def _show(found: Explanation, show: Console) -> None:
    show.print(f"{found.prompt_tokens:,} tokens of prompt, {found.new_tokens} new")
    show.print(found.why())
    made = "; ".join(f"{count} of {kind}" for kind, count in found.passes.items())
    show.print(f"passes made, {found.tokens_per_pass:.2f} new tokens each on average: {made}")
    origins = ", ".join(f"{count} by {name}" for name, count in found.origins.items())
    show.print(f"new tokens were proposed: {origins}")
    for number, tree in enumerate(found.trees[1:], 2):
        show.print(f"tree {number}: {tree}")
    if found.choices:
        rows = [
            (c.kind, str(c.made), f"{c.tokens:.2f}", f"{c.ms:.2f}", f"{c.ms_per_token:.2f}")
            for c in found.choices
        ]
        columns = ("pass", "made", "tokens", "ms", "ms a token")
        show.print(plain_table("what each kind of pass is expected to bring", columns, rows))
    if found.stages:
        times = [(stage, f"{ms:.3f}") for stage, ms in found.stages.items()]
        show.print(plain_table("time of each stage", ("stage", "ms"), times))
    counted = [
        (
            level,
            str(depth),
            str(counts.tried),
            f"{100 * counts.rate:.0f} %",
            " ".join(f"{100 * count / counts.tried:.0f}" for count in by_rank(counts.accepted)),
        )
        for level, depths in found.acceptance.items()
        for depth, counts in enumerate(depths, 1)
    ]
    columns = ("level", "depth", "reached", "accepted", "by rank, %")
    if counted:  # plain decoding proposes nothing
        show.print(plain_table("acceptance", columns, counted))
    for line in as_lines(found.tree, found.words):
        show.print(line)
