"""Files of saved sessions as they are read: what they hold is checked before any of it is used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from triforce_tree.generation.chat import chats_of

Kind = tuple[Sequence[int], torch.dtype]
"""The shape of a tensor, and its dtype."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I8": torch.int8,
}


def opened(path: Path) -> Any:
    """An open safetensors file.

    Raises:
        ValueError: it is damaged.
        OSError: it is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; save the session again")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise damaged(path, error) from error


def kinds_of(path: Path) -> dict[str, tuple[list[int], torch.dtype | None]]:
    """Shapes and dtypes of a file's tensors by name; None for a dtype that no session has.

    Raises:
        ValueError, OSError: as :func:`opened`.
    """
    with opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_shape(), _DTYPES.get(part.get_dtype())) for name, part in parts.items()}


def check_tensors(path: Path, wanted: Mapping[str, Kind]) -> None:
    """Raise ValueError where a file does not hold these tensors and no others."""
    found = kinds_of(path)
    if found.keys() != wanted.keys():
        raise damaged(path, f"it holds the tensors {sorted(found)}, not {sorted(wanted)}")
    for name, (shape, dtype) in wanted.items():
        if found[name] != (list(shape), dtype):
            theirs, theirs_dtype = found[name]
            raise damaged(path, f"{name} is {theirs_dtype} {theirs}, not {dtype} {list(shape)}")


def check_tokens(path: Path, vocabulary: int) -> list[int]:
    """The token ids in a file.

    Raises:
        ValueError: it is damaged.
        OSError: it is missing.
    """
    shape, _ = kinds_of(path).get("tokens", ([], None))
    check_tensors(path, {"tokens": ([max([1, *shape])], torch.int64)})
    with opened(path) as file:
        tokens: list[int] = file.get_tensor("tokens").tolist()
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise damaged(path, f"a token id lies outside the vocabulary of {vocabulary}")
    return tokens


def check_fields(path: Path, found: Mapping[str, Any], tokens: int) -> None:
    """Raise ValueError where a ``session.json`` says what cannot be of a session of so many tokens."""
    chunk, whole = (_number(path, name, found.get(name)) for name in ("chunk", "whole"))
    if not chunk or whole >= tokens or whole % chunk:
        raise damaged(path, f"chunk={chunk} and whole={whole} are not of a session of {tokens} tokens")
    messages = found.get("messages", "missing")
    if messages is not None:
        _check_messages(path, messages)
    count = len(messages or ())
    if _number(path, "begun", found.get("begun")) > count:
        raise damaged(path, f"begun={found['begun']}, and there are {count} messages")
    _check_turns(path, found.get("turns"), count)


def _check_messages(path: Path, messages: Any) -> None:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise damaged(path, "messages is no list of messages")
    try:
        chats_of(messages)
    except ValueError as error:
        raise damaged(path, error) from error


def _check_turns(path: Path, turns: Any, messages: int) -> None:
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise damaged(path, "turns is no list of pairs")
    for turn in turns:
        _, told = (_number(path, "turns", number) for number in turn)
        if told > messages:
            raise damaged(path, f"turns holds {turn}, and there are {messages} messages")


def _number(path: Path, name: str, value: Any) -> int:
    """A number of something."""
    if type(value) is not int or value < 0:
        raise damaged(path, f"{name}={value!r} is no number of tokens or messages")
    return value


def damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}); save the session again")
