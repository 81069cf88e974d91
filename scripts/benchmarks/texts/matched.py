"""Tokens a pass where a text repeats itself, with matched tokens and without: docs/results/matched.json.

    python -m scripts.benchmarks matched [--new-tokens 256] [--contexts 4096 16384]

Counts of passes, no times: the embedded pair on a CPU. ``chosen``: each pass is chosen, with matched tokens
in the place of a tree, by the stage costs of this machine, whose ratios to a plain pass the rows hold.
``merged``: each pass of two levels verifies the same tree with matched tokens beside it; nothing is chosen.
"""

import os
import tempfile
from collections.abc import Sequence

import torch
from transformers.utils import logging

import triforce_tree
from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, Record, header, rounded, write
from scripts.benchmarks.texts.command import chosen_sources
from scripts.benchmarks.texts.matched_tables import MATCHED
from triforce_tree import Engine
from triforce_tree.decoding.explain.explanation import MATCHED_PASSES, Explanation, explained
from triforce_tree.decoding.explain.tally import MATCHED_TOKENS
from triforce_tree.eval.text import token_ids
from triforce_tree.eval.texts.registry import Texts, prompts
from triforce_tree.verify.sampling import ProbsFromLogits

TREES = "best-first:2,2,1 chain:2"
CHOSEN = ("", "lookup:12", "lookup:31", "lookup:12 lookup:31", "lookup:12 lookup:63")
MERGED = (0, 8, 15, 31)
PARTS = ("chosen", "merged")
KINDS = ("copied", "code", "tables", "documentation", "prose")


def settings(parts: Sequence[str]) -> list[tuple[str, str, Record]]:
    """(part, name, engine options) of all settings."""
    chosen = [("chosen", name or "none", {"other_trees": f"{TREES} {name}".strip()}) for name in CHOSEN]
    merged = [("merged", str(n), {"levels": 2, "rounds": 1, "lookup": n}) for n in MERGED]
    return [setting for setting in (*chosen, *merged) if setting[0] in parts]


def row_of(found: Sequence[Explanation]) -> Record:
    """Counts of all these texts together."""
    made, tokens = sum(sum(one.passes.values()) for one in found), sum(one.new_tokens for one in found)
    row: Record = {"passes": made, "new_tokens": tokens, "tokens_per_pass": rounded(tokens / made)}
    depths = [depth for one in found for depth in one.acceptance.get(MATCHED_TOKENS, ())]
    if any("lookup" in tree for tree in found[0].trees):
        row["matched_passes"] = passes = sum(one.passes.get(MATCHED_PASSES, 0) for one in found)
        accepted = sum(depth.accepted.total() for depth in depths)
        row["tokens_per_matched_pass"] = rounded(1 + accepted / passes) if passes else None
    if ms := found[0].stages:
        row["costs"] = {name: rounded(value / ms["plain"]) for name, value in ms.items()}
    return row


def explanations(
    engine: Engine, prompt: list[int], temperature: float, seeds: int, count: int
) -> list[Explanation]:
    """Of ``count`` new tokens with each seed; with one where nothing is drawn."""
    to_probs, found = ProbsFromLogits.at(temperature), []
    for seed in range(seeds if temperature else 1):
        with engine.program([prompt], count, to_probs) as program:
            found.append(explained(program, to_probs, prompt, count, seed))
    return found


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks matched", __doc__, tiny=False)
    add = made.add_argument
    add(
        "--contexts",
        type=int,
        nargs="+",
        default=[4096, 16384],
        help="prompt tokens; all but the first for copied passages alone",
    )
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy")
    add("--seeds", type=int, default=2, help="how many, where tokens are drawn")
    add("--new-tokens", type=int, default=256, help="of each text")
    add("--kinds", nargs="+", default=list(KINDS), help="kinds of text, or texts by name")
    add(
        "--parts",
        nargs="+",
        choices=["chosen", "merged"],
        default=["chosen", "merged"],
        help="what to measure",
    )
    add("--texts", help="file that `texts` wrote; by default what is installed")
    args = made.parse_args(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        texts = Texts(args.texts)
        sources, missing = chosen_sources(texts, args.kinds, one_a_kind=True)
    except (ValueError, OSError) as error:
        made.error(str(error))
    # Neither stage costs nor estimates of other runs.
    os.environ |= {"TRIFORCE_TREE_CACHE": tempfile.mkdtemp(), "TRIFORCE_TREE_ESTIMATES": ""}
    engine = triforce_tree.load(device="cpu", dtype=torch.float32)
    content: Record = {
        **header(args.seed),
        "new_tokens": args.new_tokens, "seeds": args.seeds, "missing": missing,
        "rows": [],
    }  # fmt: skip
    for source in sources:
        ids = token_ids(engine.tokenizer, texts.read(source))
        for context in args.contexts if source.copies else args.contexts[:1]:
            [prompt] = prompts(source, ids, context)
            for part, name, options in settings(args.parts):
                own = engine.with_options(**options)
                for heat in args.temperatures:
                    found = explanations(own, prompt, heat, args.seeds, args.new_tokens)
                    row = {
                        "part": part, "text": source.name, "kind": source.kind, "context": context,
                        "temperature": heat, "setting": name, **row_of(found),
                    }  # fmt: skip
                    content["rows"].append(row)
                    print({**row, "costs": None}, flush=True)
            write(args.out or RESULTS / MATCHED, content)
    return 0
