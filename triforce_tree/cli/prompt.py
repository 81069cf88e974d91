"""The prompt of ``triforce-tree generate``: a text, a question about it, or messages from a file.

Nothing here imports torch, so that a prompt which cannot be read is refused at once.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from triforce_tree.runtime.files.json_files import read_json
from triforce_tree.runtime.files.text_files import read_stdin, read_text

# Characters of a text that was given for a file.
_SHOWN = 80
Prompt = str | list[dict[str, Any]]


def prompt_of(args: argparse.Namespace) -> Prompt:
    """Returns a text to continue, or the messages of a chat to answer, whose contents are not checked here.

    Raises:
        ValueError: options that contradict each other; an empty text, or no messages in the file.
        OSError: a file cannot be read.
    """
    if args.system is not None and args.chat is None:
        raise ValueError("--system belongs to --chat; in a file of messages, make it the first one")
    if args.messages is not None:
        if args.prompt is not None:
            raise ValueError(
                f"the prompt was given twice, as {args.prompt!r} and as --messages {args.messages!r}; leave "
                "one of them out"
            )
        return _messages(args.messages)
    if args.chat is None:
        return _text(args.prompt or "-")
    if not args.chat.strip():
        raise ValueError("--chat is empty; give it a question")
    document = "" if args.prompt is None else _text(args.prompt).rstrip() + "\n\n"
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": document + args.chat}]


def missing(args: argparse.Namespace) -> str | None:
    """Returns the error message for a file to read that does not exist, or None if all exist."""
    given = {name: getattr(args, name, None) for name in ("prompt", "file", "messages", "mine", "results")}
    for name, path in given.items():
        if path in (None, "-") or os.path.exists(path):
            continue
        said = f"{path}: No such file or directory"
        if name == "prompt":
            shown = path if len(path) <= _SHOWN else path[:_SHOWN] + "..."
            said = f"{shown}: No such file or directory"
            said += "; to continue a text itself, pipe it in: echo 'some text' | triforce-tree generate -"
            if args.chat is None and args.messages is None:
                said += ", or ask with --chat 'question'"
        return said
    return None


def _messages(path: str) -> list[dict[str, Any]]:
    try:
        given = read_json(Path(path))
    except ValueError as error:
        raise ValueError(f"--messages {path}: no JSON in UTF-8 ({error})") from error
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise ValueError(
            f"--messages {path}: holds no list of messages; give one chat, as in "
            '[{"role": "user", "content": "..."}]'
        )
    return given


def _text(path: str) -> str:
    if path != "-":
        return read_text(path)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("under torchrun the processes have no stdin; name a file with the prompt")
    if sys.stdin.isatty():
        print("type the prompt; end it with Ctrl-D on an empty line", file=sys.stderr)
    text = read_stdin()
    if not text.strip():
        raise ValueError("the prompt on stdin is empty; pipe a text in, or name a file")
    return text
