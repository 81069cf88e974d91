"""``triforce-tree explain``: which passes decoding chose for a prompt, and why."""

import argparse
from pathlib import Path

from rich.console import Console

from triforce_tree.cli import options
from triforce_tree.cli.console import Interrupt, PrefillBar, json_line, plain_table, results, screen
from triforce_tree.decoding.explain.drawing import as_lines, draw
from triforce_tree.decoding.explain.explanation import Explanation, by_rank
from triforce_tree.decoding.explain.matched import MatchedPasses
from triforce_tree.drafters.suffix_index import LONGEST
from triforce_tree.generation.chat import encoded


def run(args: argparse.Namespace) -> int:
    engine = options.engine_of(args, args.given_prompt, args.max_new_tokens)
    assert engine.tokenizer is not None
    prompt = encoded(engine.tokenizer, args.given_prompt, engine.hierarchy.target.max_positions)
    # Ctrl-C is not held back: of half an explanation nothing is kept.
    with PrefillBar(len(prompt) - 1, Interrupt()) as progress:
        found = engine.explain(prompt, args.max_new_tokens, args.temperature, args.seed, progress)
    _show(found, results(args))
    if args.json:
        json_line(found.as_dict())
    if args.png is not None and not found.tree:
        screen().print(f"no tree was drafted, all passes were plain: {args.png} is not written")
    elif args.png is not None:
        draw(found.tree, found.words, Path(args.png))
        screen().print(f"the last tree is in {args.png}")
    return 0


def _show(found: Explanation, show: Console) -> None:
    show.print(f"{found.prompt_tokens:,} tokens of prompt, {found.new_tokens} new")
    show.print(found.why())
    settings = {f"{name}={found.options[name]}": why for name, why in found.reasons.items()}
    width = max(map(len, settings), default=0)
    for setting, why in settings.items():
        show.print(f"  {setting:<{width}}  {why}")
    made = "; ".join(f"{count} of {kind}" for kind, count in found.passes.items())
    show.print(f"passes made, {found.tokens_per_pass:.2f} new tokens each on average: {made}")
    chains = len(found.matched.setting.split()) if found.matched is not None else 0
    for number, tree in enumerate(found.trees[1 : len(found.trees) - chains], 2):
        show.print(f"tree {number}: {tree}")
    if found.matched is not None:
        _show_matched(found, found.matched, show)
    if found.choices:
        rows = [
            (c.kind, str(c.made), f"{c.tokens:.2f}", f"{c.ms:.2f}", f"{c.ms_per_token:.2f}")
            for c in found.choices
        ]
        columns = ("pass", "made", "tokens", "ms", "ms a token")
        show.print(plain_table("what each kind of pass is expected to bring", columns, rows))
    if found.stages:
        times = [
            (s.stage, f"{s.ms:.3f}", "" if s.roof_ms is None else f"{s.roof_ms:.3f}") for s in found.stages
        ]
        show.print(plain_table("time of each stage", ("stage", "ms", "roofline, ms"), times))
    rows = [
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
    if rows:  # plain decoding proposes nothing
        show.print(plain_table("acceptance", columns, rows))
    for line in as_lines(found.tree, found.words):
        show.print(line)


def _show_matched(found: Explanation, matched: MatchedPasses, show: Console) -> None:
    """Passes that verified matched tokens, by length of the match."""
    every = sum(found.passes.values())
    show.print(
        f"matched tokens ({matched.setting} in other_trees): {matched.passes} of {every} passes, "
        f"which brought {matched.tokens} of {found.new_tokens} tokens"
    )
    rows = [
        (
            f"{c.least} to {c.most}" if c.most < LONGEST else f"{c.least} or more",
            str(c.passes),
            str(c.proposed),
            str(c.accepted),
            "" if c.acceptance is None else f"{100 * c.acceptance:.0f} %",
            f"{100 * c.expected:.0f} %",
            str(c.tokens),
        )
        for c in matched.by_length
    ]
    columns = ("match, tokens", "passes", "proposed", "accepted", "acceptance", "expected", "brought")
    if matched.passes:
        show.print(plain_table("matched tokens, by length of the match", columns, rows))
