"""The options of ``bench batch | offload | kernels | workloads``; nothing here imports torch."""

import argparse
from typing import Any

from triforce_tree.cli.groups import add_hierarchy, add_models, add_parser, add_seed_and_out, add_text_source
from triforce_tree.cli.parsing import positive, temperature

# The names in eval.workloads.shapes.FAMILIES, and in eval.workloads.measure.PARTS.
WORKLOADS = ("deft", "fasttree", "pat", "long")
PARTS = ("attention", "decoding")
_MODULE = "triforce_tree.cli.bench.machine."


def add(kinds: Any) -> None:
    """Add the commands to the subparsers of ``bench``."""
    _batch(kinds)
    _offload(kinds)
    _kernels(kinds)
    _workloads(kinds)


def _batch(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "batch",
        _MODULE + "batch",
        "Time batches of 1, 2, 4, 8 ... sequences, beside plain decoding of the same batch and beside the "
        "same sequences one by one.",
        "bench",
    )
    parser.add_argument(
        "--batches", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="B", help="numbers of sequences"
    )
    parser.add_argument("--context", type=positive, default=2048, help="tokens of each prompt")
    _decoding(parser)


def _offload(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "offload",
        _MODULE + "offload",
        "Time decoding with the cache in host memory (--gpu-memory, --offload), beside the fastest plain "
        "decoding of the same engine under the same limit.",
        "bench",
    )
    parser.add_argument("--context", type=positive, default=8192, help="tokens of each prompt")
    parser.add_argument("--prompts", type=positive, default=2, help="number of different prompts")
    parser.add_argument(
        "--plain-tokens", type=positive, default=16, help="tokens of each plain decoding, whose pace is even"
    )
    _decoding(parser)


def _decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens to generate")
    parser.add_argument(
        "--temperatures", type=temperature, nargs="+", default=[0.0], metavar="T", help="0 is greedy"
    )
    add_seed_and_out(parser)
    add_text_source(parser)
    add_models(parser)
    add_hierarchy(parser)


def heads(text: str) -> tuple[int, int, int]:
    """``32/8/128``: query heads, KV heads, elements of a head."""
    try:
        query, kv, dim = map(int, text.split("/"))
    except ValueError:
        query = kv = dim = 0
    if min(query, kv, dim) < 1 or query % kv:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be query heads/KV heads/elements of a head, as in 32/8/128, the first a multiple "
            "of the second"
        )
    return query, kv, dim


def page(text: str) -> int:
    """KV slots of a page; 0 for none."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} must be KV slots of a page, or 0 for a cache without pages"
        )
    return int(text)


def _kernels(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "kernels",
        _MODULE + "kernels",
        "Time one layer of tree attention over all combinations of shapes: our kernel, plain torch, torch's "
        "SDPA, and on a GPU flash-attn and FlashInfer where they are installed; microseconds, bytes on "
        "paper, share of the roofline. On a CPU its own kernels are measured.",
    )
    parser.add_argument(
        "--heads",
        type=heads,
        nargs="+",
        metavar="Q/KV/D",
        help="query heads/KV heads/elements of a head; by default 32/8/128 and 32/32/128, on a CPU 8/2/64",
    )
    parser.add_argument(
        "--prefixes",
        type=positive,
        nargs="+",
        metavar="N",
        help="KV positions before the tree; by default 4096, 32768 and 122880, on a CPU 1024 and 8192",
    )
    parser.add_argument(
        "--trees", type=positive, nargs="+", metavar="T", help="nodes; by default 1, 16, 64, and 256 on a GPU"
    )
    parser.add_argument(
        "--pages",
        type=page,
        nargs="+",
        metavar="P",
        help="KV slots of our kernel's pages, 0 for none; by default 0 and 64, on a CPU 0 and 16",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="by default all but FlexAttention, which compiles for minutes; an unknown name lists them",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; without it, CUDA if available")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="without it, float32 on the CPU and bfloat16 elsewhere",
    )
    add_seed_and_out(parser)


def _workloads(kinds: Any) -> None:
    parser = add_parser(
        kinds,
        "workloads",
        _MODULE + "workloads",
        "Time texts that branch, with the trees of DeFT, FastTree and PAT: attention alone by several ways "
        "of grouping, and decoding by engine.tree beside a batch that stores each text for itself.",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=list(WORKLOADS),
        metavar="NAME",
        help=f"families ({', '.join(WORKLOADS)}) or single ones, as in deft/few-shot-4000x20",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="NAME",
        help="of: " + ", ".join(PARTS),
    )
    parser.add_argument(
        "--scale",
        type=_scale,
        metavar="X",
        help="nodes have so many times the tokens; by default 1, on a CPU 1/32",
    )
    parser.add_argument("--new-tokens", type=positive, default=32, help="tokens of each text that is decoded")
    add_seed_and_out(parser)
    add_text_source(parser)
    add_models(parser)
    add_hierarchy(parser)


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most 1")
    return value
