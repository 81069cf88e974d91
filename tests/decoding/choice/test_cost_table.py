"""The table of stage costs: kept in a file that processes share, each set of settings measured once."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.program_cases import GREEDY, SAMPLED, draft_of, model, program_of
from tests.support.models.tiny_pair import TinyPair
from triforce_tree import Engine
from triforce_tree.decoding import prepared_stages
from triforce_tree.decoding.choice import cost_table, stage_costs
from triforce_tree.decoding.choice.cost_table import CostTable
from triforce_tree.decoding.choice.passes import STAGE_FIELDS, StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts, measure
from triforce_tree.decoding.loop import DecodingLoop

COSTS = StageCosts((100, 500), (StageSeconds(0.008, 0.001, tree=0.01), StageSeconds(0.02, 0.001, tree=0.03)))
SETTINGS = {"machine": "abacus", "levels": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "stage_costs.json"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Grows by an element for each measurement of stages; the cache folder is empty."""
    done: list[Any] = []

    def counted(*args: Any) -> StageCosts:
        done.append(args)
        return measure(*args)

    monkeypatch.setattr(cost_table, "measure", counted)
    monkeypatch.setenv("TRIFORCE_TREE_CACHE", str(tmp_path))
    cost_table._table_at.cache_clear()
    yield done
    cost_table._table_at.cache_clear()


def test_the_file_keeps_costs_by_their_settings(path: Path) -> None:
    table = CostTable(path)
    assert table.find(SETTINGS) is None
    assert table.add(SETTINGS, COSTS) == COSTS
    assert CostTable(path).find(dict(reversed(SETTINGS.items()))) == COSTS
    assert CostTable(path).find(SETTINGS | {"levels": 2}) is None
    [entry] = json.loads(path.read_text())["entries"].values()
    assert entry["settings"] == SETTINGS
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_concurrent_writers_agree(path: Path) -> None:
    """Each keeps what others have written, and uses the costs that were written first."""
    other = StageCosts((7,), (StageSeconds(1.0),))
    tables = [CostTable(path), CostTable(path), CostTable(path)]
    assert all(table.find(SETTINGS) is None for table in tables)
    assert tables[0].add(SETTINGS, COSTS) == COSTS
    assert tables[1].add(SETTINGS | {"levels": 2}, other) == other
    assert tables[2].add(SETTINGS, other) == COSTS
    fresh = CostTable(path)
    assert (fresh.find(SETTINGS), fresh.find(SETTINGS | {"levels": 2})) == (COSTS, other)


def test_the_oldest_entries_are_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_table, "MOST_ENTRIES", 3)
    table = CostTable(path)
    for levels in range(5):
        table.add({"levels": levels}, COSTS)
    assert [CostTable(path).find({"levels": n}) is None for n in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "content, needed",
    {
        "no JSON": ("{", "cannot be read"),
        "no UTF-8": (b"\xff\xfe\x00", "cannot be read"),
        "a list": ("[]", "is no table"),
        "no entries": ('{"entries": 5}', "is no table"),
        "deep": ("[" * 900 + "]" * 900, "cannot be read"),
    }.values(),
)
def test_a_damaged_file_is_replaced(
    path: Path, content: str | bytes, needed: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    table = CostTable(path)
    assert table.find(SETTINGS) is None
    assert table.find({}) is None
    [record] = caplog.records
    assert needed in record.getMessage()
    assert str(path) in record.getMessage()
    table.add(SETTINGS, COSTS)
    assert CostTable(path).find(SETTINGS) == COSTS
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": "x"},
        {"seconds": {"plain": [0.1, 0.2]}},
        {"seconds": None},
        {"seconds": {name: [-1.0, 1.0] for name in STAGE_FIELDS}},
        {"lengths": [float("inf")]},
    ],
    ids=str,
)
def test_a_damaged_entry_is_measured_again(path: Path, change: dict[str, Any]) -> None:
    CostTable(path).add(SETTINGS, COSTS)
    held = json.loads(path.read_text())
    [key] = held["entries"]
    for entry in (held["entries"][key] | change, 3, {}):
        path.write_text(json.dumps({"entries": {key: entry}}))
        assert CostTable(path).find(SETTINGS) is None
        CostTable(path).add(SETTINGS, COSTS)
        assert CostTable(path).find(SETTINGS) == COSTS
    path.write_text('{"entries": 5}')
    assert CostTable(path).find(SETTINGS) is None


def test_without_a_folder_costs_are_kept_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    table = CostTable(tmp_path / "file" / "stage_costs.json")
    for levels in (2, 3):
        assert table.find({"levels": levels}) is None
        table.add({"levels": levels}, COSTS)
        assert table.find({"levels": levels}) == COSTS
    [record] = caplog.records
    assert "measured by this process; TRIFORCE_TREE_CACHE names another folder" in record.getMessage()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TRIFORCE_TREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cost_table.user_table().path is None
    assert cost_table.user_table().add(SETTINGS, COSTS) == COSTS
    cost_table._table_at.cache_clear()


def test_short_requests_measure_nothing(
    pair: TinyPair,
    measurements: list[Any],
    ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measuring would take a good part of their time. A seed has one text while nothing is known."""
    engine = pair.load(levels=3, budget=64, recent=32, gamma=4, tree="best-first:3,2", window=64)
    more: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "eos_token_id": None, "seed": 5}
    first, again = (engine.generate(ids, **more) for _ in range(2))
    assert first.sequences.tolist() == again.sequences.tolist()
    assert not measurements
    assert not (tmp_path / "stage_costs.json").exists()
    # One that takes long measures, and what was learnt beside the guessed costs is forgotten.
    engine.generate(ids, max_new_tokens=8, do_sample=True, eos_token_id=None)
    program = engine.last_program
    assert program is not None
    assert any(learnt.cost_factors for learnt in program.learnt.values())
    monkeypatch.setattr(stage_costs, "_ALLOWED", 1.0)
    engine.generate(ids, max_new_tokens=800, do_sample=True, stopping_criteria=[lambda *_: True], seed=5)
    assert len(measurements) == 1


def test_engines_measure_once(
    pair: TinyPair,
    measurements: list[Any],
    ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_costs, "_ALLOWED", 10.0)

    def generated(own: Engine, **options: Any) -> list[int]:
        out = own.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, **options)
        return out.sequences[0, len(ids) :].tolist()

    options = {"budget": 64, "recent": 32, "gamma": 4, "tree": "best-first:3,2", "window": 64}
    first = pair.load(levels=3, **options)
    expected = generated(first)
    assert len(measurements) == 1
    assert generated(first) == expected
    assert (tmp_path / "stage_costs.json").is_file()
    # As another process, which finds the file.
    cost_table._table_at.cache_clear()
    assert generated(pair.load(levels=3, **options), seed=3) == expected
    assert len(measurements) == 1
    # Other settings are measured for themselves; one level and fixed rounds need no costs.
    assert generated(pair.load(levels=2, **options)) == expected
    assert len(measurements) == 2
    for more in ({"levels": 1}, {"levels": 3, "rounds": 2}, {"levels": 2, "rounds": 1}):
        assert generated(pair.load(**options, **more)) == expected
    assert len(measurements) == 2
    (tmp_path / "stage_costs.json").unlink()
    cost_table._table_at.cache_clear()
    assert generated(pair.load(levels=3, **options)) == expected
    assert len(measurements) == 3


def test_no_log_without_a_reason(
    measurements: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_stages, "_PATIENCE", 60.0)
    caplog.set_level(logging.WARNING)
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1, rounds=None)
    DecodingLoop.over(program, SAMPLED, 0)
    DecodingLoop.over(program, GREEDY, 0)
    DecodingLoop.over(program, SAMPLED, 1)
    assert len(measurements) == 2, "sampling costs more than the largest score"
    assert not caplog.records
