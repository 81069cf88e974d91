"""Makes engines and arguments of ``generate`` from parsed options that several commands share."""

import argparse
import secrets
from typing import Any

import torch

from triforce_tree.api import Tokenizer, load
from triforce_tree.cli.console import PinningBar, screen
from triforce_tree.cli.groups import engine_options
from triforce_tree.cli.prompt import Prompt
from triforce_tree.config import SHOWN, load_arguments
from triforce_tree.engine import Engine
from triforce_tree.loading.checkpoints import PAIR, tokenizer_of
from triforce_tree.loading.gguf_header import gguf_path
from triforce_tree.memory_size import bytes_of
from triforce_tree.planning.machine import bound_memory
from triforce_tree.requests.chat import chats_of
from triforce_tree.requests.inputs import check_lengths
from triforce_tree.runtime import distributed
from triforce_tree.runtime.devices import device_of


def engine_of(args: argparse.Namespace, prompt: Prompt | None = None, new_tokens: int = 0) -> Engine:
    """Returns the engine that the options describe.

    Args:
        prompt: the prompt that it will continue by ``new_tokens`` tokens. If this is too long it is refused
            before weights are read.
    """
    options = engine_options(args)
    if args.device is not None:
        device_of(args.device)
    # From here on each process has a GPU of its own.
    distributed.join(args.device)
    if args.gpu_memory is not None and torch.cuda.is_available():
        # The limit is for the whole process.
        bound_memory(torch.device(args.device or "cuda"), bytes_of(args.gpu_memory, "gpu_memory"))
    tokenizer: Tokenizer | None = args.tokenizer
    if prompt:
        if not isinstance(prompt, str):
            _check_messages(args, prompt)
        source = gguf_path(PAIR / "target" if args.target is None else args.target, args.gguf_file)
        tokenizer = tokenizer_of(args.tokenizer, source)
        check_lengths(source, tokenizer, [prompt], new_tokens)
    models = {
        "drafter": args.drafter,
        "tokenizer": tokenizer,
        "draft_tokenizer": args.draft_tokenizer,
        "gguf_file": args.gguf_file,
        "device": args.device,
        "dtype": args.dtype,
    }
    with PinningBar(None, what="weights into host memory") as pinned:
        engine = load(args.target, args.draft, **models, pinned=pinned, **load_arguments(options))
    offloading = ("offload", "gpu_memory", "host_memory", "offload_weights")
    unused = [name for name in offloading if options.get(name)]
    if unused and engine.target.device.type == "cpu":
        named = ", ".join(unused)
        screen().print(f"{named}: no effect on a CPU, whose memory holds everything anyway")
    if engine.tokenizer is None:
        raise ValueError(f"the target {args.target!r} has no tokenizer in its folder; give --tokenizer")
    return engine


def _check_messages(args: argparse.Namespace, prompt: Prompt) -> None:
    try:
        chats_of(prompt)
    except ValueError as error:
        raise ValueError(f"--messages {args.messages}: {error}" if args.messages else str(error)) from error


def sampling_of(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Returns sampling options and stop strings for ``generate``: the given ones, else the checkpoint's own.

    Temperature 0 is greedy.
    """
    own = engine.target.settings
    found = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    more: dict[str, Any] = {"stop_strings": args.stop} if args.stop else {}
    if args.repetition_penalty is not None:
        more["repetition_penalty"] = args.repetition_penalty
    if args.temperature is None and not own.do_sample:
        found["temperature"] = 0.0
    if found["temperature"] == 0:
        if args.top_k or args.min_p or (args.top_p is not None and args.top_p < 1):
            screen().print(
                "--top-k, --top-p and --min-p change nothing at temperature 0, which takes the most probable "
                "token; give --temperature"
            )
        return {"temperature": 0.0, **more}
    if args.min_p is not None:
        more["min_p"] = args.min_p
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
        if found[name] is None:
            held = getattr(own, name)
            found[name] = default if held is None else held
    if args.temperature is None:
        text = ", ".join(f"{name} {value:g}" for name, value in found.items())
        screen().print(f"sampling as the checkpoint's generation_config says: {text}")
    return {**found, **more}


def seed_of(args: argparse.Namespace) -> int:
    """Returns the seed that was given, else a random one, which all ranks get from rank 0."""
    if args.seed is not None:
        return int(args.seed)
    with distributed.together():
        return distributed.broadcast_object(secrets.randbits(31))


def pair_names(args: argparse.Namespace) -> dict[str, str]:
    """Returns target and drafter as the command line names them, for a benchmark's settings."""
    return {"target": args.target or "embedded", "draft": args.draft or args.drafter or "default"}


def recorded(args: argparse.Namespace, *omitted: str) -> dict[str, Any]:
    """Returns the options that a benchmark records: the engine's without ``omitted``, and tokenizers."""
    shown = {name: getattr(args, name) for name in SHOWN if name not in omitted}
    settings: dict[str, Any] = {"options": {**shown, **args.advanced}}
    for name in ("tokenizer", "draft_tokenizer"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    return settings
