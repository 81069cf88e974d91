"""Reads options of a command from a TOML or YAML file; without torch, as in ``cli.arguments``."""

import argparse
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from triforce_tree.cli.parsing import GivenAdvanced, GivenSwitch
from triforce_tree.runtime.files.text_files import decoded

_SUFFIXES = (".toml", ".yaml", ".yml")


def words_of(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the options of a file as words of the command line.

    Keys are names of options without their dashes; ``_`` stands for ``-`` too. Switches have the values true
    and false, options of several values have a list, and ``advanced`` has an object.

    Args:
        parser: knows the options.

    Raises:
        ValueError: the file is not of these formats, a key is unknown or occurs twice, or a value has the
            wrong form.
        OSError: the file cannot be read.
    """
    known = {
        flag.removeprefix("--"): action
        for action in parser._actions
        for flag in action.option_strings
        if action.dest not in ("help", "config") and flag.startswith("--") and not flag.startswith("--no-")
    }
    words: list[str] = []
    seen: set[str] = set()
    for key, value in _content(path).items():
        name = str(key).replace("_", "-")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            instead = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{path}: unknown option {str(key)!r}{instead}")
        if name in seen:
            raise ValueError(f"{path}: {name} is given twice; leave one out")
        seen.add(name)
        words += _words(path, name, known[name], value)
    return words


def _content(path: str) -> Mapping[Any, Any]:
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"--config {path}: the name ends in none of {', '.join(_SUFFIXES)}; rename it")
    text = decoded(Path(path).read_bytes(), repr(path))
    # These are imported here, since other commands need neither.
    import tomllib

    import yaml

    try:
        found = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        kind = "TOML" if suffix == ".toml" else "YAML"
        raise ValueError(f"{path} is no {kind} ({' '.join(str(error).split())})") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} has no options by name; write lines such as port: 8000")
    return found


def _words(path: str, name: str, action: argparse.Action, value: Any) -> Iterator[str]:
    """Yields the words of one option."""
    flag = f"--{name}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {name} must be true or false, not {value!r}")
        if value:
            yield flag
        elif isinstance(action, GivenSwitch):
            yield f"--no-{name}"
    elif isinstance(action, GivenAdvanced):
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {name} must have options by name, as in gamma: 8, not {value!r}")
        for own, each in value.items():
            yield f"{flag}={own}={each if isinstance(each, str) else json.dumps(each)}"
    elif action.nargs == "+":
        values = value if isinstance(value, list) else [value]
        yield from (flag, *map(str, values))
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        # Flag and value are one word, since a value may begin with a dash.
        yield f"{flag}={value}"
    else:
        raise ValueError(f"{path}: {name} must be one text or number, not {value!r}")
