"""The benchmark `split` by several processes on a CPU: rows, what ranks communicate, the tables."""

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.common.results import content_at
from tests.support.processes.processes import ranks_of

TEXTS = ["--texts", "--kinds", "python-topics", "--new-tokens", "8", "--plain-tokens", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what two ranks, one, and then four have measured."""
    made = tmp_path_factory.mktemp("split")
    for size, texts in ((2, TEXTS), (1, TEXTS), (4, [])):
        first, *others = ranks_of(
            ["-m", "scripts.benchmarks", "split", "--tiny", "--out", str(made), *texts], size
        )
        assert [rank.code for rank in (first, *others)] == [0] * size, first.err
        assert all(rank.out == "" for rank in others)
    return made


@pytest.mark.release
def test_two_ranks_and_one_write_into_one_file(script: Any, folder: Path) -> None:
    content = content_at(folder / "sequence_parallel_h200x2.jsonl")
    rows = {row["way"]: row for row in content["rows"]}
    assert list(rows) == ["by position", "by heads", "one card"]
    # Each row keeps the command that measured it.
    started = [content["parts"][row["part"]]["command"].split(" -")[:2] for row in rows.values()]
    assert [words[0] for words in started] == ["torchrun", "torchrun", "python"]
    assert started[0][1] == "-nproc-per-node 2"
    names = {"draft", "retrieval_refresh", "retrieval", "target", "plain", "prefill"}
    assert all(row["ms"].keys() == names and min(row["ms"].values()) > 0 for row in rows.values())
    # Scratch slots are on both ranks, the others on one.
    assert 0.5 < rows["by position"]["kv_bytes"] / rows["one card"]["kv_bytes"] < 0.6
    # 7 layers; 4 heads of 128 elements in fp32, with a log-sum-exp each, and a hidden state of 512.
    assert rows["by position"]["collectives"]["plain"] == {"calls": 14, "bytes": 7 * (4 * 129 + 512) * 4}
    assert rows["by heads"]["collectives"]["plain"] == {"calls": 14, "bytes": 14 * 512 * 4}
    assert rows["by position"]["merge_ms"].keys() == {"plain", "target"}
    # A rank's part of keys and values of all heads of a layer, as often as there are layers.
    ring = rows["by position"]["ring"]
    assert ring["ms"] > 0
    assert ring["layers"] * ring["layer_bytes"] == pytest.approx(rows["by position"]["kv_bytes"], rel=0.01)
    for row in rows.values():
        [text] = row["texts"]
        # In fp32 both kinds of decoding write the same tokens.
        assert (text["text"], text["new_tokens"], text["equal_tokens"]) == ("python-topics", 8, [4, 4])
        assert text["speedup"] == pytest.approx(text["plain_ms_per_token"] / text["ms_per_token"])
    found = script("benchmarks.cards.tables").TABLES["sequence_parallel_texts"].make(content)
    kept = rows["by heads"]["texts"][0]["speedup"] / rows["one card"]["texts"][0]["speedup"]
    assert f"| {100 * kept:.0f} % |" in found
    assert "| 100 % |" in found


@pytest.mark.release
def test_four_ranks_measure_every_split_beside_its_prediction(script: Any, folder: Path) -> None:
    tables = script("benchmarks.cards.tables")
    content, alone = (content_at(folder / tables.file_of(cards)) for cards in (4, 1))
    both = "heads over 2, text over 2"
    rows = {row["way"]: row for row in content["rows"]}
    assert list(rows) == ["by position", both, "by heads"]
    # 7 layers; a hidden state of 512 in fp32; attention of 4 heads of 128, of 2 where two ranks share them.
    logits = {"calls": 1, "bytes": 4160 // 4 * 4}
    hidden = {"calls": 7, "bytes": 512 * 4}
    expected = {
        "by position": {"merge": {"calls": 7, "bytes": 4 * 129 * 4}, "sum of neurons": hidden},
        both: {"merge": {"calls": 7, "bytes": 2 * 129 * 4}, "sum of heads": hidden, "sum of neurons": hidden},
        "by heads": {"sum of heads": hidden, "sum of neurons": hidden},
    }
    for way, row in rows.items():
        each = row["each"]["plain"]
        sent = {name: {key: one[key] for key in ("calls", "bytes")} for name, one in each.items()}
        assert sent == expected[way] | {"logits": logits}
        assert all(one["ms"] > 0 and one["predicted_ms"] > 0 for one in each.values())
    [whole] = [row for row in alone["rows"] if row["cards"] == 1]
    names = {"machine", "ranks", "split", "shape", "context", "what", "ms", "efficiency", "predicted_ms"}
    assert all(names <= figure.keys() for figure in content["figures"])
    [plain] = [f for f in content["figures"] if f["what"] == "plain" and f["split"] == both]
    assert (plain["machine"], plain["ranks"], plain["shape"], plain["context"]) == (
        "cpu",
        4,
        "llama-2-13b",
        1024,
    )
    assert plain["ms"] == rows[both]["ms"]["plain"]
    assert plain["efficiency"] == pytest.approx(whole["ms"]["plain"] / 4 / plain["ms"])
    assert plain["predicted_ms"] == rows[both]["predicted_ms"]["plain"]
    # The table has the rows of all files, and the picture what was measured on more cards.
    joined = tables.with_more_cards(alone, folder)
    shown = tables.TABLES["sequence_parallel"].make(joined)
    assert [shown.count(f"| {cards} |") for cards in (1, 2, 4)] == [1, 2, 3]
    assert f"| {rows[both]['predicted_ms']['plain']:.2f} |" in shown
    longer = [row | {"context": 2048, "part": row["part"]} for row in joined["rows"]]
    found = tables.shortest_and_longest(joined | {"rows": joined["rows"] + longer})
    assert [(row["cards"], row["context"]) for row in found] == [(2, 1024), (2, 2048), (4, 2048)]
