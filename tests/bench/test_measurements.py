"""Prompts, results on disk, baselines, needles and comparisons."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.benchmarks.common.results import write
from tests.support.models import tiny_pair
from triforce_tree import Engine
from triforce_tree.bench import needle, results, speed
from triforce_tree.bench import texts as text
from triforce_tree.bench.baselines import METHODS, Job
from triforce_tree.bench.tables import speed_of
from triforce_tree.check.compare import Comparison, compared, summary
from triforce_tree.runtime.files.text_files import read_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(pair: tiny_pair.TinyPair) -> Engine:
    return pair.load(budget=64, recent=32)


@pytest.fixture(scope="module")
def ids(engine: Engine, pair: tiny_pair.TinyPair) -> list[int]:
    assert engine.tokenizer is not None
    return text.token_ids(engine.tokenizer, read_text(pair.text))


def test_one_document_is_cut_at_spread_positions(engine: Engine, ids: list[int]) -> None:
    assert engine.tokenizer is not None
    source = text.pydoc_text()[:60_000]
    cut = text.prompts([source], engine.tokenizer, 100, 3)
    assert [len(p) for p in cut] == [100, 100, 100]
    assert cut[0] == ids[:100]
    assert cut[2][-3:] == ids[-3:] or len(set(map(tuple, cut))) == 3
    assert text.prompts([source], engine.tokenizer, len(ids), 1) == [ids]


def test_several_documents_give_one_prompt_each(engine: Engine) -> None:
    assert engine.tokenizer is not None
    documents = ["alpha " * 50, "short", "beta " * 50, "gamma " * 50]
    cut = text.prompts(iter(documents), engine.tokenizer, 20, 2)
    assert text.prompts(iter(documents), engine.tokenizer, 20, 1) == cut[:1]
    decoded = [str(engine.tokenizer.decode(p)) for p in cut]
    assert [d.split()[0] for d in decoded] == ["alpha", "beta"]


@pytest.mark.parametrize("context, count", [(10**6, 1), (500, 2)])
def test_too_little_text_is_reported(engine: Engine, context: int, count: int) -> None:
    assert engine.tokenizer is not None
    one = ["word " * 100] if context > 1000 else ["word " * 600, "x"]
    with pytest.raises(ValueError, match=f"{context} tokens"):
        text.prompts(one, engine.tokenizer, context, count)


def test_every_method_writes_the_same_greedy_tokens(engine: Engine, ids: list[int]) -> None:
    job = Job(ids[:300], 0.0, 24)
    samples = {name: method(engine, job) for name, method in METHODS.items()}
    expected = samples["transformers-dynamic"].tokens
    assert len(expected) == 24
    for name, sample in samples.items():
        assert sample.tokens == expected, name
        assert sample.decode_seconds > 0
        assert sample.prefill_seconds > 0
        # The tokens of the first pass, prefill, are not timed.
        assert sample.timed_tokens == 24 if name.startswith("triforce") else sample.timed_tokens < 24


def test_nothing_ends_a_measurement_early(engine: Engine, ids: list[int]) -> None:
    for method in METHODS.values():
        assert 0 not in method(engine, Job(ids[:50], 1.5, 40, seed=5)).tokens


def test_records_refuse_other_settings_and_strange_files(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    results.Records(path, {"context": 5}).add({"prompt": 0, "value": 1.5})
    assert results.Records(path, {"context": 5}).find(prompt=0) == {"prompt": 0, "value": 1.5}
    with pytest.raises(ValueError, match="context=5, now it is 6"):
        results.Records(path, {"context": 6})
    path.write_text("some notes of mine\n")
    with pytest.raises(ValueError, match="not a results file"):
        results.Records(path, {"context": 5})


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = results.Records(path, {})
    records.add({"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + '{"n": 2, "nä'.encode())
    assert results.Records(path, {}).all == [{"n": 1}]
    assert path.read_bytes() == whole


def test_repeated_share() -> None:
    assert results.repeated_share(list(range(50))) == 0
    assert results.repeated_share([1, 2] * 50) == pytest.approx(91 / 93)
    assert results.repeated_share([1, 2, 3]) == 0


def record(method: str, seconds: float, **more: Any) -> results.Record:
    return {
        "method": method,
        "length": 16,
        "prompt_tokens": 16,
        "temperature": 0.0,
        "decode_seconds": seconds,
        "timed_tokens": 100,
        "acceptance": {},
        "repeated_8grams": 0.0,
        **more,
    }


def test_speed_is_a_median_against_the_fastest_baseline() -> None:
    slow, fast = "transformers-dynamic", "transformers-static"
    measured = [record("triforce-3-level", s, acceptance={"target": s}) for s in (0.5, 1.0, 9.0)]
    measured += [record(slow, 4.0), record(fast, 3.0), record("transformers-prompt-lookup", 0.1)]
    records = results.Records(None, {"new_tokens": 100})
    for each in measured:
        records.add(each)
    rows = {row["method"]: row for row in speed_of(records)}
    assert rows["triforce-3-level"]["ms_per_token"] == 10
    assert rows["triforce-3-level"]["acceptance"] == {"target": 1.0}
    # Prompt lookup is in the table, but is no baseline.
    assert rows["triforce-3-level"]["speedup_vs_best_baseline"] == 3
    assert rows[slow]["speedup_vs_best_baseline"] == 0.75


def test_header_names_machine_and_versions() -> None:
    header = results.header(3)
    assert header["seed"] == 3
    assert header["versions"]["torch"] == torch.__version__
    assert "cores" in header["hardware"]


def test_needles_have_the_length_asked_for_and_hold_their_fact(engine: Engine) -> None:
    assert engine.tokenizer is not None
    stack = needle.Haystack("A line of hay.\n" * 50, engine.tokenizer, 900)
    for depth in (0.0, 0.5, 1.0):
        made = stack.needle(900, depth, 0)
        assert len(made.prompt) == 900
        whole = str(engine.tokenizer.decode(made.prompt))
        assert whole.count(made.number) == 1
        place = whole.index(made.number) / len(whole)
        assert abs(place - depth) < 0.3
    assert stack.needle(900, 0.5, 1).number != stack.needle(900, 0.5, 0).number


def test_heat_map_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [{"through": "target", "length": n, "depth": 0.0, "found": n < 20} for n in (10, 20)]
    needle.heat_map(found, "target", [10, 20, 30], [0.0, 1.0], tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_a_comparison_reports_the_first_difference(engine: Engine, ids: list[int]) -> None:
    a = engine.generate(ids[:60], do_sample=False, max_new_tokens=10)
    b = engine.with_options(levels=1).generate(ids[:60], do_sample=False, max_new_tokens=10)
    same = Comparison(a, b, greedy=True)
    assert same.identical
    assert same.first_difference is None
    assert "identical" in same.verdict()
    b.sequences = b.sequences.clone()
    b.sequences[0, 63] += 1
    differing = compared(engine, ids[:60], a, b, greedy=True)
    assert differing.first_difference == 3
    assert differing.failed
    assert differing.difference is not None
    assert differing.difference.gap > 100 * differing.difference.noise > 0
    assert "texts differ from token 3 on: FAILED, there are no ties in 32 bits (gap " in differing.verdict()
    made = summary(a, differing)
    assert (made["identical"], made["first_difference"], made["tie"], made["failed"]) == (
        False,
        3,
        False,
        True,
    )
    assert Comparison(a, b, greedy=False).identical is None
    assert summary(a, same)["prompt_tokens"] == 60


def test_tables_come_from_results(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tables = script("benchmarks.tables")
    monkeypatch.setattr(make_tables, "RESULTS", tmp_path)
    marked = "a\n<!-- table: bit_exact -->\nold figures\n<!-- end table -->\nb\n"
    assert "Not measured yet: `python -m scripts.benchmarks exact`" in make_tables.filled(marked)
    row = {
        "shape": "some", "prompt": 700, "levels": 2, "batch": 1, "prompts": 3, "tokens": 1234, "partings": 0
    }  # fmt: skip
    write(tmp_path / "bit_exact_h200.jsonl", {**results.header(0), "rows": [row]})
    made = make_tables.filled(marked)
    assert "old figures" not in made
    assert "| some | 700 | 2 | 1 | 3 | 1,234 | **0** |" in made
    assert "File: `docs/results/bit_exact_h200.jsonl` (" in made
    assert make_tables.filled(made) == made


@pytest.mark.parametrize(
    "draft, token_map, message",
    [(None, None, "needs a draft model"), ("draft", "map", "needs a draft with the target's own vocabulary")],
)
def test_a_method_that_cannot_run_is_refused(draft: Any, token_map: Any, message: str) -> None:
    engine: Any = SimpleNamespace(draft=draft, token_map=token_map)
    with pytest.raises(ValueError, match=message):
        speed.check_methods(engine, ["triforce", "transformers-assistant"])
    speed.check_methods(engine, ["triforce", "transformers-static"])
