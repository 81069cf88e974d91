"""The benchmarks of the offloaded cache with tiny models on the CPU: rows, going on, tables, projection."""

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.common.results import content_at
from triforce_tree.planning.memory_map import HostRate

# The format that all results of offloading have.
COLUMNS = {
    "shape", "batch", "context", "temperature", "ms_per_token", "baseline", "baseline_ms_per_token",
    "speedup", "roof_ms", "acceptance", "mean_accepted_length", "repeated_8grams", "gpu_memory_cap_gib",
    "peak_gpu_gib",
    "host_gib", "pcie_gbps", "prefill_seconds",
}  # fmt: skip


def table(script: Any, name: str, content: dict[str, Any]) -> str:
    return str(script("benchmarks.offload.tables").TABLES[f"offload_{name}"].make(content))


@pytest.mark.slow
def test_parts_are_measured_once_and_fill_the_tables(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--tiny", "--out", str(tmp_path), "--prompts", "1", "--part", "resident"]
    run, tables = script("benchmarks.offload.run"), script("benchmarks.offload.tables")
    measure = run.main
    measure(words)
    capsys.readouterr()
    file = tmp_path / tables.FILE
    first = content_at(file)
    greedy, sampled = [row for row in first["rows"] if row["part"] == "resident"]
    assert greedy.keys() >= COLUMNS
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 0.6)
    assert greedy["exact"] == {"compared": 4, "partings": 0}
    assert 0 < greedy["resident_gib"] <= greedy["host_gib"] * 1.2
    kept = (tmp_path / "offload_h200.resident.jsonl").read_text()
    monkeypatch.setattr(run, "Bench", None)  # what lacks nothing loads no models
    measure(words)
    assert (tmp_path / "offload_h200.resident.jsonl").read_text() == kept, "nothing is measured twice"
    assert content_at(file)["rows"] == first["rows"]
    made = {name: table.make(first) for name, table in tables.TABLES.items() if table.file == tables.FILE}
    assert "| 1 x 480 | 3.33333 | 0.0 | 33 % | 0 | **" in made["offload_headline"]
    assert "| resident KV | 0.00 |" in made["offload_memory"] or "measured peak" in made["offload_memory"]
    empty = {"rows": [], "parts": {}}
    assert {table.make(empty) for table in tables.TABLES.values() if table.file == tables.FILE} == {None}


@pytest.mark.slow
def test_streamed_weights_are_counted_on_the_bus(script: Any, tmp_path: Path) -> None:
    words = ["--tiny", "--out", str(tmp_path), "--temperatures", "0", "--part", "13b"]
    script("benchmarks.offload.run").main(words)
    tables = script("benchmarks.offload.tables")
    result = content_at(tmp_path / tables.FILE)
    [row] = result["rows"]
    assert row["weights_on_host_gib"] == pytest.approx(row["memory_plan"]["pass_weights_gib"], rel=1e-3)
    assert row["streamed_gib"] > row["weights_on_host_gib"]
    assert row["exact"] == {"compared": 4, "partings": 0}
    assert "inflated, weights on the host | 1 x 384" in table(script, "headline", result)
    assert "| weights on the host | 0.1 |" in table(script, "memory", result)


@pytest.mark.slow
def test_attention_on_the_cpu_stands_beside_both_baselines(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = script("benchmarks.offload.run")
    monkeypatch.setattr(run, "host_rate", lambda *_: HostRate(((1, 20e9), (48, 10e9))))
    words = ["--tiny", "--out", str(tmp_path), "--temperatures", "0", "--prompts", "1"]
    run.main([*words, "--part", "host-attention"])
    tables = script("benchmarks.offload.tables")
    result = content_at(tmp_path / tables.FILE)
    [row] = result["rows"]
    assert row.keys() >= COLUMNS
    assert row["host_share"] == pytest.approx(row["memory_plan"]["split"]["host_share"], rel=1e-3)
    assert row["cpu_gbps"] > 0
    assert row["exact"] == {"compared": 8, "partings": 0}
    assert "projection" not in row
    streamed, own = row["baseline_ms_per_token"], row["attended_baseline_ms_per_token"]
    assert row["baseline"] == "streamed autoregressive"
    assert row["speedup"] == pytest.approx(streamed / row["ms_per_token"], rel=1e-2)
    fastest = min(streamed, own) / row["ms_per_token"]
    assert row["speedup_to_fastest_baseline"] == pytest.approx(fastest, rel=1e-2)
    # Less of the rows crosses the bus.
    assert row["streamed_gib"] == pytest.approx((1 - row["host_share"]) * row["host_gib"], rel=0.3)
    headline = table(script, "headline", result)
    assert "inflated, with attention on the CPU | 1 x 480" in headline
    assert "| plain decoding with the CPU | speed-up to the faster of both |" in headline
    ending = f"| {own:.0f} | **{row['speedup_to_fastest_baseline']:.1f}x** |"
    assert headline.splitlines()[2].endswith(ending)
    assert "with attention on the CPU | 0 |" in table(script, "levels", result)
    # The table of those without the CPU is as it was.
    alone = {k: v for k, v in row.items() if "attended" not in k and k != "host_share"}
    assert "the CPU" not in table(script, "headline", {**result, "rows": [alone]})


def test_a_projection_stretches_each_time_by_what_it_waits_for(script: Any) -> None:
    row = {"streamed_gib": 50e9 / 2**30, "tokens_per_pass": 20.0}
    row |= {"pass_ms": 1100.0, "baseline_ms_per_token": 1010.0}
    card = {"name": "half the bus, a quarter of the memory", "bus_gbps": 25.0, "read_gbps": 1000.0}
    made = script("benchmarks.offload.rows").projection(row, 50.0, 4000.0, card)
    # A second on the bus becomes two; what is beside it takes four times as long.
    assert made["ms_per_token"] == pytest.approx((2000 + 4 * 100) / 20)
    assert made["baseline_ms_per_token"] == pytest.approx(2000 + 4 * 10)


def test_prefill_stands_beside_that_of_the_device(script: Any) -> None:
    """Medians over texts, once each; the first one of each run, which compiles, does not count."""
    tables = script("benchmarks.offload.tables")
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
