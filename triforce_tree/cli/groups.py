"""Options that several commands share, in groups of ``--help``.

Nothing here imports torch or transformers, as in ``arguments``.
"""

import argparse
from functools import partial
from typing import Any

from triforce_tree.cli.parsing import (
    Given,
    GivenAdvanced,
    GivenSwitch,
    HelpFormatter,
    advanced,
    dtype,
    levels,
    weight_bits,
)
from triforce_tree.config import ADVANCED, SHOWN, HierarchyConfig
from triforce_tree.loading.drafter_choice import DRAFTERS as DRAFTERS

DEFAULTS = HierarchyConfig().as_options()
DTYPES = ("float32", "bfloat16", "float16", "auto")
# Options of ``generate`` and ``chat`` that the checkpoint may have values of its own for.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def add_parser(
    subparsers: Any, name: str, module: str, summary: str, early: str | None = None
) -> argparse.ArgumentParser:
    """Returns the parser of a command.

    Args:
        module: its ``run(args)`` executes the command.
        early: the function of ``cli.early`` that checks its options; by default it has the command's name.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=summary, formatter_class=HelpFormatter
    )
    parser.set_defaults(module=module, early=early or name, on_several_gpus=False)
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON object, as the last line of stdout"
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    return parser


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of ``load`` that were given, including those in ``--advanced``."""
    return {**{name: getattr(args, name) for name in SHOWN if name in args.given}, **args.advanced}


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the models, the hierarchy and the memory of an engine."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        help="folder or hub id of the target model, or a .gguf file; without it, the embedded pair's target",
    )
    group.add_argument(
        "--draft",
        help="folder or hub id of the draft model; without it, the embedded draft for the "
        "embedded target, and MTP layers or suffix matching for any other",
    )
    group.add_argument(
        "--drafter",
        metavar=f"{{{','.join(DRAFTERS)},FOLDER}}",
        help="what proposes tokens: the draft model, suffix matching (lookup), the MTP layers in the "
        "target's checkpoint (mtp), or a folder or hub id with Medusa heads, an EAGLE-3 head or a DFlash "
        "block; by default the draft model if there is one, else MTP layers if there are some",
    )
    group.add_argument("--tokenizer", help="folder or hub id of the tokenizer; without it, the target's own")
    group.add_argument(
        "--draft-tokenizer", help="folder or hub id of the draft's tokenizer; without it, the draft's own"
    )
    group.add_argument(
        "--gguf-file",
        metavar="NAME",
        help="GGUF file in the target's folder or hub repository, with the target and its tokenizer",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1 ...; without it, CUDA if available")
    group.add_argument(
        "--dtype",
        type=dtype,
        choices=DTYPES,
        help="of the weights, or half, fp16, bf16, fp32; without it, the checkpoint's own (for GGUF "
        "bfloat16, and on the CPU the blocks of the file)",
    )
    group = parser.add_argument_group("hierarchy")
    add = partial(group.add_argument, action=Given)
    add(
        "--levels",
        type=levels,
        default=DEFAULTS["levels"],
        help="3 is the whole hierarchy, 2 the draft under the target, 1 autoregressive decoding, auto takes "
        "3 for prompts of at least twice the budget, else 2",
    )
    add(
        "--tree",
        default=DEFAULTS["tree"],
        help="shape of the draft's token trees: chain:4, best-first:6,5,4 (widths by depth), sequoia:16x4 "
        "(size x depth), static:0;0.0;1 (rank paths), or a file tree.json of rank paths; by default "
        "best-first:6,5,4, on a GPU best-first:4,4,3,2,1,1",
    )
    add(
        "--budget",
        type=int,
        default=DEFAULTS["budget"],
        help="tokens in the retrieval cache; by default 1024 to 32,768 by the prompt's length and the model",
    )
    add(
        "--retrieval-weight-bits",
        type=weight_bits,
        default=DEFAULTS["retrieval_weight_bits"],
        help="bits of the retrieval level's weights, 16, 8 or 4: fewer are faster and do not change the "
        "distribution of the output; by default auto: 8 where the target's layers are large and memory is to "
        "spare, else 16",
    )
    add(
        "--kv-bits",
        type=int,
        default=DEFAULTS["kv_bits"],
        help="bits of the target's keys and values, 16 (its own dtype) or 8: the text is exact for the "
        "target with that cache",
    )
    group.add_argument(
        "--exact",
        "--no-exact",
        action=GivenSwitch,
        default=False,
        help="bit-exact: greedy text is that of plain decoding with --exact bit by bit, ties included, in 16 "
        "bits too; a little slower",
    )
    group.add_argument(
        "--advanced",
        action=GivenAdvanced,
        type=advanced,
        default={},
        metavar="NAME=VALUE",
        help="an option of docs/advanced.md, as in gamma=8; give it again for several: "
        + ", ".join(name for name in ADVANCED if name != "select_chunks"),
    )
    parser.set_defaults(given=frozenset())
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--offload",
        "--no-offload",
        action=GivenSwitch,
        help="keep keys and values in host memory, as far as the device does not hold them; options that "
        "are not given are chosen for it, and the memory map is shown",
    )
    group.add_argument(
        "--gpu-memory",
        action=Given,
        metavar="SIZE",
        help="device memory limit, as in 24GiB; without --offload, a cache that does not fit into it is "
        "offloaded, and so are weights",
    )
    group.add_argument(
        "--host-memory",
        action=Given,
        metavar="SIZE",
        help="host memory limit for the cache and weights that are offloaded, as in 48GiB; without it, 4 "
        "GiB or a tenth of the memory is left to the system, whichever is more",
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a text to continue or a chat."""
    parser.add_argument(
        "prompt",
        nargs="?",
        help="text file to continue; - or nothing for stdin; with --chat a document before the question",
    )
    group = parser.add_argument_group("chat (by the tokenizer's chat template)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--chat", metavar="QUESTION", help="ask the model instead of continuing a text")
    source.add_argument(
        "--messages",
        metavar="FILE",
        help='JSON file with a list of messages, [{"role": "user", "content": "..."}, ...]; a last one of '
        "the assistant is continued",
    )
    group.add_argument("--system", metavar="TEXT", help="system message before the question of --chat")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling (what is not given is the checkpoint's own, by its generation_config.json)"
    )
    group.add_argument(
        "--temperature",
        type=float,
        help="0 takes the most probable token, as a checkpoint does that names no sampling",
    )
    group.add_argument(
        "--top-p",
        type=float,
        help="sample from the most probable tokens up to this probability mass; 1 for all",
    )
    group.add_argument(
        "--top-k",
        type=int,
        help="sample from this many tokens; 0 for all, also where the checkpoint names none (transformers "
        "then takes 50)",
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="leave out tokens of less than P times the best probability"
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="divide the logits of tokens that the text has by X; 1 for none",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end after this text, which stays in the output; give the option again for several",
    )
    group.add_argument(
        "--seed", type=int, help="of all draws; without it, a random one, which --json reports"
    )


def add_seed_and_out(parser: argparse.ArgumentParser, drawn: str = "all draws") -> None:
    """Adds the options for the seed of the draws and for the results file of a benchmark."""
    parser.add_argument("--seed", type=int, default=0, help=f"of {drawn}")
    parser.add_argument(
        "--out",
        help="JSON-lines file for the measurements, with a table (.md) beside it; an interrupted run "
        "continues with the same file",
    )


def add_text_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text (by default the help topics that come with Python)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--file", help="a text file")
    source.add_argument(
        "--dataset",
        help="Hugging Face data set, for example emozilla/pg19-test, or a .jsonl, .json, .csv or .parquet "
        "file",
    )
    group.add_argument("--split", default="test", help="of the data set")
    group.add_argument("--column", default="text", help="of the data set")
