"""Benchmarks that compare settings: their statistics, and both on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

HEADER: dict[str, Any] = {
    "hardware": "a machine", "settings": {"model": "a model", "gathered": 3.0, "variants": ["tree=chain:3"]},
}  # fmt: skip
GRID = ["--tiny", "--shapes", "pair", "--contexts", "1024", "--kinds", "python-topics", "--new-tokens", "8"]


def sample(variant: str, text: str, seed: int, ms: float) -> dict[str, Any]:
    place = {"text": text, "context": 100, "temperature": 1.0, "position": 90, "seed": seed}
    return {**place, "variant": variant, "ms_per_token": ms, "tokens_per_pass": 5.0}


def test_speed_of_a_variant_is_a_ratio_of_times_with_an_error_over_texts(script: Any) -> None:
    usual = [sample("defaults", text, seed, 4.0) for text in "abc" for seed in (0, 1)]
    times = {"a": (2.0, 2.0), "b": (4.0, 4.0), "c": (3.0, 5.0)}
    other = [sample("x", text, seed, times[text][seed]) for text in "abc" for seed in (0, 1)]
    found = script("benchmarks.on_chip.variants").rows("7b", HEADER, [*usual, *other])
    by_name = {row["variant"]: row for row in found}
    assert (by_name["defaults"]["speed"], by_name["defaults"]["error"]) == (1.0, 0.0)
    assert by_name["x"]["speed"] == pytest.approx(24 / 20, abs=1e-4)
    # Without a, b and c: 16 / 16, 16 / 12, 16 / 12.
    ratios = [1.0, 4 / 3, 4 / 3]
    mean = sum(ratios) / 3
    variance = 2 / 3 * sum((ratio - mean) ** 2 for ratio in ratios)
    assert by_name["x"]["error"] == pytest.approx(variance**0.5, abs=1e-4)
    assert (by_name["x"]["texts"], by_name["x"]["runs"]) == (3, 6)
    # A file in the making: one text has all, another the defaults alone.
    assert script("benchmarks.on_chip.variants").rows("7b", HEADER, [*usual, other[0]])[1]["error"] is None


def test_expected_time_takes_the_best_number_of_rounds(script: Any) -> None:
    seconds = {"plain": 0.01, "draft": 0.001, "retrieval": 0.002, "chain": 0.01, "root": 0.01}
    given = {"gamma": 12, "overlap": 1.0, "seconds": seconds}
    expected = script("benchmarks.retrieval.budgets").expected_ms
    # All is accepted: four rounds fill the chain, of which 13 tokens come.
    assert expected(given, 3.0) == pytest.approx(1e3 * (4 * 0.003 + 0.01) / 13, rel=1e-2)
    # Hardly anything is: one round.
    assert expected(given | {"overlap": 0.01}, 3.0) == pytest.approx(1e3 * 0.013 / (1 / 0.99), rel=1e-2)


@pytest.mark.slow
def test_both_run(script: Any, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    words = [*GRID, *out, "--temperatures", "0", "--budgets", "384", "512", "--chunks", "8"]
    assert script("benchmarks.retrieval.budgets").main(words) == 0
    rows = json.loads((tmp_path / "budgets_cpu.json").read_text())["rows"]
    assert {row["budget"] for row in rows} >= {384, 512}
    assert all(0 < row["overlap"] <= 1 and row["expected_ms"] > 0 for row in rows)
    words = [*GRID, *out, "--temperatures", "1", "--seeds", "1", "--variants", "tree=chain:3"]
    assert script("benchmarks.on_chip.variants").main(words) == 0
    rows = json.loads((tmp_path / "variants_cpu.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["defaults", "tree=chain:3"]
    assert [row["runs"] for row in rows] == [2, 2]
