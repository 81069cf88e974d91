"""The options of ``bench``; nothing here imports torch, as in ``cli.arguments``."""

from typing import Any

from triforce_tree.cli.groups import add_hierarchy, add_models, add_parser, add_seed_and_out, add_text_source
from triforce_tree.cli.parsing import depth, positive, temperature

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
        "bench", help="Measure speed on a text, a data set (text) or books (pg19), or accuracy (needle)."
    )
    kinds = bench.add_subparsers(required=True, metavar="kind")
    _text(kinds)
    _pg19(kinds)
    _needle(kinds)


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
    add_models(parser)
    add_hierarchy(parser)


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
    add_models(parser)
    add_hierarchy(parser)


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
    add_models(parser)
    add_hierarchy(parser)
