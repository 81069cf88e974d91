"""The options of ``bench``; nothing here imports torch, as in ``cli.arguments``."""

from typing import Any

from triforce_tree.cli.bench.machine import arguments as machine
from triforce_tree.cli.groups import add_hierarchy, add_models, add_parser, add_seed_and_out, add_text_source
from triforce_tree.cli.parsing import depth, positive, temperature

# The names in eval.baselines.METHODS.
METHODS = (
    "triforce",
    "triforce-3-level",
    "triforce-2-level",
    "triforce-no-draft",
    "triforce-autoregressive",
    "streaming-llm",
    "transformers-static",
    "transformers-dynamic",
    "transformers-assistant",
    "transformers-prompt-lookup",
)

# The data sets in eval.public.catalogue, with the task that is taken without --task.
PUBLIC = {
    "pg19": ("books (PG-19): speed", None),
    "narrativeqa": ("questions about whole books (NarrativeQA): speed and ROUGE-L", ""),
    "longbench": ("LongBench's English tasks: speed and each task's metric", "qasper"),
    "longbench-v2": ("LongBench v2, multiple choice: speed and accuracy", ""),
    "infinitebench": (
        "InfiniteBench, 100,000 tokens and more: speed and metrics",
        "longbook_qa_eng",
    ),
}

# The names in eval.ruler.TASKS.
TASKS = ("single", "multi-key", "multi-value", "multi-query", "variables", "common-words", "frequent-words")

# The names in eval.paper.published.
PAPER = (
    "table-1", "table-2", "table-3", "table-4", "table-5", "table-6", "table-7", "table-8", "figure-3",
    "figure-5", "figure-6",
)  # fmt: skip


def add(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    bench = commands.add_parser(
        "bench",
        help="Measure speed (text, batch, offload), accuracy (needle, ruler), both (public data sets), "
        "kernels, or texts that branch (workloads).",
    )
    kinds = bench.add_subparsers(required=True, metavar="kind")
    _text(kinds)
    _needle(kinds)
    _ruler(kinds)
    for name, (what, task) in PUBLIC.items():
        _public(kinds, name, what, task)
    machine.add(kinds)
    _paper(kinds)


def _text(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "text",
        "triforce_tree.cli.bench.text",
        "Time decoding methods on prompts cut from real text, without prefill. Medians over prompts; "
        "speed-ups over this engine's plain decoding, and over the fastest of transformers' static, dynamic "
        "and assisted decoding. Prompt lookup is timed too, but is no baseline: it copies what a small model "
        "repeats.",
        "bench_text",
    )
    parser.add_argument("--context", type=positive, default=8192, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens to generate")
    parser.add_argument("--prompts", type=positive, default=3, help="number of different prompts")
    parser.add_argument(
        "--temperatures", type=temperature, nargs="+", default=[0.0, 0.8], metavar="T", help="0 is greedy"
    )
    _methods(parser)
    add_seed_and_out(parser)
    add_text_source(parser)
    add_models(parser)
    add_hierarchy(parser)


def _methods(parser: Any) -> None:
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        metavar="NAME",
        help="without it all but triforce-no-draft and streaming-llm, which is lossy; of: "
        + ", ".join(METHODS),
    )


def _public(kinds: Any, name: str, what: str, task: str | None) -> None:
    parser = add_parser(
        kinds,
        name,
        "triforce_tree.cli.bench.public",
        f"{what[0].upper()}{what[1:]}. Rows are fetched from the hub, or read from --data.",
        "public",
    )
    parser.set_defaults(data_set=name, task="", templates=None, parts=["speed"])
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="rows in the data set's own columns: a .jsonl, .json, .parquet, .csv or .zip file, or a folder",
    )
    if task:
        parser.add_argument("--task", default=task, metavar="NAME", help="a task of the data set")
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[8192],
        metavar="N",
        help="tokens of each prompt"
        if task is None
        else "most tokens of each prompt: a longer one loses the middle of its text",
    )
    parser.add_argument("--prompts", type=positive, default=3, help="number of rows of the data")
    parser.add_argument(
        "--temperatures", type=temperature, nargs="+", default=[0.0, 0.6], metavar="T", help="0 is greedy"
    )
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens to generate for speed")
    _methods(parser)
    if task is not None:
        parser.add_argument(
            "--parts",
            nargs="+",
            choices=("speed", "answers"),
            default=["speed", "answers"],
            metavar="NAME",
            help="speed times all methods; answers scores those of all levels and of the target alone",
        )
        parser.add_argument(
            "--templates",
            metavar="FILE",
            help="JSON object of prompts by task, with {context} and {input}, in place of our own",
        )
    add_seed_and_out(parser)
    add_models(parser)
    add_hierarchy(parser)


def _paper(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "paper",
        "triforce_tree.cli.bench.paper",
        "Measure the tables and figures of TriForce (arXiv 2404.11912) with these models, and show them "
        "beside the published numbers.",
    )
    parser.add_argument(
        "--items",
        nargs="+",
        choices=PAPER,
        metavar="NAME",
        help="without it all; table-3 (offloading) is measured only where it is named; of: "
        + ", ".join(PAPER),
    )
    parser.add_argument(
        "--context",
        type=positive,
        help="tokens of a prompt, which other lengths are scaled with; by default 2048, on a GPU the paper's "
        "122,880",
    )
    parser.add_argument(
        "--new-tokens", type=positive, help="tokens to generate; by default 32, on a GPU the paper's 256"
    )
    parser.add_argument("--prompts", type=positive, default=1, help="different prompts for each cell")
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help="time the embedded pair inflated to this shape, as in llama-2-7b, or none; by default "
        "llama-2-7b on a GPU without --target",
    )
    add_seed_and_out(parser)
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
        "bench",
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
        choices=("hierarchy", "target", "streaming-llm"),
        default=["hierarchy"],
        help="decode with all levels, with the target alone, with the target on sinks and a window of the "
        "retrieval budget (lossy), or with several of these",
    )
    add_seed_and_out(parser, drawn)
