"""Overlap of level 1 with the target for each retrieval policy: docs/results/retrieval_policies.json.

    python -m scripts.benchmarks retrieval --context 16384 --budgets 1024
    python -m scripts.benchmarks retrieval --device cuda --context 122880 --budgets 4096 --text prose.txt
    python -m scripts.benchmarks retrieval --gguf FOLDER/FILE.gguf --context 7400 --budgets 512 1024

Overlap is the mean of sum(min(p, q)) at temperature 1 over the tokens that follow a prompt in its text, given
to all levels: the chance that level 2 accepts a token of level 1. All policies see the same KV slots. The
text is Python's help topics, and files of your own. Rows of other models, texts and sizes stay in the file.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import triforce_tree
from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, Record, header, write
from scripts.benchmarks.retrieval.tables import FILE
from triforce_tree.eval import results, text
from triforce_tree.eval.ablations import policies
from triforce_tree.eval.ablations.policy_overlap import POLICIES, Policy, measure


def rows(found: Sequence[Sequence[float]], chosen: Sequence[Policy], place: Record) -> Iterator[Record]:
    """A row for each policy: mean, its standard error, and the difference to mean keys of the same text."""
    [base] = [f for f, p in zip(found, chosen, strict=True) if p == Policy("mean keys")]
    for values, policy in zip(found, chosen, strict=True):
        one, less = torch.tensor(values), torch.tensor(values) - torch.tensor(base)
        error = len(values) ** -0.5
        yield {
            **place, "policy": policy.name, "chunk": policy.chunk, "own_query": policy.own_query,
            "overlap": round(float(one.mean()), 4), "error": round(float(one.std()) * error, 4),
            "gain": round(float(less.mean()), 4), "gain_error": round(float(less.std()) * error, 4),
        }  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks retrieval", __doc__, tiny=False)
    add = made.add_argument
    add("--gguf", type=Path, help="a target as GGUF; without it, the embedded pair's")
    add("--device", default="cpu", help="cpu or cuda")
    add("--context", type=int, default=16_384, help="tokens of each prompt")
    add("--budgets", type=int, nargs="+", default=[1024], help="tokens of the retrieval cache")
    add("--new", type=int, default=130, help="tokens after each prompt")
    add("--prompts", type=int, default=1, help="prompts of each text")
    add("--text", type=Path, nargs="*", default=[], help="files of text besides Python's help topics")
    add("--no-docs", action="store_true", help="leave out Python's help topics")
    add("--only", nargs="*", help="names of the policies to measure; mean keys always are")
    args = made.parse_args(words)
    out = results.check_writable(args.out or RESULTS / FILE)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = [p for p in POLICIES if not args.only or p.name in args.only or p == Policy("mean keys")]
    source: dict[str, Any] = {"device": args.device, "dtype": torch.float32}
    if args.gguf:
        load = partial(triforce_tree.load, args.gguf.parent, gguf_file=args.gguf.name, lookup=4, **source)
    else:
        load = partial(triforce_tree.load, **source)
    engine = load()
    model = args.gguf.stem if args.gguf else "embedded pair"
    assert engine.tokenizer is not None
    texts = {} if args.no_docs else {"Python's help topics": text.pydoc_text()}
    texts |= {path.stem: text.read_text(path) for path in args.text}
    found: dict[str, list[list[float]]] = {}
    for name, content in texts.items():
        ids = text.token_ids(engine.tokenizer, content[: 8 * args.prompts * (args.context + args.new)])
        for number in range(args.prompts):
            first = number * (len(ids) - args.context - args.new) // max(1, args.prompts - 1)
            tokens = ids[first : first + args.context + args.new]
            if len(tokens) < args.context + args.new:
                made.error(f"{name}: {len(ids)} tokens are too few for a prompt of {args.context}")
            received = None
            if any(p.name == "H2O" for p in wanted):
                received = policies.received_attention(engine.hierarchy.target.model, tokens[: args.context])
            for budget in args.budgets:
                values = measure(engine, tokens, args.context, budget, wanted, received)
                place = {"model": model, "text": name, "context": args.context, "budget": budget}
                old = found.setdefault(json.dumps(place), [[] for _ in wanted])
                for all_of, new in zip(old, values, strict=True):
                    all_of += new
                keep(out, args.seed, [*rows(old, wanted, place)])


def keep(out: Path, seed: int, fresh: list[Record]) -> None:
    """Put rows into the file, in the place of older ones of the same policy, model, text and sizes."""
    key = ("model", "context", "budget", "text", "policy", "chunk")
    content = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"evaluated": {}, "rows": []}
    new = {tuple(row[k] for k in key) for row in fresh}
    others = [row for row in content["rows"] if tuple(row[k] for k in key) not in new]
    order = {(p.name, p.chunk): i for i, p in enumerate(POLICIES)}
    content["rows"] = sorted(
        [*others, *fresh],
        key=lambda row: (*(row[k] for k in key[:4]), order.get((row["policy"], row["chunk"]), 99)),
    )
    place = "{model}, {context} tokens, budget {budget}, {text}".format(**fresh[0])
    content["evaluated"][place] = header(seed)
    write(out, content)
    for row in fresh:
        print(
            "{policy}, chunk {chunk}, budget {budget}: {overlap:.4f} ({gain:+.4f})".format(**row), flush=True
        )
