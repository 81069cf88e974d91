"""The argument parser: one-line errors, help with defaults, types of values, files of options; no torch."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from triforce_tree.config import ADVANCED, flat_options
from triforce_tree.option_checks import DTYPE_NAMES, did_you_mean
from triforce_tree.runtime.files.text_files import decoded

# Options of other programs, by the names that they have here.
_ELSEWHERE = {
    "--model": "--target", "-m": "--target", "--draft-model": "--draft", "--model-draft": "--draft",
    "-md": "--draft", "--max-tokens": "--max-new-tokens", "--n-predict": "--max-new-tokens",
    "-n": "--max-new-tokens", "--temp": "--temperature", "-t": "--temperature",
    "--repeat-penalty": "--repetition-penalty", "--torch-dtype": "--dtype", "--key": "--api-key",
    "--output": "--out", "-o": "--out", "--stop-strings": "--stop", "--beams": "--num-beams",
}  # fmt: skip
_TEXTS = ("--prompt", "--text", "-p")
# The suffixes of files with options.
_SUFFIXES = (".toml", ".yaml", ".yml")


class Parser(argparse.ArgumentParser):
    """Reports a bad option in one line, without the usage."""

    _file: str | None = None

    def error(self, message: str) -> NoReturn:
        where = f"{self._file}: " if self._file else ""
        self.exit(2, f"{self.prog}: {where}{message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns argparse's result. An unknown option is an error of the command that it was given to.

        If a command with the option ``--config`` was given a file, options come from it too. Those of the
        command line replace them.
        """
        found = self._known(args, namespace)
        path = getattr(found, "config", None) if "--config" in self._option_string_actions else None
        if path is not None:
            try:
                words = _words_of(path, self)
            except OSError as error:
                self.error(f"--config {path}: {error.strerror or error}")
            except ValueError as error:
                self.error(str(error))
            self._file = path
            # The words of the file are parsed alone first, so that an error names the file.
            self._known(words, namespace)
            self._file = None
            found = self._known([*words, *args], namespace)
        return found, []

    def _known(self, args: Any, namespace: Any) -> Any:
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}{self._instead_of(left[0])}")
        return found

    def _instead_of(self, word: str) -> str:
        """Returns a suggestion for an unknown option, to append to the message."""
        flag = word.partition("=")[0].replace("_", "-")
        known = self._option_string_actions
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if name in ADVANCED and "--advanced" in known:
            value = "false" if flag.startswith("--no-") else "VALUE"
            return f" (write --advanced {name}={value})"
        near = [_ELSEWHERE.get(flag, flag)] if _ELSEWHERE.get(flag, flag) in known else []
        near = near or get_close_matches(flag, known, n=1)
        if flag in _TEXTS and "--chat" in known:
            return " (name a file with the prompt, or pipe the text in: echo 'some text' | ...)"
        return f" (did you mean {near[0]}?)" if near else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, list(action.choices or ()))
            raise


class Given(argparse.Action):
    """Stores a value, and that it was given: other options are chosen by the device."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.value(values, namespace, option_string or ""))
        namespace.given = namespace.given | {self.dest}

    def value(self, given: Any, namespace: argparse.Namespace, flag: str) -> Any:
        """Returns what is stored of the words that were given behind a flag."""
        return given


class GivenSwitch(Given):
    """Stores True, or False for the flag that begins with ``--no-``, and that it was given."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def value(self, given: Any, namespace: argparse.Namespace, flag: str) -> bool:
        return not flag.startswith("--no-")


class GivenAdvanced(Given):
    """Collects NAME=VALUE of each use in a dict."""

    def value(self, given: Any, namespace: argparse.Namespace, flag: str) -> dict[str, Any]:
        name, value = given
        return {**getattr(namespace, self.dest), name: value}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults other than None and False, unless the help text has them already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "by default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _kind(read: Callable[[str], Any], allowed: Callable[[Any], bool], said: str) -> Callable[[str], Any]:
    """Returns a type of numbers; ``said`` follows "must" in the error about others."""

    def parse(text: str) -> Any:
        value = read(text)
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{value} must {said}")
        return value

    return parse


positive = _kind(_whole, lambda n: n >= 1, "be at least 1")
not_negative = _kind(_whole, lambda n: n >= 0, "be at least 0")
above_zero = _kind(_number, lambda x: 0 < x < math.inf, "be above 0")
not_below_zero = _kind(_number, lambda x: 0 <= x < math.inf, "be at least 0")
finite = _kind(_number, math.isfinite, "be a finite number")
depth = _kind(_number, lambda x: 0 <= x <= 1, "lie between 0 (the start) and 1 (the end)")
temperature = _kind(_number, lambda x: 0 <= x < math.inf, "be at least 0, which is greedy")


def levels(text: str) -> int | str:
    return _one_of(text, "auto", "1", "2", "3")


def weight_bits(text: str) -> int | str:
    return _one_of(text, "16", "8", "4", "auto")


def _one_of(text: str, *words: str) -> int | str:
    if text not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(words)}{did_you_mean(text, words)}")
    return text if text == "auto" else int(text)


def advanced(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, where VALUE is a number, true, false or null, or else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no value; write NAME=VALUE, as in gamma=8")
    try:
        flat_options({"advanced": {name: value}})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if name == "select_chunks":
        raise argparse.ArgumentTypeError("select_chunks is a function, and can be given in Python only")
    return field(text)


def field(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, where VALUE is JSON, or else a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} has no value; write NAME=VALUE, as in temperature=0")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def dtype(text: str) -> str:
    return DTYPE_NAMES.get(text, text)


def _words_of(path: str, parser: argparse.ArgumentParser) -> list[str]:
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
