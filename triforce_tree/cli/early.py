"""Checks of options and small files, by which a command is refused before torch is imported and weights are
read.

Nothing here imports torch or transformers, which take seconds. Values that pass these checks are checked
again where they are used, because the checks use only what is certain, such as a prompt's tokens without
special ones.
"""

import argparse
import importlib.util
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from triforce_tree.bench.texts import ROWS, pydoc_text
from triforce_tree.cli.groups import SAMPLING, engine_options
from triforce_tree.cli.prompt import prompt_of
from triforce_tree.cli.texts import documents
from triforce_tree.config import HierarchyConfig
from triforce_tree.grammar import Grammar, JSONSchema, Regex
from triforce_tree.loading import gguf_header, model_folder
from triforce_tree.loading.drafter_choice import (
    check_drafter_options,
    names_trained,
    trained_folder,
    with_assistant,
)
from triforce_tree.memory_size import bytes_of
from triforce_tree.option_checks import check_positions
from triforce_tree.requests.option_values import checked
from triforce_tree.runtime.files.text_files import read_text
from triforce_tree.runtime.files.writing import check_picture, check_writable

PAIR = Path(__file__).parents[1] / "pair"
# Tokens that a tokenizer may add to a text.
_SPECIAL = 16
_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")
_LAST_PORT = 65535
_SERVER = ("starlette", "uvicorn", "prometheus_client")


def generate(args: argparse.Namespace) -> None:
    args.grammar = _grammar(args)
    _sampling(args)
    several = args.num_beams > 1 or args.num_return_sequences > 1
    if several and args.compare:
        raise ValueError("--compare decodes one text; leave out --num-beams and --num-return-sequences")
    if args.length_penalty is not None and args.num_beams == 1:
        raise ValueError("--length-penalty is read with --num-beams above 1 alone; leave it out")
    _prompt(args)


def explain(args: argparse.Namespace) -> None:
    checked("temperature", args.temperature)
    _prompt(args)


def chat(args: argparse.Namespace) -> None:
    document = "" if args.file is None else read_text(args.file).rstrip()
    if args.load is not None and (document or args.system is not None):
        raise ValueError("--load continues a saved conversation; leave out --file and --system")
    if args.load is not None and not Path(args.load).is_dir():
        raise FileNotFoundError(f"no such folder: {args.load!r}; give one that /save wrote")
    _sampling(args)
    _engine(args)
    _check_tokens(args, 1, args.max_new_tokens)


def serve(args: argparse.Namespace) -> None:
    if missing := [name for name in _SERVER if importlib.util.find_spec(name) is None]:
        packages = " ".join(_SERVER).replace("_", "-")
        raise ValueError(f"serve needs {', '.join(missing)}; pip install {packages}")
    if args.api_key is not None and not args.api_key.strip():
        # An unset variable of the shell ("$KEY") gives an empty key, with which anyone could ask the server.
        raise ValueError("--api-key is empty; give a key, or leave the option out to let anyone ask")
    if args.port > _LAST_PORT:  # the C library would take its last 16 bits
        raise ValueError(f"--port {args.port} must be at most {_LAST_PORT}")
    if args.max_body is not None:
        bytes_of(args.max_body, "--max-body")
    _engine(args)
    # The socket is bound now and kept, so that nobody else takes the port while the model loads.
    args.listening = _bound(args.host, args.port)


def check(args: argparse.Namespace) -> None:
    if not 0 < args.temperature < float("inf"):
        raise ValueError(
            f"temperature={args.temperature} must be above 0; greedy output is tested in any case"
        )
    _engine(args)
    _cut(args, args.lengths or [], args.new_tokens)
    _cut(args, [args.context] if args.context else [], 1)


def demo(args: argparse.Namespace) -> None:
    checked("temperature", args.temperature)
    _engine(args)
    size = len(pydoc_text().encode())
    if (args.start or 0) + args.prompt_tokens > size:
        after = f" after --start {args.start}" if args.start is not None else ""
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens}{after} exceeds the help topics' {size} bytes; use less"
        )
    _check_tokens(args, args.prompt_tokens, args.new_tokens)


def bench(args: argparse.Namespace) -> None:
    """Checks the options of the benchmarks: ``text`` and ``pg19`` cut prompts from a text, ``needle`` plants
    needles.

    The text around a needle is repeated if it is short.
    """
    if getattr(args, "plot", None):
        check_picture(args.plot)
    if args.out:
        check_writable(args.out)
    _engine(args)
    (_fit if hasattr(args, "depths") else _cut)(args, args.lengths, getattr(args, "new_tokens", 1))


def bench_serve(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError("bench serve needs aiohttp; pip install aiohttp")
    if not re.match(r"https?://\S", args.url):
        raise ValueError(f"--url {args.url!r} is no address; give one as http://127.0.0.1:8000/v1")
    if args.pause and args.rate:
        raise ValueError("--pause is for --clients; leave it out with --rate")
    if args.out:
        check_writable(args.out)
    if args.dataset is None:
        documents(args)


def _prompt(args: argparse.Namespace) -> None:
    """Reads the prompt into ``args.given_prompt``, because stdin can be read only once."""
    _engine(args)
    args.given_prompt = prompt_of(args)
    _check_tokens(args, 1, args.max_new_tokens)


def _grammar(args: argparse.Namespace) -> Grammar | None:
    if args.regex is None and args.json_schema is None:
        return None
    if importlib.util.find_spec("xgrammar") is None:
        raise ValueError("--json-schema and --regex need xgrammar; pip install 'triforce-tree[grammar]'")
    if args.regex is not None:
        return Regex(args.regex)
    try:
        return JSONSchema(Path(args.json_schema).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--json-schema {args.json_schema}: {error}") from error


def _sampling(args: argparse.Namespace) -> None:
    for name in SAMPLING:
        checked(name, getattr(args, name))
    if not all(args.stop):
        raise ValueError("--stop is empty; give strings of at least one character")


def _engine(args: argparse.Namespace) -> None:
    """Checks the options that ``load`` takes, and the files that they name."""
    options = engine_options(args)
    HierarchyConfig.from_options(**options)
    if args.device is not None and _DEVICE.fullmatch(args.device) is None:
        raise ValueError(f"device={args.device!r} is unknown; use cpu or cuda")
    target = _target_source(args)
    args.drafter, args.draft = with_assistant(args.drafter, args.draft)
    draft = args.draft
    if args.target is None and draft is None and args.drafter in (None, "model"):
        draft = str(PAIR / "draft")
    check_drafter_options(args.drafter, draft, options)
    if draft is not None and args.drafter not in (None, "model"):
        raise ValueError(f"drafter={args.drafter!r} uses no draft model, and one was given; leave one out")
    if names_trained(args.drafter):
        trained_folder(args.drafter)
    for source in (target, draft):
        if source is None:
            continue
        source = gguf_header.gguf_path(source)
        if gguf_header.is_gguf(source):
            gguf_header.tensor_count(Path(source))
            if importlib.util.find_spec("gguf") is None:
                raise ValueError(
                    f"{str(source)!r} needs the package gguf, which is not installed; pip install gguf"
                )
        else:
            model_folder.check_folder(source)
    for source in (args.tokenizer, args.draft_tokenizer):
        if source is not None and not gguf_header.is_gguf(source):
            model_folder.folder_of(source)


def _target_source(args: argparse.Namespace) -> str | Path:
    """Returns the folder, hub id or GGUF file of the target that the options name."""
    if args.target is None and args.gguf_file is not None:
        raise ValueError(f"gguf_file={args.gguf_file!r} needs a target: the folder or hub id that holds it")
    target = args.target if args.target is not None else PAIR / "target"
    source: str | Path = gguf_header.gguf_path(target, args.gguf_file)
    return source


def _check_tokens(args: argparse.Namespace, tokens: int, new: int) -> None:
    """Raises ValueError if so many prompt tokens and new ones exceed the target's positions.

    The positions are an upper bound, which is read from the target's small files.
    """
    source = _target_source(args)
    if gguf_header.is_gguf(source):
        positions = gguf_header.named_positions(Path(source))
    else:
        positions = model_folder.named_positions(model_folder.settings_of(source)[1])
    check_positions(tokens, new, positions)


def _fit(args: argparse.Namespace, lengths: Sequence[int], new: int) -> None:
    """Checks prompts of so many tokens against the model's positions, and that their text can be read."""
    if args.dataset is None:
        documents(args)
    elif Path(args.dataset).suffix.lower() in ROWS and not Path(args.dataset).exists():
        raise FileNotFoundError(f"no such file: {args.dataset!r}")
    for tokens in lengths:
        _check_tokens(args, tokens, new)


def _cut(args: argparse.Namespace, lengths: Sequence[int], new: int) -> None:
    """Does what :func:`_fit` does, and checks that the text has bytes enough for so many tokens."""
    if args.dataset is None and lengths:
        _, texts = documents(args)
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if max(lengths) > size + _SPECIAL:
            raise ValueError(
                f"a prompt of {max(lengths)} tokens cannot be cut from a text of {size} bytes; give a longer "
                "text or shorter prompts"
            )
    _fit(args, lengths, new)


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address. Until it listens, clients are refused and do not wait."""
    found = None
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family)
        if os.name == "posix":
            # Else connections of an earlier server would hold the port for a minute.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
        return found
    except (OSError, UnicodeError) as error:
        if found is not None:
            found.close()
        raise no_listening(host, port, error) from error


def no_listening(host: str, port: int, error: Exception) -> ValueError:
    """Returns the error about an address that the server cannot use."""
    reason = getattr(error, "strerror", None) or str(error)
    return ValueError(f"the server cannot listen at {host}:{port} ({reason}); give another --port or --host")
