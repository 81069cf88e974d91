"""``bench verify`` on the JSON files of scripts: what records are of, and which figures are compared."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.command_line import last_object, run
from triforce_tree.eval.report import rows, verify

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# Of some files rows say why they have no figure: what cannot run has no time.
_REASON = "reason"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_published_file_is_compared(path: Path) -> None:
    found = verify.cells_of(path)
    assert all(found.values())
    content = json.loads(path.read_text("utf-8"))
    # Two rows of one place raise an error, so that as many cells are left as rows have figures.
    measured = [row for row in content.get("rows", ()) if not row.get(_REASON) or "outcome" in row]
    # A row may have none but those of its texts.
    of_rows = {place for place in found if place and "of" not in dict(place)}
    of_rows |= {place[: names.index("of")] for place in found if "of" in (names := [*dict(place)])} - {()}
    assert len(of_rows) == len(measured)
    assert len(found) >= max(1, len(measured))
    # All that is compared with itself is the same.
    table, *_ = verify.compared(found, verify.cells_of(path, beside=path))
    assert not table.note
    assert {row[4] for row in table.rows} <= {"1.00", "same"}
    assert len(table.rows) == sum(map(len, found.values()))


def _written(path: Path, *made: dict[str, Any], **more: Any) -> Path:
    path.write_text(json.dumps({"rows": made, **more}))
    return path


def test_nested_figures_settings_and_outcomes(tmp_path: Path) -> None:
    row = {
        "part": "7b", "machine": "NVIDIA H200", "context": 9, "temperature": 0.0, "setting": {"b": 1, "a": 2},
        "ms_per_token": 4.0, "speedup": None, "runs": 3, "chosen": {"gamma": 3}, "equal": True,
        "acceptance": {"target": 0.5}, "overlap": [0.5, 0.25], "outcome": "equal",
        "texts": [{"text": "austen", "ms_per_token": 2.0}],
    }  # fmt: skip
    other = row | {
        "machine": "NVIDIA H100", "setting": {"a": 2, "b": 1}, "ms_per_token": 5.0, "equal": False,
        "texts": [{"text": "austen", "ms_per_token": 1.0}],
    }  # fmt: skip
    theirs, mine = (
        verify.cells_of(_written(tmp_path / f"{n}.json", made, hardware=made["machine"], seconds=2.0))
        for n, made in enumerate((row, other))
    )
    shown = {(place, name): said for place, name, *said in verify.compared(theirs, mine)[0].rows}
    at = '7b, context 9, T=0.0, setting {"a": 2, "b": 1}'
    assert shown == {
        ("the whole file", "seconds"): ["2", "2", "1.00"],
        (at, "ms_per_token"): ["4", "5", "1.25"],
        (at, "equal"): ["yes", "no", "differs"],
        (at, "acceptance target"): ["0.5", "0.5", "1.00"],
        (at, "overlap 1"): ["0.5", "0.5", "1.00"],
        (at, "overlap 2"): ["0.25", "0.25", "1.00"],
        (at, "outcome"): ["equal", "equal", "same"],
        (f"{at}, texts, austen", "ms_per_token"): ["2", "1", "0.50"],
    }


def test_rows_of_one_place_are_an_error(tmp_path: Path) -> None:
    row = {"context": 9, "colour": "red", "ms": 1.0}
    path = _written(tmp_path / "a.json", row, row | {"colour": "blue"})
    with pytest.raises(
        ValueError, match=r"a\.json': two records are both of 'context 9'; the field .* is missing"
    ):
        verify.cells_of(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a results file, which is a JSON object"):
        verify.cells_of(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        verify.cells_of(path)
    with pytest.raises(ValueError, match="holds no figures that can be compared"):
        verify.cells_of(_written(path, seed=0))


def test_parts_of_the_published_file_are_not_ones_own() -> None:
    theirs = {
        "parts": {"7b": {"date": "1"}, "8b": {"date": "1"}},
        "rows": [{"part": "7b", "ms": 1.0}, {"part": "8b", "ms": 2.0}],
    }
    # A benchmark begins a new file as a copy, and replaces the part that it measures.
    mine = {
        "parts": {"7b": {"date": "1"}, "8b": {"date": "2"}},
        "rows": [{"part": "7b", "ms": 1.0}, {"part": "8b", "ms": 3.0}],
    }
    assert rows.own_parts(theirs, mine)["rows"] == [{"part": "8b", "ms": 3.0}]
    assert rows.own_parts(theirs, theirs)["rows"] == theirs["rows"]


@pytest.mark.slow
def test_a_file_of_several_rows_is_measured_again(
    capsys: pytest.CaptureFixture[str],
    script: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of its own processes, as in the tests' (``THREADS`` in conftest).
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--device", "cpu", "--contexts", "320", "400", "480", "--settings", "1", "--new-tokens", "8"]
    words += ["--needles", "1", "--budget", "264", "--original", "256"]
    script("benchmarks.rope.run").main([*words, "--out", str(tmp_path)])
    path = tmp_path / "rope_cpu.json"
    content = json.loads(path.read_text())
    assert len(content["rows"]) == 3
    # As the command line would have written it, with a place that is not here.
    command = ["python", "-m", "scripts.benchmarks", "rope", *words, "--out", "/nowhere"]
    path.write_text(json.dumps(content | {"command": " ".join(command)}))
    capsys.readouterr()
    out = tmp_path / "mine"
    given = ["--json", "--out", str(out), "--extra", "--contexts", "320", "400"]
    code, shown, err = run(capsys, "bench", "verify", str(path), *given)
    assert code == 0, err
    assert "not measured here, 1 of 3 cells" in err
    figures = last_object(shown)["rows"]
    assert {row["figure"] for row in figures} == {"loss", "retrieval_overlap", "draft_overlap", "found"}
    assert len(figures) == 3 * 4
    measured = [row for row in figures if row["context"] != "480"]
    assert len(measured) == 2 * 4
    # By the same seed.
    assert all(row["here"] == pytest.approx(row["file"], abs=1e-3) for row in measured)
    assert all(row["here"] is None for row in figures if row["context"] == "480")
    assert (out / "rope_cpu.json").is_file()


@pytest.mark.slow
def test_what_cannot_run_here_is_said_in_one_sentence(
    capfd: pytest.CaptureFixture[str],
    script: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remeasure = script("benchmarks.remeasure")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def refused(path: Path) -> str:
        assert remeasure.main([str(path), "--out", str(tmp_path)]) == 2
        [line] = capfd.readouterr().err.splitlines()
        command, _, why = str(line).partition(": ")
        assert command == "triforce-tree"
        return why

    said = refused(RESULTS / "prefill_h200.json")
    assert said.startswith("the command of prefill_h200.json was measured on a GPU, and there is none here; ")
    tiles = RESULTS / "tiles_h200.json"
    assert refused(tiles).startswith("tiles_h200.json is of no script of this checkout")
    # The command line says the same.
    code, out, err = run(capfd, "bench", "verify", str(tiles))
    assert (code, out) == (2, "")
    assert err.startswith("triforce-tree: tiles_h200.json is of no script of this checkout")
    row = {"text": "austen", "ms_per_token": 1.0}
    command = "python -m scripts.benchmarks trees --texts gone.json.xz"
    path = _written(tmp_path / "trees.json", row, command=command, hardware="a CPU")
    said = refused(path)
    assert (
        "reads --texts gone.json.xz, which is not here; python -m scripts.benchmarks texts makes one" in said
    )
    # Another benchmark's file is not measured by what it says, nor is any other program run.
    for other in ("python -m scripts.benchmarks rope", "rm -rf /", "python -m json.tool", "it's"):
        path = _written(tmp_path / "other.json", row, command=other, hardware="a CPU")
        assert "is of no script of this checkout" in refused(path)
    monkeypatch.setattr("triforce_tree.cli.bench.verify.ROOT", tmp_path)
    code, _, err = run(capfd, "bench", "verify", str(path))
    assert code == 2
    assert "this installation has not; run bench verify in a checkout, or give --mine FILE" in err


def test_recorded_commands_lose_what_is_of_their_machine(script: Callable[[str], Any]) -> None:
    planned = script("benchmarks.remeasure").planned
    recorded = "python -u -m scripts.benchmarks rope --contexts 64 --seconds 9 --out=/x --kinds 'a b'"
    content = {"command": recorded, "hardware": "a CPU", "rows": []}
    [plan] = planned("rope_cpu.json", content)
    words = ["scripts.benchmarks", "rope", "--contexts", "64", "--kinds", "a b", "--out", "{out}"]
    assert shlex.split(plan.step.words) == words
    assert not plan.on_gpu
    spread = {
        "command": "torchrun --nproc-per-node 2 -m scripts.benchmarks split --runs 3",
        "hardware": "NVIDIA H200",
    }
    [plan] = planned("sequence_parallel_h200x2.json", spread)
    assert plan.step.every_card
    assert plan.on_gpu
    # Each part by its own command, once; where one is of an older script, all by today's steps.
    parts = {
        "a": content | {"command": "python -m scripts.benchmarks offload --part 7b"},
        "b": {"command": "x.py"},
    }
    assert {plan.step.name for plan in planned("offload_h200.json", {"parts": parts})} > {"offload-7b"}
    parts["b"] = parts["a"]
    assert [p.step.name for p in planned("offload_h200.json", {"parts": parts})] == ["recorded"]
