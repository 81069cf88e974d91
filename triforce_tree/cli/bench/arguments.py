"""The options of ``bench``; nothing here imports torch, as in ``cli.arguments``."""

from typing import Any

from triforce_tree.cli.groups import add_engine, add_parser, add_seed_and_out, add_text_source
from triforce_tree.cli.parsing import above_zero, depth, field, not_below_zero, positive, temperature

# The names in bench.baselines.METHODS.
METHODS = (
    "triforce",
    "triforce-3-level",
    "triforce-2-level",
    "triforce-autoregressive",
    "transformers-static",
    "transformers-dynamic",
    "transformers-assistant",
    "transformers-prompt-lookup",
)
PG19 = "emozilla/pg19-test"


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    bench = commands.add_parser(
        "bench",
        help="Measure speed on a text, a data set (text) or books (pg19), accuracy (needle), or a server "
        "(serve).",
    )
    kinds = bench.add_subparsers(required=True, metavar="kind")
    _text(kinds)
    _pg19(kinds)
    _needle(kinds)
    _serve(kinds)


def _text(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "text",
        "triforce_tree.cli.bench.text",
        "Time decoding methods on prompts cut from real text, without prefill. Medians over prompts; "
        "speed-ups over this engine's plain decoding, and over the fastest of transformers' static, dynamic "
        "and assisted decoding. Prompt lookup is timed too, but is no baseline: it copies what a small model "
        "repeats.",
        "bench",
    )
    _timed(parser)
    add_text_source(parser)
    add_engine(parser)


def _pg19(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "pg19",
        "triforce_tree.cli.bench.text",
        "Time decoding methods on the beginnings of books (PG-19), as bench text does. Books are fetched "
        "from the hub, or read from --data.",
        "bench",
    )
    parser.set_defaults(file=None, split="test", column="text")
    parser.add_argument(
        "--data",
        dest="dataset",
        default=PG19,
        metavar="PATH",
        help="books in a column `text`: a .jsonl, .json, .parquet or .csv file, or a folder",
    )
    _timed(parser)
    add_engine(parser)


def _timed(parser: Any) -> None:
    parser.add_argument(
        "--lengths",
        "--context",
        type=positive,
        nargs="+",
        default=[8192],
        metavar="N",
        help="tokens of each prompt",
    )
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens to generate")
    parser.add_argument("--prompts", type=positive, default=3, help="number of different prompts")
    parser.add_argument(
        "--temperatures", type=temperature, nargs="+", default=[0.0, 0.8], metavar="T", help="0 is greedy"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        metavar="NAME",
        help="by default all that the models can run; of: " + ", ".join(METHODS),
    )
    add_seed_and_out(parser)


def _needle(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "needle",
        "triforce_tree.cli.bench.needle",
        "Plant a six-digit number at some depth of a long text and ask for it at the end (greedy decoding, "
        "exact match).",
        "bench",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[2048, 4096, 8192],
        metavar="N",
        help="tokens of each prompt",
    )
    parser.add_argument(
        "--depths",
        type=depth,
        nargs="+",
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        metavar="D",
        help="positions of the number: 0 is the start, 1 the end",
    )
    parser.add_argument("--trials", type=positive, default=2, help="needles for each length and depth")
    parser.add_argument(
        "--through",
        nargs="+",
        choices=("hierarchy", "target"),
        default=["hierarchy"],
        help="decode with all levels, with the target alone, or with both",
    )
    add_seed_and_out(parser, "names, numbers and positions")
    parser.add_argument("--plot", help="image file for a heat map, such as map.png (pip install matplotlib)")
    add_text_source(parser)
    add_engine(parser)


def _serve(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "serve",
        "triforce_tree.cli.bench.serve",
        "Send requests to a running server with OpenAI's API, ours or another, and measure when their tokens "
        "come: percentiles of the time to the first token and of the time of a token, and tokens per second. "
        "Every prompt has a beginning of its own. A key is taken from $OPENAI_API_KEY.",
        "bench_serve",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server, up to /v1")
    parser.add_argument("--model", help="what the server calls the model; by default its first one")
    parser.add_argument("--chat", action="store_true", help="send chats instead of completions")
    parser.add_argument(
        "--field", action="append", type=field, default=[], metavar="NAME=VALUE",
        help="a further field of each request, as in temperature=0 or ignore_eos=true; give it again for "
        "several",
    )  # fmt: skip
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--clients", type=positive, nargs="+", metavar="N",
        help="so many clients send a request each, and the next one when it is answered; by default 1",
    )  # fmt: skip
    when.add_argument(
        "--rate", type=above_zero, nargs="+", metavar="R",
        help="requests per second, at random times (a Poisson process)",
    )  # fmt: skip
    parser.add_argument(
        "--pause", type=not_below_zero, default=0.0, metavar="SECONDS",
        help="mean of the random time that a client waits before each request",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        nargs="+",
        default=[1024],
        metavar="N",
        help="tokens of a prompt, about",
    )
    parser.add_argument("--new-tokens", type=positive, default=128, help="most tokens of a reply")
    parser.add_argument(
        "--requests", type=positive, metavar="N",
        help="requests of each measurement; by default four for each client, or 32 with --rate",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=above_zero, metavar="S",
        help="of each measurement at most; requests that have not ended by then are cut",
    )  # fmt: skip
    add_seed_and_out(parser, "prompts and times")
    add_text_source(parser)
