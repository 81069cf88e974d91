"""Compare greedy texts of ``exact=True``: plain decoding against two and three levels, and their times.

    python -m scripts.checks.exact.bit_exact                 # 7B and 8B, 100,000 tokens each
    python -m scripts.checks.exact.bit_exact --shapes llama-3.1-8b --prompt 122880 --new 256 --tokens 4096
    python -m scripts.checks.exact.bit_exact --shapes pair --device cpu --prompt 1700 --tokens 400

Uses the embedded pair inflated to real shapes; ``pair`` is the pair itself. A parting is a prompt whose texts
differ: after it they are other texts. The goal is none, ties of the two largest logits included, which are
counted in the first prompts. Milliseconds a token with and without ``exact``, of the same prompts; the goal
is at most 10 % more. Every engine keeps a cache of its own. Exit code 1 where a text parts; the last line is
JSON.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from scripts.checks.report import Report, parser
from triforce_tree import Engine, load
from triforce_tree.eval.text import pydoc_text, token_ids
from triforce_tree.loading.inflate import inflate_pair

_GOAL = 1.1


def engines(shape: str, args: Any) -> tuple[dict[tuple[int, bool], Engine], Any]:
    """Engines by levels and ``exact``, over the same models, and their tokenizer."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    options: dict[str, Any] = {"profile": False, "prefix_cache": False}
    if shape == "pair":
        first = load(device=args.device, dtype=dtype, levels=1, **options)
        target, draft, tokenizer = None, None, first.tokenizer
        options |= {"device": args.device, "dtype": dtype}
    else:
        target, draft, tokenizer = inflate_pair(shape, device, dtype)
    made = {}
    for levels, exact in itertools.product((1, *args.levels), (True, False)):
        made[levels, exact] = load(
            target, draft if levels > 1 else None, tokenizer=tokenizer, levels=levels, exact=exact, **options
        )
    return made, tokenizer


def compare(shape: str, args: Any, report: Report) -> None:
    """All prompts of one shape."""
    made, tokenizer = engines(shape, args)
    text = token_ids(tokenizer, pydoc_text())
    count = -(-args.tokens // args.new)
    step = max(1, (len(text) - args.prompt) // count)
    partings: dict[tuple[int, bool], list[tuple[int, int]]] = {key: [] for key in made}
    seconds, tokens, ties = dict.fromkeys(made, 0.0), 0, 0
    for number in range(count):
        prompt = [*text[number * step : number * step + args.prompt]]
        if len(prompt) < args.prompt:
            raise SystemExit(f"the text has {len(text):,} tokens, too few for prompts of {args.prompt:,}")
        how: dict[str, Any] = {"max_new_tokens": args.new, "do_sample": False, "seed": 0}
        texts: dict[tuple[int, bool], list[int]] = {}
        timed = number < args.timed
        for key, engine in made.items():
            if not key[1] and not timed:
                continue  # Without exact only times are wanted, and how often texts part.
            out = engine.generate(prompt, **how)
            texts[key] = out.sequences[0, args.prompt :].tolist()
            # The first prompt also captures graphs.
            if timed and number:
                seconds[key] += out.decode_seconds / len(texts[key])
        for key, own in texts.items():
            plain = texts[1, key[1]]
            if own != plain:
                both = zip(own, plain, strict=False)
                at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(own), len(plain)))
                partings[key].append((number, at))
        tokens += len(texts[1, True])
        if number < args.ties:
            logits = made[1, True].generate(prompt, output_logits=True, **how).logits
            top = torch.stack([row[0].topk(2).values for row in logits])
            ties += int((top[:, 0] == top[:, 1]).sum())
        print(f"{shape}: {tokens:,} tokens, {sum(map(len, partings.values()))} partings", file=sys.stderr)
    measured = max(1, min(args.timed, count) - 1)
    times = {key: 1e3 * total / measured for key, total in seconds.items()}
    for levels in (1, *args.levels):
        slower = times[levels, True] / times[levels, False] if times[levels, False] else None
        report.add(
            f"{shape}, levels={levels}",
            not partings[levels, True],
            tokens=tokens,
            partings=partings[levels, True],
            partings_without_exact=f"{len(partings[levels, False])} of {min(args.timed, count)} prompts",
            ties=f"{ties} of {min(args.ties, count) * args.new} tokens",
            ms_exact=times[levels, True],
            ms=times[levels, False],
            ratio=slower,
            within_goal=slower is not None and slower <= _GOAL,
        )


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--shapes", nargs="*", default=["llama-2-7b", "llama-3.1-8b"], help="or pair")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    dtypes = ("float32", "bfloat16", "float16")
    made.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of models")
    made.add_argument("--levels", type=int, nargs="*", default=[2, 3], help="compared with plain decoding")
    made.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=512, help="tokens of a text")
    made.add_argument("--tokens", type=int, default=100_000, help="of all texts of a shape and a mode")
    timed = "prompts that run without exact too; times leave out the first"
    made.add_argument("--timed", type=int, default=4, help=timed)
    made.add_argument(
        "--ties", type=int, default=2, help="prompts whose ties of the largest logits are counted"
    )
    args = made.parse_args(words)
    report = Report()
    for shape in args.shapes:
        compare(shape, args, report)
    return report.finish(options=vars(args))


if __name__ == "__main__":
    sys.exit(main())
