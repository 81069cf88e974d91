"""From parsed options that several commands share to engines and arguments of ``generate``."""

import argparse
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from triforce_tree.api import load
from triforce_tree.cli.console import PinningBar, screen
from triforce_tree.cli.groups import AUTO, ENGINE_OPTIONS, LOSSY_OPTION, MEMORY_OPTIONS, NONE
from triforce_tree.engine import Engine
from triforce_tree.eval import text
from triforce_tree.eval.texts import registry
from triforce_tree.generation.options import check_sampling_options
from triforce_tree.memory_size import bytes_of
from triforce_tree.planning.machine import bound_memory
from triforce_tree.runtime import distributed
from triforce_tree.runtime.devices import device_of


def engine_of(args: argparse.Namespace) -> Engine:
    """The engine that the options describe."""
    names = (*ENGINE_OPTIONS, *MEMORY_OPTIONS, LOSSY_OPTION)
    options = {name: getattr(args, name) for name in names if name in args.given}
    if args.device is not None:
        device_of(args.device)
    # From here on each process has a GPU of its own.
    distributed.join(args.device)
    if args.gpu_memory is not None and torch.cuda.is_available():
        # The limit is for the whole process.
        bound_memory(torch.device(args.device or "cuda"), bytes_of(args.gpu_memory, "gpu_memory"))
    profile = {AUTO: None, NONE: False}.get(args.profile, args.profile)
    models = {
        "drafter": args.drafter,
        "tokenizer": args.tokenizer,
        "draft_tokenizer": args.draft_tokenizer,
        "gguf_file": args.gguf_file,
        "device": args.device,
        "dtype": args.dtype,
        "profile": profile,
    }
    with PinningBar(None, what="weights into host memory") as pinned:
        engine = load(args.target, args.draft, **models, pinned=pinned, **options)
    offloading = ("offload", "gpu_memory", "host_memory", "offload_weights")
    unused = [name for name in offloading if options.get(name)]
    if unused and engine.hierarchy.target.device.type == "cpu":
        named = ", ".join("--" + name.replace("_", "-") for name in unused)
        screen().print(f"{named}: no effect on a CPU, whose memory holds everything anyway")
    if engine.tokenizer is None:
        raise ValueError(f"the target {args.target!r} has no tokenizer in its folder; give --tokenizer")
    return engine


def check_sampling(args: argparse.Namespace) -> None:
    """Raise ValueError for a temperature, top_p or top_k out of range."""
    check_sampling_options({"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k})


def sampling_of(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """temperature, top_p and top_k for ``generate``: as given, else the checkpoint's own; 0 is greedy."""
    own = engine.hierarchy.target.model.generation_config
    found = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    if args.temperature is None and not own.do_sample:
        found["temperature"] = 0.0
    if found["temperature"] == 0:
        if args.top_k or (args.top_p is not None and args.top_p < 1):
            screen().print(
                "--top-k and --top-p change nothing at temperature 0, which takes the most probable token; "
                "give --temperature"
            )
        return {"temperature": 0.0}
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
        if found[name] is None:
            held = getattr(own, name)
            found[name] = default if held is None else held
    if args.temperature is None:
        text = ", ".join(f"{name} {value:g}" for name, value in found.items())
        screen().print(f"sampling as the checkpoint's generation_config says: {text}")
    return found


def seed_of(args: argparse.Namespace) -> int:
    return secrets.randbits(31) if args.seed is None else args.seed


def pair_names(args: argparse.Namespace) -> dict[str, str]:
    """Target and drafter as the command line names them, for a benchmark's settings."""
    return {"target": args.target or "embedded", "draft": args.draft or args.drafter or "default"}


def recorded(args: argparse.Namespace, *omitted: str) -> dict[str, Any]:
    """What a benchmark keeps of its options: the engine's but ``omitted``, profile and tokenizers."""
    settings: dict[str, Any] = {
        "options": {name: getattr(args, name) for name in ENGINE_OPTIONS if name not in omitted}
    }
    if args.profile != NONE:
        settings["profile"] = args.profile
    for name in ("tokenizer", "draft_tokenizer"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    return settings


def documents(args: argparse.Namespace) -> tuple[str, Iterable[str]]:
    """The name of the text, and its documents."""
    if args.dataset:
        name = f"{args.dataset}/{args.split}/{args.column}"
        return name, text.dataset_texts(args.dataset, args.split, args.column)
    if args.file:
        if Path(args.file).suffix.lower() in text.ROWS:
            raise ValueError(
                f"--file {args.file}: its suffix is that of a data set, not of a text; use --dataset "
                f"{args.file} --column NAME"
            )
        return args.file, [text.read_text(args.file)]
    if args.text:
        source, found = text_source(args)
        if source.copies is not None:
            raise ValueError(
                f"--text {args.text}: passages are copied for prompts of one length, which bench text makes; "
                f"use --text {source.copies} here"
            )
        return source.name, [found]
    if args.texts:
        raise ValueError(f"--texts {args.texts} holds texts by name; give --text NAME as well")
    return text.PYDOC, [text.pydoc_text()]


def text_source(args: argparse.Namespace) -> tuple[registry.TextSource, str]:
    """The text that ``--text`` names, from ``--texts`` or from this machine."""
    here = registry.Texts(args.texts)
    source = here.first(args.text)
    return source, here.read(source)
