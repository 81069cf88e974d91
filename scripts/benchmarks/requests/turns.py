"""Turns of a coding agent: recorded ones of a data set, or synthetic ones made of installed packages.

Messages have the form of OpenAI's chat API, as in the data set ``nebius/SWE-rebench-openhands-trajectories``
(CC-BY-4.0), whose column ``trajectory`` holds messages with ``role``, ``content``, ``tool_calls``, ``name``
and ``tool_call_id``. The descriptions of tools, which it has in the column ``tools``, are left out.
"""

import ast
import functools
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.sources.python_files import package_folders, python_paths
from triforce_tree.bench.texts import dataset_rows
from triforce_tree.requests.chat import encoded
from triforce_tree.requests.tokenized_texts import TokenizedTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
SYNTHETIC = "synthetic"
# Their files are what the synthetic agent edits; pip install triforce-tree installs them.
PACKAGES = ("huggingface_hub", "fsspec", "rich")
_COLUMN = "trajectory"
_SYSTEM = """You are a coding agent that works in a checkout at /workspace. Solve what the user asks.
Call one tool at a time, and look at its result before the next call:
- grep {"pattern", "path"}: the lines that match a regular expression, as file:line:text
- view {"path", "first", "last"}: lines of a file with their numbers
- apply_patch {"diff"}: applies a unified diff
- run {"command"}: runs a shell command, and returns its output
Change as little as possible, run the tests after each change, and say at the end what you did."""
# Functions that are renamed: how often their file names them, and the shortest name; others are common words.
_USES, _SHORTEST_NAME = range(2, 9), 8
_GREP_LINES, _LINES_BEFORE, _LINES_AFTER, _OTHER_FILES = 20, 15, 45, 2


def trajectories(name: str, seed: int, count: int) -> list[Iterable[Message]]:
    """Returns the messages of ``count`` trajectories.

    Args:
        name: ``synthetic``; or a data set on the hub, a folder, or a ``.parquet`` or ``.jsonl`` file.
        seed: of synthetic ones; of a data set the trajectories ``seed * count`` and those after it are taken.

    Raises:
        ValueError: the data set cannot be read, has too few trajectories, or none at all.
        FileNotFoundError: the file does not exist.
    """
    first = seed * count
    if name == SYNTHETIC:
        return [synthetic(first + number) for number in range(count)]
    rows = list(itertools.islice(dataset_rows(name, "train"), first, first + count))
    if len(rows) < count:
        raise ValueError(
            f"data set {name!r} has fewer than {first + count} trajectories, which seed {seed} needs; give a "
            "lower seed or a larger data set"
        )
    for row in rows:
        if not isinstance(row.get(_COLUMN), list):
            raise ValueError(
                f"data set {name!r} has no column {_COLUMN!r} of messages; its columns: "
                f"{', '.join(sorted(row))}"
            )
    return [row[_COLUMN] for row in rows]


def turn_prompts(
    tokenizer: "PreTrainedTokenizerBase", messages: Iterable[Message], context: int, turns: int | None = None
) -> list[list[int]]:
    """Returns the token ids before each reply of the assistant: all messages so far, as they were recorded.

    They are rendered by the tokenizer's chat template, or without one below a line that names the role.

    Args:
        context: no prompt has more tokens.
        turns: the most prompts; None: all.

    Raises:
        ValueError: the first prompt is longer, there is no reply, or the chat template refuses the messages.
    """
    texts, before, found = TokenizedTexts(tokenizer), list[Message](), list[list[int]]()
    for message in messages:
        if message["role"] == "assistant":
            ids = encoded(texts, before if texts.chat_template else _plain(before))
            if len(ids) > context:
                break
            found.append(ids)
            if len(found) == turns:
                break
        before.append(message)
    if not found:
        raise ValueError(
            f"the trace has no reply after at most {context:,} tokens; raise --context, or give another trace"
        )
    return found


def _plain(messages: Iterable[Message]) -> str:
    parts = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        lines = [message["content"] or "", *(f"{call['name']} {call['arguments']}" for call in calls)]
        parts.append("\n".join([f"<|{message['role']}|>", *(line for line in lines if line)]))
    return "\n".join([*parts, "<|assistant|>\n"])


def synthetic(seed: int) -> Iterator[Message]:
    """Yields what an agent does that renames functions of installed packages, one after the other.

    It greps, reads files, edits them by diffs, reads them again and runs tests. Files and diffs are real, the
    outputs of tests are made up. The same seed and versions of the packages give the same messages. They end
    when each file has had a function renamed, after more than a million characters.
    """
    draw, files = random.Random(seed), dict(_files())
    numbers = itertools.count(1)
    yield {"role": "system", "content": _SYSTEM}
    paths = sorted(files)
    draw.shuffle(paths)
    for path in paths:
        if names := _functions(files[path]):
            yield from _renaming(files, path, draw.choice(names), draw, numbers)


@functools.cache
def _files() -> tuple[tuple[str, str], ...]:
    """Returns names, which begin with the package's, and texts of all files."""
    return tuple(
        (path.relative_to(folder.parent).as_posix(), path.read_text(encoding="utf-8", errors="replace"))
        for package in PACKAGES
        for folder in package_folders(package)
        for path in python_paths(package)
        if path.is_relative_to(folder)
    )


@functools.lru_cache(maxsize=512)
def _functions(text: str) -> list[str]:
    names = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    return sorted(
        name
        for name in names
        if len(name) >= _SHORTEST_NAME
        and "_" in name.strip("_")
        and not name.startswith("__")
        and len(re.findall(rf"\b{name}\b", text)) in _USES
    )


def _renaming(
    files: dict[str, str], path: str, name: str, draw: random.Random, numbers: Iterator[int]
) -> Iterator[Message]:
    """Yields the messages of one task, and edits ``files``.

    Args:
        numbers: of tool calls.
    """
    new = f"{name}_{draw.choice(('impl', 'inner', 'once', 'checked'))}"
    package, word = path.partition("/")[0], re.compile(rf"\b{name}\b")
    tests, count = f"tests/test_{path.rpartition('/')[2]}", draw.randint(4, 60)

    def use(thought: str, tool: str, output: str, **arguments: Any) -> Iterator[Message]:
        call = f"call_{next(numbers)}"
        function = {"name": tool, "arguments": json.dumps(arguments)}
        calls = [{"id": call, "type": "function", "function": function}]
        yield {"role": "assistant", "content": thought, "tool_calls": calls}
        yield {"role": "tool", "name": tool, "tool_call_id": call, "content": output}

    def uses(file: str, what: re.Pattern[str] = word) -> list[tuple[int, str]]:
        return [
            (number, line) for number, line in enumerate(files[file].splitlines(), 1) if what.search(line)
        ]

    def view(thought: str, file: str, line: int) -> Iterator[Message]:
        first, lines = max(1, line - _LINES_BEFORE), files[file].splitlines()[: line + _LINES_AFTER]
        shown = "\n".join(f"{number:6}\t{text}" for number, text in enumerate(lines[first - 1 :], first))
        yield from use(thought, "view", shown, path=file, first=first, last=len(lines))

    def edit(file: str) -> Iterator[Message]:
        text = word.sub(new, files[file])
        old_lines, new_lines = (part.splitlines(keepends=True) for part in (files[file], text))
        diff = "".join(unified_diff(old_lines, new_lines, f"a/{file}", f"b/{file}"))
        changed, files[file] = len(uses(file)), text
        yield from use(
            f"Now I rename `{name}` in {file}.", "apply_patch", f"{file}: {changed} lines changed", diff=diff
        )

    def test(left: list[str]) -> Iterator[Message]:
        if left:
            [(number, line), *_] = uses(left[0])
            lines = [f"{left[0]}:{number}: in <module>", line, f"E   NameError: name '{name}' is not defined"]
            result = "\n".join([f"ERROR collecting {tests}", *lines]), f"1 error in 0.{draw.randint(10, 99)}s"
        else:
            took = f"0.{draw.randint(10, 99)}s"
            result = f"{tests} {'.' * count} [100%]", f"{count} passed in {took}"
        output = f"rootdir: /workspace\ncollected {0 if left else count} items\n\n{result[0]}\n\n{result[1]}"
        yield from use("I run the tests.", "run", output, command=f"python -m pytest -q {tests}")

    found = [(file, *use) for file in files if file.startswith(f"{package}/") for use in uses(file)]
    others = list(dict.fromkeys(file for file, *_ in found if file != path))[:_OTHER_FILES]
    line = uses(path, re.compile(rf"def {name}\b"))[0][0]
    yield {
        "role": "user",
        "content": f"The function `{name}` in {path} has a name that misleads. Rename it to `{new}`, also "
        f"where it is called in {package}, and see to it that {tests} passes.",
    }
    grepped = "\n".join(f"{file}:{number}:{text}" for file, number, text in found[:_GREP_LINES])
    yield from use(f"I look for all uses of `{name}`.", "grep", grepped, pattern=name, path=package)
    yield from view("I read the function before I change it.", path, line)
    yield from edit(path)
    yield from view("I read the edited file again.", path, line)
    yield from test(others)
    for number, file in enumerate(others, 1):
        yield from view(f"{file} still has the old name.", file, uses(file)[0][0])
        yield from edit(file)
        yield from test(others[number:])
    edited = ", ".join([path, *others])
    yield {
        "role": "assistant",
        "content": f"`{name}` is now `{new}` in {edited}; {tests} passes ({count} tests).",
    }
