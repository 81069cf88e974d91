"""Checks that a prompt and its new tokens fit into the target's positions, by the target's small files alone.

Nothing here imports torch or transformers.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from triforce_tree.loading import gguf_header, model_folder
from triforce_tree.loading.gguf_vocabulary import least_tokens
from triforce_tree.option_checks import check_positions

PAIR = Path(__file__).parents[1] / "pair"
# Tokens that a tokenizer may add to a text.
SPECIAL = 16
# A text with more characters per position than this is first counted in part, as in
# ``requests.chat.encoded``.
_MANY_CHARACTERS = 16


def target_source(args: argparse.Namespace) -> str | Path:
    """Returns the folder, hub id or GGUF file of the target that the options name."""
    if args.target is None and args.gguf_file is not None:
        raise ValueError(f"gguf_file={args.gguf_file!r} needs a target: the folder or hub id that holds it")
    source: str | Path = gguf_header.gguf_path(
        args.target if args.target is not None else PAIR / "target", args.gguf_file
    )
    return source


def check_tokens(args: argparse.Namespace, tokens: int, new: int) -> None:
    """Raises ValueError if so many prompt tokens and new ones exceed the target's positions."""
    check_positions(tokens, new, _most_positions(args))


def check_text(args: argparse.Namespace, text: str, new: int) -> None:
    """Raises ValueError if a text has too many tokens for the target."""
    positions = _most_positions(args)
    if positions is None or len(text.encode("utf-8", "replace")) + SPECIAL + new <= positions:
        return
    source = args.tokenizer or target_source(args)
    if gguf_header.is_gguf(source):
        count, exact = least_tokens(Path(source)), False
    else:
        count, exact = _exact_tokens(model_folder.folder_of(source)), True
    if count is None:
        check_positions(1, new, positions)
        return
    if len(text) > _MANY_CHARACTERS * positions:
        _refuse_more(text, count(text[: 3 * _MANY_CHARACTERS * positions // 8]), 0, positions)
    tokens = count(text)
    if exact:
        check_positions(tokens, new, positions)
    _refuse_more(text, tokens, new, positions)


def _refuse_more(text: str, tokens: int, new: int, positions: int) -> None:
    """Raises ValueError if ``tokens``, a lower bound of the text's tokens, exceed the positions with the new
    ones.
    """
    if tokens + new > positions:
        more = f" + {new:,} new ones" if new else ""
        raise ValueError(
            f"the prompt of {len(text):,} characters has at least {tokens:,} tokens{more}, and the model "
            f"{positions:,} positions; shorten it"
        )


def _most_positions(args: argparse.Namespace) -> int | None:
    """Returns an upper bound of the target's positions, or None if its small files do not have it."""
    source = target_source(args)
    if gguf_header.is_gguf(source):
        return gguf_header.named_positions(Path(source))
    return model_folder.named_positions(model_folder.settings_of(source)[1])


def _exact_tokens(folder: Path) -> Callable[[str], int] | None:
    """Returns a function that counts the tokens of a text without special ones, or None if the folder has no
    tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except BaseException as error:  # the library panics on some files; the refusal then comes later
        if isinstance(error, KeyboardInterrupt):
            raise
        return None
    # Its settings for truncation and padding are for training.
    made.no_truncation()
    made.no_padding()
    return lambda text: len(made.encode(text, add_special_tokens=False).ids)
