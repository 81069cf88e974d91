"""What the command line accepts: commands, their options, and the text of ``--help``.

Nothing here imports torch or transformers, so that help, the version and a misspelt option answer at
once. A command names the module whose ``run(args)`` carries it out.
"""

import argparse
from typing import Any

from triforce_tree import __version__
from triforce_tree.commands.parsing import Given, GivenTrue, HelpFormatter, Parser, depth, levels, positive
from triforce_tree.config import HierarchyConfig

DEFAULTS = HierarchyConfig().as_options()
AUTO, NONE = "auto", "none"
DTYPES = ("float32", "bfloat16", "float16", "auto")
ENGINE_OPTIONS = (
    "levels",
    "gamma",
    "tree",
    "budget",
    "chunk",
    "recent",
    "refresh",
    "middle_bits",
    "sinks",
    "window",
)
MEMORY_OPTIONS = ("offload", "gpu_memory", "offload_weights")
# The names in bench.baselines.METHODS.
METHODS = (
    "triforce-3-level",
    "triforce-2-level",
    "triforce-autoregressive",
    "transformers-static",
    "transformers-dynamic",
    "transformers-assistant",
    "transformers-prompt-lookup",
)


def parser() -> Parser:
    top = Parser(
        prog="triforce-tree",
        description="Lossless speculative decoding with hierarchical drafting, for long contexts.",
        formatter_class=HelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(required=True, metavar="command")
    _generate(commands)
    bench = commands.add_parser("bench", help="Measure speed (text) or retrieval accuracy (needle).")
    kinds = bench.add_subparsers(required=True, metavar="kind")
    _bench_text(kinds)
    _bench_needle(kinds)
    _check(commands)
    _tune(commands)
    _demo(commands)
    return top


def _generate(subparsers: Any) -> None:
    parser = _add_parser(
        subparsers,
        "generate",
        "triforce_tree.commands.generate",
        "Continue a text, by exactly the target's own law; new text to stdout.",
    )
    parser.add_argument("prompt", nargs="?", default="-", help="text file with the prompt; - is stdin")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="tokens to write at most")
    parser.add_argument(
        "--compare", action="store_true", help="then decode the same prompt with the target alone"
    )
    _add_sampling(parser)
    _add_models(parser)
    _add_hierarchy(parser, AUTO)
    parser.set_defaults(on_several_cards=True)


def _bench_text(subparsers: Any) -> None:
    parser = _add_parser(
        subparsers,
        "text",
        "triforce_tree.commands.bench_text",
        "Time every way of decoding on prompts cut from real text; prefill is kept apart. Medians over "
        "prompts, speed-up against the fastest of transformers' static, dynamic and assisted decoding.",
    )
    parser.add_argument("--context", type=positive, default=8192, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens to write")
    parser.add_argument("--prompts", type=positive, default=3, help="different prompts")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="T", help="0 is greedy"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=sorted(METHODS), metavar="NAME", help="of: " + ", ".join(METHODS)
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument(
        "--out", help="JSON-lines file for every single measurement; a run that was cut short goes on there"
    )
    _add_text_source(parser)
    _add_models(parser)
    _add_hierarchy(parser)


def _bench_needle(subparsers: Any) -> None:
    parser = _add_parser(
        subparsers,
        "needle",
        "triforce_tree.commands.bench_needle",
        "Plant a six-digit number at some depth of a long text and ask for it at the end (greedy, exact).",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[2048, 4096, 8192],
        metavar="N",
        help="tokens of a prompt",
    )
    parser.add_argument(
        "--depths",
        type=depth,
        nargs="+",
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        metavar="D",
        help="where the fact stands: 0 the start, 1 the end",
    )
    parser.add_argument("--trials", type=positive, default=2, help="needles for each length and depth")
    parser.add_argument(
        "--through",
        nargs="+",
        choices=("hierarchy", "target"),
        default=["hierarchy"],
        help="the engine with its draft and retrieval levels, and/or the target alone",
    )
    parser.add_argument("--seed", type=int, default=0, help="of names, numbers and places")
    parser.add_argument("--out", help="JSON-lines file for every answer; a run cut short goes on there")
    parser.add_argument("--plot", help="PNG file for a heat map (needs matplotlib)")
    _add_text_source(parser)
    _add_models(parser)
    _add_hierarchy(parser)


def _check(subparsers: Any) -> None:
    parser = _add_parser(
        subparsers,
        "check",
        "triforce_tree.commands.check",
        "Prove that the output is the target's own: greedy tokens equal to transformers' decoding of the "
        "same model, sampled tokens by the exact law at every level. Exit code 1 if not.",
    )
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens of the prompts; without it 1, 67, 1021 and twice the budget + 455",
    )
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens to compare")
    parser.add_argument(
        "--draws", type=int, default=400, help="sampled tokens for each prompt and level; 0 for no such test"
    )
    parser.add_argument("--contexts", type=positive, default=4, help="prompts of the sampling test")
    parser.add_argument(
        "--context", type=positive, help="tokens of each at most; without it twice the budget + 455"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling test")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument(
        "--acceptance",
        action="store_true",
        help="also measure acceptance by sibling rank, and name the tree shapes that fit it",
    )
    _add_text_source(parser)
    _add_models(parser)
    _add_hierarchy(parser)


def _tune(subparsers: Any) -> None:
    parser = _add_parser(
        subparsers,
        "tune",
        "triforce_tree.commands.tune",
        "Measure which settings are fastest on this machine, with these models and this kind of text, and "
        "write them into a profile that load and generate pick up. Options of the hierarchy that are given "
        "stay as they are.",
    )
    parser.add_argument(
        "--context", type=positive, nargs="+", default=[8192], metavar="N", help="tokens of the prompts"
    )
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens of each generation")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.6], metavar="T", help="0 is greedy"
    )
    parser.add_argument(
        "--prompts", type=positive, default=3, help="generations of each setting, behind different places"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=900.0,
        help="begin nothing new after this time; the same command goes on",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument(
        "--out",
        help="the profile; without it, the one that load looks for. Measurements go into a file beside it, "
        "where a run that was cut short goes on",
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier measurements of this profile")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be tried, and measure nothing"
    )
    _add_text_source(parser)
    _add_models(parser)
    _add_hierarchy(parser, profile=None)


def _demo(subparsers: Any) -> None:
    parser = _add_parser(
        subparsers,
        "demo",
        "triforce_tree.demo",
        "Continue a long piece of Python's own help text with the embedded pair, and compare with ordinary "
        "decoding. Ends with one line of JSON, asked for or not.",
    )
    parser.add_argument("--prompt-tokens", type=positive, default=8192, help="tokens of the prompt")
    parser.add_argument(
        "--start",
        type=positive,
        default=105_000,
        help="token of the topics that the prompt begins with",
    )
    parser.add_argument("--new-tokens", type=positive, default=192, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    _add_models(parser)
    _add_hierarchy(parser, AUTO)
    parser.set_defaults(levels=3, given=frozenset({"levels"}))


def _add_parser(subparsers: Any, name: str, module: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=summary, formatter_class=HelpFormatter
    )
    parser.set_defaults(module=module, on_several_cards=False)
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON object, as the last line of stdout"
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", help="folder or hub id of the model to decode; without it, the embedded pair's target"
    )
    group.add_argument(
        "--draft",
        help="folder or hub id of the draft model (same tokenizer); without it, the embedded draft for the "
        "embedded target and prompt lookup for any other",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1 ...; without it, CUDA where there is one")
    group.add_argument(
        "--dtype", choices=DTYPES, help="without it, float32 on the CPU and the checkpoint's own elsewhere"
    )


def _add_hierarchy(parser: argparse.ArgumentParser, profile: str | None = NONE) -> None:
    """Options of the engine; ``profile``: default of ``--profile``, None for no such option."""
    group = parser.add_argument_group("hierarchy")
    options: dict[str, tuple[Any, str]] = {
        "levels": (
            levels,
            "3 is the whole hierarchy, 2 the draft under the target, 1 ordinary decoding, auto takes 3 for "
            "prompts of at least twice the budget",
        ),
        "gamma": (int, "tokens that the middle level gathers for one pass of the target"),
        "tree": (
            str,
            "shape of the draft's token trees: chain:4, best-first:6,5,4 (widths by depth), sequoia:16x4 "
            "(size x depth), static:0;0.0;1 (rank paths)",
        ),
        "budget": (int, "tokens in the middle level's retrieval cache"),
        "chunk": (int, "tokens of one retrieved chunk"),
        "recent": (int, "newest tokens that the retrieval cache always holds"),
        "refresh": (
            int,
            "every how many passes the middle level chooses its chunks anew; 0 leaves the choice to the "
            "target's passes",
        ),
        "middle_bits": (
            int,
            "bits of the middle level's weights, 16, 8 or 4: fewer draft faster and never change the output "
            "(on a GPU)",
        ),
        "sinks": (int, "first tokens that the draft's cache keeps"),
        "window": (int, "newest tokens that the draft's cache keeps"),
    }
    for name in ENGINE_OPTIONS:
        kind, text = options[name]
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, default=DEFAULTS[name], action=Given, help=text)
    parser.set_defaults(given=frozenset(), profile=NONE, **dict.fromkeys(MEMORY_OPTIONS))
    if profile is not None:
        _add_memory(parser)
        group.add_argument(
            "--profile",
            default=profile,
            metavar="PATH",
            help="file of settings that triforce-tree tune has measured, auto for the one of this machine "
            "and these models, or none; options that are given come first",
        )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--offload",
        action=GivenTrue,
        help="keep keys and values in host memory, as far as the device does not hold them; settings that "
        "are not given are chosen for it, and the plan is shown",
    )
    group.add_argument(
        "--gpu-memory",
        action=Given,
        metavar="SIZE",
        help="most device memory to take, as in 24GiB; without --offload, a cache that does not fit into it "
        "is offloaded, and so are weights",
    )
    group.add_argument(
        "--offload-weights",
        action=GivenTrue,
        help="keep the weights of the target's layers in host memory too and stream them past each pass of "
        "level 2, even if they fit; with --offload or --gpu-memory, weights that do not fit are in any case",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    group.add_argument("--top-p", type=float, default=1.0, help="keep the best tokens up to this mass")
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="keep this many tokens; 0 keeps all (transformers' own default is 50)",
    )
    group.add_argument(
        "--seed", type=int, help="of all draws; without it, a new one each time, reported by --json"
    )


def _add_text_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text (by default the help topics that come with Python)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--file", help="a text file")
    source.add_argument("--dataset", help="name of a Hugging Face data set, for example emozilla/pg19-test")
    group.add_argument("--split", default="test", help="of the data set")
    group.add_argument("--column", default="text", help="of the data set")
