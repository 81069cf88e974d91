"""Results files as tables."""

from pathlib import Path
from typing import Any

from triforce_tree.bench import results
from triforce_tree.bench.results import Record, Records
from triforce_tree.bench.tables import tables, write_beside


def speed(method: str, seconds: float, length: int = 400, **more: Any) -> Record:
    return {
        "kind": "speed", "length": length, "prompt": 0, "temperature": 0.0, "method": method,
        "prompt_tokens": length - 1, "decode_seconds": seconds, "timed_tokens": 100,
        "acceptance": {"target": 0.5}, "repeated_8grams": 0.25, "tokens": [1, 2], **more,
    }  # fmt: skip


def public(path: Path | None = None, factor: float = 1.0, **about: Any) -> Records:
    """Returns a run over two lengths."""
    settings = {"benchmark": "text", "new_tokens": 100, "seed": 0}
    records = Records(path, settings, about or None)
    for record in (
        speed("triforce-3-level", 0.2 * factor),
        speed("triforce-3-level", 0.3 * factor, prompt=1),
        speed("triforce-3-level", 0.4 * factor, prompt=2),
        speed("transformers-dynamic", 0.9),
        speed("triforce-2-level", 0.1, length=800),
    ):
        records.add(record)
    return records


def test_tables_hold_medians() -> None:
    [timed] = tables(public())
    assert timed.rows[0] == ("triforce-3-level", "3 x 399", "0", "3.00", "", "3.00x", "target 0.50", "25 %")
    assert timed.rows[2][0] == "triforce-2-level"
    assert timed.rows[2][4:6] == ("", "")  # no baseline was measured at this length
    assert "| triforce-3-level | 3 x 399 |" in timed.markdown()


def test_methods_stand_beside_plain_decoding_of_the_same_length_and_temperature() -> None:
    records = Records(None, {"benchmark": "text", "new_tokens": 100})
    undrafted = speed("triforce-2-level", 0.8) | {"acceptance": {}}
    plain = speed("triforce-autoregressive", 0.6) | {"acceptance": {}}
    for record in (
        speed("triforce-3-level", 0.2),
        undrafted,
        plain,
        speed("triforce-3-level", 0.2, length=800),
    ):
        records.add(record)
    [timed] = tables(records)
    assert [(row[0], *row[4:7]) for row in timed.rows] == [
        ("triforce-3-level", "3.00x", "", "target 0.50"),
        ("triforce-2-level", "0.75x", "", "all passes were plain"),
        ("triforce-autoregressive", "1.00x", "", ""),
        ("triforce-3-level", "", "", "target 0.50"),
    ]


def test_needles_have_a_column_for_each_length() -> None:
    records = Records(None, {"benchmark": "needle"})
    for length, found in ((100, True), (100, False), (200, True)):
        records.add({"through": "target", "length": length, "depth": 0.5, "trial": 0, "found": found})
    [table] = tables(records)
    assert (list(table.columns), table.rows) == (
        ["depth", "through", "100", "200"],
        [("50 %", "target", "0.50", "1.00")],
    )


def test_a_run_leaves_a_table_beside_its_results(tmp_path: Path) -> None:
    records = public(tmp_path / "run.jsonl", **results.header(3))
    written = write_beside(tmp_path / "run.jsonl", records, tables(records))
    assert [path.name for path in written] == ["run.md"]
    text = written[0].read_text("utf-8")
    assert "| triforce-3-level | 3 x 399 | 0 | 3.00 |" in text
    assert "to plain: to this engine without drafts" in text
    assert "seed 3" in text
    assert write_beside(tmp_path / "none.jsonl", Records(None, {}), []) == []
    again = Records(tmp_path / "run.jsonl", records.settings)
    assert again.about == records.about
