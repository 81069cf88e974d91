"""The options of ``bench``; nothing here imports torch, as in ``cli.arguments``."""

from typing import Any

from triforce_tree.cli.groups import add_hierarchy, add_models, add_parser, add_text_source
from triforce_tree.cli.parsing import depth, positive

# The names in eval.baselines.METHODS.
METHODS = (
    "triforce-3-level",
    "triforce-2-level",
    "triforce-autoregressive",
    "transformers-static",
    "transformers-dynamic",
    "transformers-assistant",
    "transformers-prompt-lookup",
)

# The names in eval.ruler.TASKS.
TASKS = ("single", "multi-key", "multi-value", "multi-query", "variables", "common-words", "frequent-words")


def add(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    bench = commands.add_parser("bench", help="Measure speed (text) or accuracy (needle, ruler).")
    kinds = bench.add_subparsers(required=True, metavar="kind")
    _text(kinds)
    _needle(kinds)
    _ruler(kinds)


def _text(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "text",
        "triforce_tree.cli.bench.text",
        "Time decoding methods on prompts cut from real text, without prefill. Medians over prompts; "
        "speed-up against the fastest of transformers' static, dynamic and assisted decoding.",
    )
    parser.add_argument("--context", type=positive, default=8192, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens to generate")
    parser.add_argument("--prompts", type=positive, default=3, help="number of different prompts")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="T", help="0 is greedy"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=sorted(METHODS), metavar="NAME", help="of: " + ", ".join(METHODS)
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument(
        "--out", help="JSON-lines file for the measurements; an interrupted run continues with the same file"
    )
    add_text_source(parser)
    add_models(parser)
    add_hierarchy(parser)


def _needle(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "needle",
        "triforce_tree.cli.bench.needle",
        "Plant a six-digit number at some depth of a long text and ask for it at the end (greedy decoding, "
        "exact match).",
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
    _answers(parser, "names, numbers and positions")
    parser.add_argument("--plot", help="image file for a heat map, such as map.png (pip install matplotlib)")
    add_text_source(parser)
    add_models(parser)
    add_hierarchy(parser)


def _ruler(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "ruler",
        "triforce_tree.cli.bench.ruler",
        "Ask for what was planted into a long text, in seven ways (after RULER): greedy decoding, share of "
        "the expected strings in the answer.",
    )
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[4096, 8192], metavar="N", help="tokens of each prompt"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="NAME",
        help="of: " + ", ".join(TASKS),
    )
    parser.add_argument("--trials", type=positive, default=2, help="questions for each length and task")
    _answers(parser, "words, numbers and positions")
    add_text_source(parser)
    add_models(parser)
    add_hierarchy(parser)


def _answers(parser: Any, drawn: str) -> None:
    """What benchmarks of accuracy share."""
    parser.add_argument(
        "--through",
        nargs="+",
        choices=("hierarchy", "target"),
        default=["hierarchy"],
        help="decode with all levels, with the target alone, or with both",
    )
    parser.add_argument("--seed", type=int, default=0, help=f"of {drawn}")
    parser.add_argument(
        "--out", help="JSON-lines file for the answers; an interrupted run continues with the same file"
    )
