"""Checks the fields of ``session.json`` before any of them is used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triforce_tree.requests.chat import chats_of


def check_fields(path: Path, found: Mapping[str, Any], tokens: int) -> None:
    """Raise ValueError if the fields of a ``session.json`` are impossible for a session of so many tokens."""
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
    """Returns a field's value if it is a number, or raises ValueError."""
    if type(value) is not int or value < 0:
        raise damaged(path, f"{name}={value!r} is no number of tokens or messages")
    return value


def damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}); save the session again")
