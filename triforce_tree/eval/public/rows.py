"""Rows of public data sets: from the hub, or from a file, an archive or a folder in the same schema."""

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from triforce_tree.eval.public.catalogue import DataSet
from triforce_tree.eval.public.metrics import Expected
from triforce_tree.eval.text import ROWS, dataset_rows
from triforce_tree.loading.model_folder import in_one_line

Row = dict[str, Any]
_SUFFIXES = (*ROWS, ".zip")
_SECONDS = 10.0  # to wait for the hub's first answer


@dataclass(frozen=True)
class Example:
    """A row in our words; ``expected`` is None for a text without a question."""

    context: str
    question: str
    expected: Expected | None

    def key(self) -> str:
        """What a digest of the data is made of."""
        right = None if self.expected is None else vars(self.expected)
        return json.dumps([self.context, self.question, right], default=str)


def examples(data: DataSet, task: str, path: str | None, count: int) -> list[Example]:
    """The first ``count`` rows about different texts; where there are fewer, others about the same ones too.

    Args:
        task: a name in ``data.tasks``.
        path: a file, an archive or a folder in the data set's schema; None: from the hub.

    Raises:
        ValueError: the data set cannot be fetched or read, a column is missing, or there are fewer rows.
        FileNotFoundError: there is nothing at ``path``.
    """
    chosen: list[Example] = []
    others: list[Example] = []
    contexts: dict[str, str] = {}
    for row in _rows(data, task, path):
        found = _example(data, row)
        new = found.context not in contexts
        # One copy of each text: many rows may ask about the same book.
        held = Example(contexts.setdefault(found.context, found.context), found.question, found.expected)
        (chosen if new else others).append(held)
        if len(chosen) == count:
            return chosen
    if len(chosen) + len(others) < count:
        raise ValueError(
            f"{data.name} has {len(chosen) + len(others)} rows here, {count} are wanted; give fewer with "
            "--prompts"
        )
    return (chosen + others)[:count]


def digest(found: Iterable[Example]) -> str:
    """Of the rows that are used, for results files."""
    made = hashlib.sha256()
    for example in found:
        made.update(example.key().encode())
    return made.hexdigest()[:16]


def _example(data: DataSet, row: Row) -> Example:
    values = {what: _value(data, row, path) for what, path in data.columns.items()}
    expected = None
    if data.tasks:
        answers, options = values["answers"], values.get("options")
        answers = answers if isinstance(answers, list) else [answers]
        if not answers:
            raise ValueError(f"a row of {data.name} has no answer; leave it out")
        expected = Expected(answers, [str(option) for option in options or []])
    return Example(str(values["context"]), str(values.get("input", "")), expected)


def _value(data: DataSet, row: Row, path: str) -> Any:
    if "," in path:
        return [_value(data, row, each) for each in path.split(",")]
    found: Any = row
    for name in path.split("."):
        try:
            found = [part[name] for part in found] if isinstance(found, list) else found[name]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a row of {data.name} has no column {path!r}, but {', '.join(sorted(row))}; needed are "
                f"{data.schema}"
            ) from error
    return found


def _rows(data: DataSet, task: str, path: str | None) -> Iterator[Row]:
    if path is not None:
        return _of_path(data, task, Path(path))
    return _of_hub(data, task)


def _of_hub(data: DataSet, task: str) -> Iterator[Row]:
    from huggingface_hub import hf_hub_download

    # Its warnings would surround the one sentence below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    unreachable = _why_unreachable(data.repository)
    try:
        if data.file is None:
            if unreachable is not None:
                raise unreachable
            yield from dataset_rows(data.repository, "test")
            return
        name, _, member = data.file.format(task=task).partition(":")
        # What was fetched before is read without a network.
        offline = unreachable is not None
        path = Path(hf_hub_download(data.repository, name, repo_type="dataset", local_files_only=offline))
    except Exception as error:  # of any class: two libraries and the network
        why = in_one_line(unreachable or error, 100)
        raise ValueError(
            f"{data.name} cannot be fetched from {data.repository} ({why}); without a network give "
            f"--data FILE, a {_listed(_SUFFIXES)} file or a folder of them with the columns {data.schema}"
        ) from error
    yield from _of_archive(data, path, member) if member else _of_file(path)


def _why_unreachable(repository: str) -> Exception | None:
    """What one request to the hub ends with; downloads try again for half a minute. None if all is well."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(repository, timeout=_SECONDS)
    except Exception as error:  # the network's own classes differ by release
        return error
    return None


def _of_path(data: DataSet, task: str, path: Path) -> Iterator[Row]:
    if not path.exists():
        raise FileNotFoundError(
            f"no such file: {str(path)!r}; --data takes a {_listed(_SUFFIXES)} file, or a folder of them"
        )
    if path.is_dir():
        for file in _of_folder(data, task, path):
            yield from _of_file(file)
    elif path.suffix.lower() == ".zip":
        wanted = (data.file or "").format(task=task).partition(":")[2]
        yield from _of_archive(data, path, wanted or f"{task or data.name}.jsonl")
    else:
        yield from _of_file(path)


def _of_folder(data: DataSet, task: str, folder: Path) -> Sequence[Path]:
    """The files of a task, else all files of rows."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ROWS)
    if task:
        files = [path for path in files if path.stem == task]
    if not files:
        name = f"{task}.jsonl" if task else f"{_listed(ROWS)} file"
        raise ValueError(f"{str(folder)!r} has no {name} with the columns {data.schema}; give another --data")
    return files


def _of_file(path: Path) -> Iterator[Row]:
    """Rows of one file. JSON is read here: columns may hold values of different types."""
    suffix = path.suffix.lower()
    if suffix not in ROWS:
        raise ValueError(
            f"{str(path)!r} is no file of rows; --data takes a {_listed(_SUFFIXES)} file, or a folder of them"
        )
    if suffix in (".parquet", ".csv"):
        yield from dataset_rows(str(path), "test")
        return
    with path.open(encoding="utf-8-sig") as lines:
        yield from _of_json(lines, str(path), whole=suffix == ".json")


def _of_archive(data: DataSet, path: Path, member: str) -> Iterator[Row]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if Path(name).name == Path(member).name]
            if not names:
                raise ValueError(
                    f"{str(path)!r} has no {Path(member).name} in it; give another --data or --task"
                )
            with archive.open(names[0]) as file:
                yield from _of_json(TextIOWrapper(file, "utf-8-sig"), f"{path}:{names[0]}", whole=False)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{str(path)!r} is no zip archive ({error}); fetch {data.name} again") from error


def _of_json(lines: Iterable[str], name: str, whole: bool) -> Iterator[Row]:
    """A JSON object a line, or with ``whole`` also a list of objects."""
    try:
        if whole:
            text = "".join(lines)
            if text.lstrip().startswith("["):
                found = json.loads(text)
            else:
                found = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = (json.loads(line) for line in lines if line.strip())
        for row in found:
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__} instead of an object")
            yield row
    except ValueError as error:  # JSON and UTF-8 errors are of this class
        raise ValueError(
            f"{name!r} holds no JSON objects ({in_one_line(error, 120)}); give one a line, or in .json a list"
        ) from error


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
