"""Rows of docs/results that answer the paper's tables, where the package runs from a checkout."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triforce_tree.eval.results import Record

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "results"
_ON_CHIP, _OFFLOAD, _TWO = "on_chip_h200.json", "offload_h200.json", "offload_parallel_h200.json"
_ABLATIONS, _POLICIES = "ablations_h200.json", "retrieval_policies.json"
_PAIR = {"model": "embedded pair", "context": 8192, "text": "prose", "budget": 1024}


@dataclass(frozen=True)
class Found:
    """A number of a results file, and what it was measured with."""

    value: float
    setup: str


@dataclass(frozen=True)
class _Where:
    """A row of a file by the values it has, and the names that lead to the number in it."""

    file: str
    row: Mapping[str, Any]
    names: tuple[str, ...] = ("speedup",)


def _entries() -> dict[tuple[str, str, str], _Where]:
    """By table, row and column of the paper, or of ours where the paper has no such row."""
    target = ("acceptance", "target")
    made: dict[tuple[str, str, str], _Where] = {}
    for t in (0.0, 0.6, 1.0):
        row = {"part": "7b", "temperature": t}
        made["table-2", f"TriForce, T={t:g}", "speed-up"] = _Where(_ON_CHIP, row)
        made["table-2", f"TriForce, T={t:g}", "acceptance"] = _Where(_ON_CHIP, row, target)
    made["table-2", "Naive Policy, T=0", "speed-up"] = _Where(_ABLATIONS, {"setting": {"levels": 2}})
    made["table-5", "TriForce", "speed-up"] = _Where(_ON_CHIP, {"part": "7b", "temperature": 0.0})
    for name, where in {
        "Llama2-7B-128K, 2x RTX 4090": (_TWO, {"part": "7b on 2", "temperature": 0.6}),
        "Llama2-13B-128K, 2x RTX 4090": (_OFFLOAD, {"part": "13b", "temperature": 0.6}),
        "Llama2-7B-128K, 1x RTX 4090": (_OFFLOAD, {"part": "7b", "temperature": 0.6}),
    }.items():
        made["table-3", name, "speed-up"] = _Where(*where)
        made["table-3", name, "TriForce, ms/token"] = _Where(*where, ("ms_per_token",))
        alone = "1x" in name
        plain = "AR (DeepSpeed-ZeRO-Inference), ms/token" if alone else "AR, ms/token"
        made["table-3", name, plain] = _Where(*where, ("baseline_ms_per_token",))
    for batch, shown, context in ((2, "56K", 57_344), (6, "19K", 19_456), (10, "12K", 12_288)):
        for t in (0.0, 0.6):
            row = {"part": "batch", "batch": batch, "context": context, "temperature": t}
            made["table-4", f"({batch}, {shown}), T={t:g}", "TriForce"] = _Where(_ON_CHIP, row)
    for model in ("LWM-Text-256K", "LWM-Text-512K"):
        if model.endswith("512K"):
            row = {"part": "8b-512k", "temperature": 0.6}
            made["table-6", model, "speed-up"] = _Where(_OFFLOAD, row)
    for new in (256, 512, 1024, 2048):
        row = {"part": "outputs", "new_tokens": new, "temperature": 0.0}
        made["table-7", f"{new} new tokens", "speed-up"] = _Where(_ON_CHIP, row)
    for part, context in ((8, 16_384), (4, 32_768), (2, 65_536), (1, 122_880)):
        row = {"part": "lengths", "context": context, "temperature": 0.0}
        shown = "the whole context (122K)" if part == 1 else f"1/{part} of the context"
        made["figure-5", shown, "TriForce"] = _Where(_ON_CHIP, row)
    for shown, setting in (
        ("(a) budget 4K, the best", {"budget": 4096}),
        ("(b) chunk of 8", {"chunk": 8}),
        ("(b) chunk of 16", {"chunk": 16}),
    ):
        row = {"setting": setting}
        made["figure-6", shown, "speed-up"] = _Where(_ABLATIONS, row)
        made["figure-6", shown, "acceptance"] = _Where(_ABLATIONS, row, target)
    for column, policy in (
        ("Top-K (Ref.)", "Top-K of all keys, own query"), ("StreamingLLM", "StreamingLLM"), ("H2O", "H2O"),
        ("Retrieval", "TriForce: mean keys, one build"),
        ("Retrieval, chosen anew in every pass (ours)", "mean keys"),
    ):  # fmt: skip
        chunk = 1 if policy.startswith("Top-K") else 8
        row = {**_PAIR, "policy": policy, "chunk": chunk}
        made["table-1", "PG-19", column] = _Where(_POLICIES, row, ("overlap",))
    return made


@cache
def _content(path: Path) -> Record | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def found(item: str, row: str, column: str) -> Found | None:
    """The number of our own results that stands beside one of the paper, if there is one here."""
    where = _entries().get((item, row, column))
    content = _content(FOLDER / where.file) if where is not None else None
    if where is None or content is None:
        return None
    for line in content["rows"]:
        if all(line.get(name) == wanted for name, wanted in where.row.items()):
            number: Any = line
            for name in where.names:
                number = number.get(name) if isinstance(number, dict) else None
            return None if number is None else Found(float(number), _setup(content, line, where.file))
    return None


def _setup(content: Record, line: Record, file: str) -> str:
    """Model, card and context of a row."""
    if "part" in line:
        card = content["parts"][line["part"]]["hardware"]
        memory = line["setting"].get("cap_gib")
        card += f" of {memory:g} GiB" if memory else ""
        cards = "2x " if "parallel" in file else ""
        return f"{line['shape']}, {cards}{card}, {line['context']:,}"
    [about] = [
        head for place, head in content["evaluated"].items()
        if place == "{model}, {context} tokens, budget {budget}, {text}".format(**line)
    ]  # fmt: skip
    return f"{line['model']}, {about['hardware']}, {line['context']:,}, {line['text']}"
