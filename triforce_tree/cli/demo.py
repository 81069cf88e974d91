"""``triforce-tree demo``: three levels against the target alone, on what every installation has.

A long prompt of real English, in which a number is hidden, is prefilled once. The number is asked for, and
the text is continued: by all levels and by the target alone in turns, in the same process.
"""

import argparse
import random
import re
from collections.abc import Sequence as Sequences
from typing import Any

from rich.console import Console
from rich.text import Text

from triforce_tree.bench.needle import ANSWER_TOKENS
from triforce_tree.bench.results import repeated_share
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.check.compare import difference_verdict, judged
from triforce_tree.cli import options
from triforce_tree.cli.console import (
    Interrupt,
    LevelText,
    PrefillBar,
    json_line,
    levels_table,
    memory_table,
    results,
    screen,
)
from triforce_tree.decoding.explain.side_by_side import Piece, SideBySide, Speeds
from triforce_tree.decoding.explain.tally import Node, as_lines
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.engine import Engine
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.pair import needle as planted
from triforce_tree.runtime.token_ids import listed_ids
from triforce_tree.text.new_text import new_text
from triforce_tree.verify.sampling import ProbsFromLogits

# Where the prompt ends by default: what follows this sentence in the topic on sequence types does not repeat.
_PASSAGE = re.compile(r"function call with a 3-tuple as the\s+sole\s+argument\.\s+")
# The hidden number's position, as a share of the prompt.
_DEPTH = 0.125


def run(args: argparse.Namespace) -> int:
    show = results(args)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    name, number = planted.drawn(random.Random(args.seed))
    prompt = _prompt(engine, args, token_ids(engine.tokenizer, planted.fact(name, number)))
    question = token_ids(engine.tokenizer, planted.question(name))
    to_probs = ProbsFromLogits.at(args.temperature)
    show.print(
        f"{len(prompt):,} tokens of Python's help topics, an eighth of them before this: "
        f"{planted.fact(name, number).strip()}"
    )
    new_tokens = args.new_tokens + len(question) + ANSWER_TOKENS
    if (plan := engine.memory_plan(len(prompt), new_tokens)) is not None:
        screen().print(memory_table(plan))
    with (
        Interrupt() as interrupt,
        engine.program([prompt], new_tokens, to_probs) as program,
    ):
        with PrefillBar(len(prompt) + len(question) - 1, interrupt) as progress:
            program.prefill([[*prompt, *question]], progress)
        answer = _answer(engine, program, [*prompt, *question], interrupt)
        show.print(Text.assemble(planted.question(name).strip(), (answer, "bold")))
        pair = SideBySide(program, to_probs, args.seed, lambda: interrupt.requested, _stop_tokens(engine))
        pieces = _continued(engine, pair, prompt, args.new_tokens, show)
    ours = [token for piece in pieces for token in piece.tokens]
    alone = [token for piece in pieces for token in piece.alone]
    greedy = args.temperature == 0
    differs = greedy and ours != alone
    found = judged(engine, prompt, ours, alone, to_probs) if differs else None
    speeds = Speeds.of(pieces)
    show.print(levels_table(pair.levels))
    _show_tree(engine, pair.trees, show)
    verdict = difference_verdict(common_prefix(ours, alone), found) if differs else _verdict(pieces, greedy)
    show.print(f"{_speed(speeds, program.levels)}{verdict}", style="bold")
    if args.json:
        result: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "new_tokens": len(ours),
            "text": new_text(engine.tokenizer, prompt, ours),
            "repeated_8grams": repeated_share(ours),
            "needle": {
                "name": name,
                "number": number,
                "answer": answer,
                "found": answer.strip().startswith(number),
            },
            "identical": (not differs) if greedy else None,
            "first_difference": common_prefix(ours, alone) if differs else None,
            "tie": found.tie if found else None,
            "failed": found is not None and not found.tie,
            "speedup": speeds and speeds.speedup,
            "ms_per_token": speeds and speeds.ms_per_token,
            "baseline_ms_per_token": speeds and speeds.alone_ms_per_token,
            "levels": [level.as_dict() for level in pair.levels],
            "interrupted": interrupt.requested,
        }
        json_line(result)
    if interrupt.requested:
        return 130
    return int(found is not None and not found.tie)


def _prompt(engine: Engine, args: argparse.Namespace, fact: list[int]) -> list[int]:
    """Returns a part of the help topics with the fact in it."""
    assert engine.tokenizer is not None
    text, count = pydoc_text(), args.prompt_tokens
    if args.start is None and (passage := _PASSAGE.search(text)):
        # A blank at the end would be the beginning of the next token.
        text = text[: passage.end() - 1]
    ids = token_ids(engine.tokenizer, text)
    start = max(0, len(ids) - count) if args.start is None else args.start
    if start + count > len(ids):
        raise ValueError(
            f"--prompt-tokens {count}"
            + (f" after --start {start}" if args.start is not None else "")
            + f" exceeds the help topics' {len(ids)} tokens; use less"
        )
    if count <= 2 * len(fact):
        raise ValueError(
            f"--prompt-tokens {count} must be more than {2 * len(fact)}: a number is hidden there"
        )
    shown = ids[start + len(fact) : start + count]
    at = round(_DEPTH * len(shown))
    return [*shown[:at], *fact, *shown[at:]]


def _answer(engine: Engine, program: DecodingProgram, prompt: list[int], interrupt: Interrupt) -> str:
    """Returns the greedy answer to a question at the end of a prompt, by all levels."""
    assert engine.tokenizer is not None
    loop = DecodingLoop.over(program, ProbsFromLogits.at(0.0), 0, repeatable=True)
    sequence = Sequence(prompt, Ending(ANSWER_TOKENS, _stop_tokens(engine)))
    loop.begin([sequence], cached=True)
    for _ in loop.decode():
        interrupt.check()
    return new_text(engine.tokenizer, prompt, sequence.new, _stop_tokens(engine)).split("\n")[0]


def _stop_tokens(engine: Engine) -> frozenset[int]:
    return frozenset(listed_ids(engine.target.settings.eos_token_id))


def _continued(
    engine: Engine, pair: SideBySide, prompt: list[int], new_tokens: int, show: Console
) -> list[Piece]:
    """Continues the prompt in turns, and writes the text to stdout as it comes."""
    assert engine.tokenizer is not None
    out = LevelText(engine.tokenizer, pair.origins, prompt)
    ending = str(engine.tokenizer.decode(prompt[-48:])).rstrip()
    show.print(f"\nThe text ends in\n  ...{ending}".replace("\n", "\n  "))
    show.print("and goes on\n")
    if out.legend:
        show.print(out.legend)
    pieces = []
    for piece in pair.pieces(prompt, new_tokens):
        out.put(piece.tokens, piece.origins)
        pieces.append(piece)
    out.end()
    return pieces


def _show_tree(engine: Engine, trees: Sequences[Sequences[Node]], show: Console) -> None:
    """Shows the most instructive tree.

    Trees with branches come first, then trees with a long accepted path that leaves first choices, then trees
    with most nodes.
    """
    if not trees:
        return
    assert engine.tokenizer is not None

    def branches(tree: Sequences[Node]) -> bool:
        return any(node.rank > 0 for node in tree)

    def shown(tree: Sequences[Node]) -> tuple[bool, int, int]:
        accepted = [node for node in tree if node.accepted and node.parent >= 0]
        return branches(tree), len(accepted) + 2 * sum(node.rank > 0 for node in accepted), len(tree)

    tree = max(trees, key=shown)
    words = [str(engine.tokenizer.decode([node.token])) for node in tree]
    what = "token tree" if branches(tree) else "chain of tokens, a tree without branches,"
    show.print(f"a drafted {what} with the draft's probability of each token", style="bold")
    for line in as_lines(tree, words):
        show.print(f"  {line}", style="green" if line.endswith("accepted") else None)
    show.print()


def _speed(speeds: Speeds | None, levels: int) -> str:
    if speeds is None:
        return ""
    return (
        f"speed-up: {speeds.speedup:.2f}x, the median of {speeds.pieces} turns: {levels} levels "
        f"{speeds.ms_per_token:.1f} ms a token, the target alone {speeds.alone_ms_per_token:.1f} ms "
        "(medians too); "
    )


def _verdict(pieces: Sequences[Piece], greedy: bool) -> str:
    count = sum(len(piece.tokens) for piece in pieces)
    if not greedy:
        return f"{count} tokens sampled from the target's own distribution"
    return f"all {count} tokens identical"
