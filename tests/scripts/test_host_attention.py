"""The benchmark `host_attention`: each implementation on the CPU against the definition, tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from triforce_tree.kernels.attention.plan import Heads


@pytest.mark.parametrize("heads", [Heads(6, 6, 32), Heads(6, 2, 32)], ids=["mha", "gqa"])
@pytest.mark.parametrize("queries", [1, 5])
def test_every_implementation_over_pieces_is_attention_to_all_their_rows(
    script: Any, heads: Heads, queries: int
) -> None:
    measure = script("benchmarks.cpu.host_attention")
    q = measure.random_queries(heads, queries, 0)
    rows = torch.randn(96, 2, heads.kv, heads.dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    ratio, before = measure.error_ratio(q, rows), torch.get_num_threads()
    for name, make in measure.WAYS.items():
        with measure.torch_threads(2):
            assert torch.get_num_threads() == 2
            assert ratio(make(2)(measure.pack(q, heads), rows.split(48))) <= 2, name
        assert torch.get_num_threads() == before


def test_a_small_run_measures_every_implementation_and_fills_the_tables(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, tables = script("benchmarks.cpu.host_attention"), script("benchmarks.cpu.tables")
    wrong = ("flash", "of scaled queries")
    flash = measure.WAYS["flash", "one call a piece"]
    monkeypatch.setitem(
        measure.WAYS, wrong, lambda *how: lambda q, pieces: flash(*how)((1.5 * q).bfloat16(), pieces)
    )
    file = tmp_path / tables.FILE
    measure.main(["--tiny", "--out", str(file)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["what"] == "done"
    result = json.loads(file.read_text())
    counts = {row["threads"] for row in result["rows"]}
    assert len(result["rows"]) == 2 * 2 * len(counts) * len(measure.WAYS)
    for row in result["rows"]:
        # A wrong implementation is not timed.
        assert (row["gbps"] is None) == ((row["way"], row["spread"]) == wrong), row
    both = result["together"]
    assert [(row["shape"], row["t"]) for row in both["attention"]] == [
        (shape, t) for shape in ("32/32 x 128", "32/8 x 128") for t in (1, 3)
    ]
    assert {"bus_gbps", "reading"} <= both.keys()
    # What was measured is as good as the machine was idle; the tables are made of figures that are known.
    for number, row in enumerate(result["rows"], 1):
        row["gbps"] = row["gbps"] and 10.0 + number
    for row in both["attention"]:
        row |= {"cpu_gbps": 30.0, "bus_gbps": 40.0, "cpu_alone_gbps": 50.0}
    both |= {"bus_gbps": 50.0, "reading": {"cpu_gbps": 60.0, "bus_gbps": 45.0}}
    columns = "| heads | T | threads | flash, one call a piece | "
    made = {name: tables.TABLES[f"host_{name}"].make(result) for name in ("ways", "together")}
    assert made["ways"].startswith(columns)
    assert made["together"].splitlines()[2].endswith("| 50.0 | 30.0 | 40.0 | **1.40x** | 3.00x |")
    assert "The bus alone: 50.0 GB/s; beside plain reading at 60.0 GB/s: 45.0 GB/s." in made["together"]
    # One table has AVX2, the other one all that is newer.
    told: dict[str, str] = {}
    for name in ("host_ratios", "host_ratios_avx2"):
        made = tables.TABLES[name].make(result).splitlines()
        names, _, first, *_ = (line.strip("| ").split(" | ")[4:] for line in made)
        told |= zip(names, first, strict=True)
    place = {"shape": "32/32 x 128", "t": 1, "threads": min(counts)}
    here = [row for row in result["rows"] if row["gbps"] and place.items() <= row.items()]
    best = max(row["gbps"] for row in here if row["way"] != "our kernel")
    ours = {row["spread"]: row["gbps"] / best for row in here if row["way"] == "our kernel"}
    assert told == {f"our kernel, {spread}": f"{ratio:.1f}x" for spread, ratio in ours.items()}


def test_without_a_gpu_results_go_to_a_file_of_their_own(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        script("benchmarks.cpu.host_attention").main([])
    assert "--out names a file" in capsys.readouterr().err


def test_cores_are_those_that_the_control_group_grants(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = script("benchmarks.cpu.machine")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)))
    for text, cores in (("1600000 100000\n", 16), ("50000 100000\n", 1), ("max 100000\n", 64)):
        monkeypatch.setattr(machine, "_text", lambda path, text=text: text if "cpu.max" in path else "")
        assert machine.cores() == cores
