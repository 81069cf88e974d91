"""Stage costs are kept in a file that processes share."""

import json
from pathlib import Path
from typing import Any

import pytest

from triforce_tree.decoding.choice import cost_table
from triforce_tree.decoding.choice.cost_table import CostTable
from triforce_tree.policy.costs import StageCosts
from triforce_tree.policy.passes import STAGE_FIELDS, StageSeconds

COSTS = StageCosts(
    (100, 500),
    (
        StageSeconds(0.008, 0.001, 0.001, chain=0.01, root=0.008),
        StageSeconds(0.02, 0.001, 0.001, chain=0.03, root=0.02),
    ),
)
SETTINGS = {"machine": "abacus", "levels": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "stage_costs.json"


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
    assert [CostTable(path).find({"levels": n}) is None for n in range(5)] == [True] * 2 + [False] * 3


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
def test_a_damaged_file_is_replaced_with_a_sentence(
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
    path.write_text(json.dumps({"entries": 5}))
    assert CostTable(path).find(SETTINGS) is None


def test_without_a_folder_costs_are_kept_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    table = CostTable(tmp_path / "file" / "stage_costs.json")
    for levels in (2, 3):
        assert table.find({"levels": levels}) is None
        table.add({"levels": levels}, COSTS)
        assert table.find({"levels": levels}) == COSTS
    [record] = caplog.records
    assert "set TRIFORCE_TREE_CACHE to another folder" in record.getMessage()
