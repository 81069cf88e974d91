"""The prompt of ``triforce-tree generate``: a text, a question about it, or messages from a file."""

import argparse
import sys
from pathlib import Path

from triforce_tree.cli.console import screen
from triforce_tree.eval.text import read_text
from triforce_tree.generation.chat import Chat, chats_of
from triforce_tree.runtime import distributed
from triforce_tree.runtime.files.json_files import read_json


def prompt_of(args: argparse.Namespace) -> str | Chat:
    """A text to continue, or a chat to answer.

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


def _messages(path: str) -> Chat:
    try:
        given = read_json(Path(path))
    except ValueError as error:
        raise ValueError(f"--messages {path}: no JSON in UTF-8 ({error})") from error
    try:
        chats = chats_of(given)
    except ValueError as error:
        raise ValueError(f"--messages {path}: {error}") from error
    if chats is None or isinstance(given[0], list):
        raise ValueError(
            f"--messages {path}: holds no list of messages; give one chat, as in "
            '[{"role": "user", "content": "..."}]'
        )
    return chats[0]


def _text(path: str) -> str:
    if path != "-":
        return read_text(path)
    if distributed.world_size() > 1:
        raise ValueError("under torchrun the processes have no stdin; name a file with the prompt")
    if sys.stdin.isatty():
        screen().print("type the prompt; end it with Ctrl-D on an empty line")
    text = sys.stdin.read()
    if not text.strip():
        raise ValueError("the prompt on stdin is empty; pipe a text in, or name a file")
    return text
