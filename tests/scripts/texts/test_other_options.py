"""Texts measured with other options than the defaults: a part of the results file, and rows of their own."""

from pathlib import Path
from typing import Any

import torch


def test_other_options_are_a_part_of_their_own(script: Any, tmp_path: Path) -> None:
    command, rows = script("benchmarks.texts.command"), script("benchmarks.texts.rows").rows
    parser = command.grid_parser("any_text", "", (1024,), command.SHAPES, ["pair"])
    parts = []
    for more in ([], ["--set", "gpu_memory=24GiB", "offload=true"]):
        args = parser.parse_args(["--out", str(tmp_path), "--tiny", *more])
        [(grid, file)] = command.files_by_shape(args, "any_text", torch.device("cpu"), (), rows)
        parts.append((file.part, grid.offloads))
    assert parts == [("pair", False), ("pair-gpu_memory-24GiB-offload-True", True)]


def test_prompts_of_a_tiny_run_are_short_unless_they_are_given(script: Any) -> None:
    command = script("benchmarks.texts.command")
    cases = {"": 122_880, "--tiny": 1024, "--tiny --contexts 122880": 122_880}
    for words, context in cases.items():
        made = command.grid_parser("any_text", "", (122_880,), command.SHAPES, ["pair"])
        assert command.parsed(made, words.split()).contexts == [context], words


def test_tables_keep_them_apart(script: Any) -> None:
    texts, front = script("benchmarks.texts.tables"), script("benchmarks.front")
    row = {
        "model": "m", "machine": "NVIDIA H200", "kind": "prose", "context": 1024, "temperature": 0.6,
        "ms_per_token": 1.0, "plain_ms_per_token": 4.0, "repeated_8grams": 0.0,
    }  # fmt: skip
    given = [
        row | {"part": "7b", "settings": {}, "text": "a", "speedup": 4.0},
        row | {"part": "7b", "settings": {}, "text": "b", "speedup": 2.0},
        row | {"part": "7b-x", "settings": {"gpu_memory": "24GiB"}, "text": "a", "speedup": 9.0},
    ]
    found = texts.summary({"rows": given, "parts": {}})
    assert [(r["part"], r["texts"], r["median"]) for r in found] == [("7b", 2, 3.0), ("7b-x", 1, 9.0)]
    assert [front.limited(r) for r in found] == [
        "NVIDIA H200",
        "NVIDIA H200 limited to 24 GiB: the rest in host memory",
    ]
    assert [texts.SUMMARY["model"](r) for r in found] == ["m", "m, gpu_memory=24GiB"]


def test_prefill_stands_beside_that_of_the_device(script: Any) -> None:
    """Medians over texts, once each; the first one of each run, which compiles, does not count."""
    tables = script("benchmarks.texts.tables")
    place = {"model": "s inflated", "context": 480}
    rows = [
        place | {"part": part, "settings": settings, "text": text, "prefill_seconds": seconds + offset}
        for part, settings, offset in (("s", {}, 0.0), ("s-24", {"gpu_memory": "24GiB"}, 1.0))
        for text, seconds in (("a", 50.0), ("b", 2.0), ("c", 3.0), ("d", 4.0), ("d", 90.0))
    ]
    header = {"hardware": "card", "commit": "c", "code": None}
    content = {"rows": rows, "parts": {"s": header, "s-24": header}}
    made = tables.TABLES["offload_prefill"].make(content)
    expected = "| s inflated | 480 | 24 GiB | 3 | 3.00 (2.00 to 4.00) | 4.00 (3.00 to 5.00) | 1.33x |"
    assert expected in made
    assert "card, medians over texts" in made
    assert tables.TABLES["offload_prefill"].make({**content, "rows": rows[:5]}) is None
