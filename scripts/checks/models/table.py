"""The table of docs/models.md: which classes of transformers run on which path."""

import re
from collections import Counter

from scripts.benchmarks.common.markdown import Record, Table, cell, noted
from scripts.benchmarks.common.results import RESULTS, content_at
from triforce_tree.bench.tables import grid

FILE = "models.jsonl"
# Of `--device cuda --paths captured`, where there is one: graphs need a GPU.
GPU_FILE = "models_gpu.jsonl"
_MARKS = {"equal": "yes", "skipped": "-"}
_LONGEST = 150
_NOTE = (
    "{hardware}, torch {versions[torch]}, transformers {versions[transformers]}, commit {commit}, {date}. "
)
_GPU_NOTE = (
    "Captured: {hardware}, torch {versions[torch]}, transformers {versions[transformers]}, commit {commit}; "
    '"-" where this transformers lacks the class. File: `docs/results/{file}`. '
)
_NO_INTERFACE = re.compile(
    r".*does not pass through transformers' attention interface with our cache \((.*)\)"
)
_DIFFERS = re.compile(r"would not be decoded as by transformers: (.*?;)? ?on .* its logits differ.*")


def models(content: Record) -> str:
    """Returns a line for each feature set of a class, a column for each path, reasons as footnotes."""
    content, captured = with_captured(content)
    paths = [path for path in content["paths"] if any(row["path"] == path for row in content["rows"])]
    notes: dict[str, int] = {}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    first: dict[tuple[str, str], Record] = {}
    for row in content["rows"]:
        key = (row["class"], row["feature_set"])
        first.setdefault(key, row)
        text = _MARKS.get(row["outcome"], row["outcome"])
        if row["reason"] and row["outcome"] != "skipped":
            text += f" [{notes.setdefault(short(row), len(notes) + 1)}]"
        lines.setdefault(key, {})[row["path"]] = text
    table = []
    for (name, feature_set), cells in lines.items():
        features = first[name, feature_set]["features"].replace("_", " ")
        what = ", ".join(filter(None, ["" if feature_set == "default" else feature_set, features]))
        table.append([f"`{name}`", what, *(cells.get(path, "") for path in paths)])
    footnotes = "".join(f"{number}. {reason}\n" for reason, number in notes.items())
    parts = (summary(content, paths), grid(["class", "special", *paths], table, 2), footnotes)
    return "\n".join([*parts, _older(content) + captured + noted(_NOTE, FILE)(content, [])])


def with_captured(content: Record) -> tuple[Record, str]:
    """Returns the rows with those of the GPU's file in place of skipped ones, and where these come from."""
    file = RESULTS / GPU_FILE
    if content["device"] == "cuda" or not file.exists():
        return content, ""
    gpu = content_at(file)
    found = {(row["class"], row["feature_set"], row["path"]): row for row in gpu["rows"]}
    rows = [
        found.get((row["class"], row["feature_set"], row["path"]), row)
        if row["outcome"] == "skipped"
        else row
        for row in content["rows"]
    ]
    return content | {"rows": rows}, cell(_GPU_NOTE, gpu | {"file": GPU_FILE})


def _older(content: Record) -> str:
    """Returns a sentence that counts the rows of each older commit; empty without any."""
    counts = Counter(row["commit"] for row in content["rows"] if row.get("commit"))
    return "".join(f"{count:,} rows of commit {commit}. " for commit, count in counts.most_common())


def summary(content: Record, paths: list[str]) -> str:
    """Returns a table of how many feature sets ended how on each path."""
    counts = Counter((row["path"], row["outcome"]) for row in content["rows"])
    outcomes = sorted({outcome for _, outcome in counts})
    lines = [[path, *(str(counts[path, outcome]) for outcome in outcomes)] for path in paths]
    classes = len({row["class"] for row in content["rows"]})
    sets = len({(row["class"], row["feature_set"]) for row in content["rows"]})
    return f"{classes} classes in {sets} configurations.\n\n" + grid(["path", *outcomes], lines)


def short(row: Record) -> str:
    """Returns a reason without what differs between classes that have the same one."""
    reason = row["reason"].removeprefix(f"{row['class']} ").replace(row["class"], "this model")
    reason = _NO_INTERFACE.sub(r"\1", reason)
    if found := _DIFFERS.search(reason):
        reason = (found[1] or "its logits differ from transformers' own;").removesuffix(";")
    reason = re.sub(r"\d+ of its \d+ layers used", "not all of its layers use", reason)
    reason = re.sub(r"\d+ tokens that an indexer", "tokens that an indexer", reason)
    reason = re.sub(r" \(layer \d+;.*?\)", "", reason).replace("|", "/")
    return reason if len(reason) <= _LONGEST else reason[:_LONGEST].rsplit(" ", 1)[0] + " ..."


TABLES = {"models": Table(FILE, models, "python -m scripts.checks.models")}
