"""The benchmark of other engines: processes, figures, rows, formats, and what is said of missing engines."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.peers.process import EngineError, EngineProcess
from scripts.benchmarks.peers.protocol import ENGINES, Answer, Load, engine
from scripts.benchmarks.peers.rows import rows, timed
from scripts.benchmarks.sources.registry import Texts
from triforce_tree.bench.texts import pydoc_text
from triforce_tree.loading.checkpoints import PAIR

HEADER = {"hardware": "a machine", "settings": {"model": "m"}}
MISSING = next(name for name, package in (("vllm", "vllm"), ("sglang", "sglang")) if not find_spec(package))


def sample(mode: str, ms: float, engine: str = "ours", **other: Any) -> dict[str, Any]:
    return {
        "engine": engine, "format": "F16", "mode": mode, "bits": 16, "text": "t", "kind": "k", "context": 8,
        "temperature": 0.0, "batch": 1, "new_tokens": 4, "run": 0, "ms_per_token": ms, "prefill_s": 1.0,
        "cpu_ms_per_token": ms, "tokens_per_pass": None, "repeated_8grams": 0.0, "load_s": 1.0,
        "other_programs": 0.0, "versions": {}, "tokens": [[1, 2, 3, 4]], **other,
    }  # fmt: skip


def test_the_time_of_a_token_is_counted_from_the_last_first_token() -> None:
    # The first sequence begins at 1 s and the second one at 2 s, when the first has a third token.
    stamps = [(1.0, 1.5, 0, 2), (2.0, 2.5, 0, 1), (2.0, 2.5, 1, 1), (3.0, 4.5, 0, 2), (4.0, 5.5, 1, 4)]
    found = timed(Answer([[1] * 5, [2] * 5], stamps))
    assert (found["prefill_s"], found["ms_per_token"]) == (2.0, 1e3 * 2.0 / 3)
    assert found["cpu_ms_per_token"] == 1e3 * 3.0 / 3
    alone = timed(Answer([[1] * 9], [(1.0, 1.0, 0, 1), (2.0, 2.0, 0, 5), (3.0, 3.0, 0, 3)]))
    assert alone["tokens_per_pass"] == 4
    counted = timed(Answer([[1] * 9], [(1.0, 1.0, 0, 1), (2.0, 2.0, 0, 5), (3.0, 3.0, 0, 3)], passes=4))
    assert counted["tokens_per_pass"] == 2
    with pytest.raises(ValueError, match="all tokens came at once"):
        timed(Answer([[1, 2]], [(1.0, 1.0, 0, 2)]))


def test_rows_have_medians_the_fastest_mode_and_what_is_missing() -> None:
    lookup = sample("prompt-lookup:4", 5.0, "llama.cpp", tokens=[[1, 2, 9, 4]])
    failed = {
        name: lookup[name] for name in ("engine", "format", "bits", "text", "kind", "temperature", "batch")
    }
    failed |= {"mode": "plain", "context": 99, "new_tokens": 4, "run": 0, "missing": "out of memory"}
    absent = {"engine": "vllm", "format": "bf16", "mode": "plain", "bits": 16, "missing": "not installed"}
    early = {
        "engine": "ours",
        "format": "F16",
        "mode": "plain",
        "bits": 16,
        "missing": "it was not there yet",
    }
    samples = [
        early, *(sample("plain", ms, run=run) for run, ms in enumerate((3.0, 9.0, 4.0))),
        sample("default", 2.0), lookup, sample("plain", 6.0, "llama.cpp"), failed, absent,
        failed | {"run": 1},
    ]  # fmt: skip
    made = rows("m", HEADER, samples)
    found = {(row["engine"], row["mode"]): row for row in made if "missing" not in row}
    assert {key: row["ms_per_token"] for key, row in found.items()} == {
        ("ours", "plain"): 4.0, ("ours", "default"): 2.0, ("llama.cpp", "prompt-lookup:4"): 5.0,
        ("llama.cpp", "plain"): 6.0,
    }  # fmt: skip
    assert [key for key, row in found.items() if row["best"]] == [
        ("ours", "default"),
        ("llama.cpp", "prompt-lookup:4"),
    ]
    assert found["ours", "plain"]["runs"] == 3
    assert found["llama.cpp", "prompt-lookup:4"]["as_ours"] == 2
    assert found["ours", "default"]["as_ours"] == 4
    missing = [(row["engine"], row.get("context"), row["missing"]) for row in made if "missing" in row]
    assert missing == [("llama.cpp", 99, "out of memory"), ("vllm", None, "not installed")]


def test_a_table_sets_ours_beside_the_fastest_other_engine(script: Any) -> None:
    tables = script("benchmarks.peers.tables")
    samples = [
        sample("plain", 8.0), sample("default", 4.0), sample("plain", 3.0, "llama.cpp"),
        sample("plain flash", 2.0, "llama.cpp"), sample("static", 9.0, "transformers"),
        sample("default", 1.0, format="Q4_1", bits=4),
    ]  # fmt: skip
    made = rows("m", HEADER, samples)
    settings = HEADER["settings"] | {"threads": 2}
    part = {"hardware": "a machine", "settings": settings, "commit": "abc", "date": "2026-11-29"}
    shown = tables.TABLES["peers_cpu"].make({"rows": made, "parts": {"m": part}})
    [line] = [line for line in shown.splitlines() if line.startswith("| 8 |")]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "8", "0", "16", "4.0", "8.0", "llama.cpp, plain flash (F16)", "2.0", "**0.50x**", "4.0", "2.0",
        "1.00", "1.00",
    ]  # fmt: skip
    every = tables.TABLES["peers_cpu_all"].make({"rows": made, "parts": {"m": part}})
    assert sum(line.startswith("|") for line in every.splitlines()) == 2 + len(samples)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_says_what_it_reads_and_how(name: str) -> None:
    made = engine(name)
    assert made.takes("model.gguf") or made.takes("folder")
    alone, all_of_them = made.modes(False, False), made.modes(True, True)
    assert alone
    assert set(alone) <= set(all_of_them)


def test_what_an_engine_lacks_is_said() -> None:
    load = Load("folder", "float32", "plain", None, None, 64, 1, 1)
    with pytest.raises(EngineError, match=f"the package {MISSING} is not installed for {sys.executable}"):
        EngineProcess(MISSING, sys.executable, load)
    with pytest.raises(EngineError, match="cannot be started"):
        EngineProcess(MISSING, "/no/python", load)
    with pytest.raises(EngineError, match=r"ended with code 1.*KeyError"):
        EngineProcess("no engine", sys.executable, load)


def test_a_gguf_file_is_written_in_another_type(script: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    kinds = gguf.GGMLQuantizationType
    draw = np.random.default_rng()
    matrix, vector = (draw.normal(size=size).astype(np.float32) for size in ((6, 64), (64,)))
    source = tmp_path / "model.Q8_0.gguf"
    made = gguf.GGUFWriter(source, "llama")
    made.add_file_type(7)
    made.add_token_list(["a", "b"])
    made.add_token_types([1, 3])
    made.add_float32("llama.rope.freq_base", 1e5)
    packed = gguf.quantize(matrix, kinds.Q8_0)
    made.add_tensor("matrix", packed, raw_dtype=kinds.Q8_0)
    made.add_tensor("vector", vector)
    for write in (
        made.write_header_to_file,
        made.write_kv_data_to_file,
        made.write_tensors_to_file,
        made.close,
    ):
        write()
    checkpoints = script("benchmarks.peers.checkpoints")
    found = checkpoints.checkpoint(str(source), "F16", tmp_path)
    assert (found.format, found.bits, found.target) == ("F16", 16, str(tmp_path / "model.F16.gguf"))
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(found.target)
    kept = {name: field.contents() for name, field in after.fields.items() if not name.startswith("GGUF.")}
    assert kept.pop("general.file_type") == 1
    assert kept == {name: before.fields[name].contents() for name in kept}
    tensors = {tensor.name: tensor for tensor in after.tensors}
    assert tensors["matrix"].tensor_type == kinds.F16
    expected = gguf.dequantize(packed, kinds.Q8_0).astype(np.float16)
    assert np.array_equal(np.asarray(tensors["matrix"].data).view(np.uint16), expected.view(np.uint16))
    assert np.array_equal(tensors["vector"].data, vector)
    own = checkpoints.checkpoint(str(source), "own", tmp_path)
    assert (own.format, own.bits, own.target) == ("Q8_0", 8, str(source))
    with pytest.raises(ValueError, match="'Q3' is unknown"):
        checkpoints.checkpoint(str(source), "Q3", tmp_path)
    with pytest.raises(ValueError, match="is no GGUF file"):
        checkpoints.checkpoint(str(PAIR / "target"), "F16", tmp_path)


@pytest.mark.release
def test_engines_write_the_same_greedy_text_and_a_second_call_has_nothing_to_do(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script("benchmarks.peers.run")
    monkeypatch.setattr(Texts, "read", lambda self, source: pydoc_text()[:5000])
    words = [
        "--tiny", "--out", str(tmp_path), "--engines", "ours", "transformers", MISSING, "--temperatures", "0",
        "--threads", "1", "--tries", "1", "--only", "ours/*", "transformers/fp32/dynamic",
        f"{MISSING}/fp32/plain",
    ]  # fmt: skip
    assert run.main(words) == 0
    path = tmp_path / "peers_cpu.jsonl"
    content = content_at(path)
    measured = {(r["engine"], r["mode"]): r for r in content["rows"] if "missing" not in r}
    assert measured.keys() == {("ours", "default"), ("ours", "plain"), ("transformers", "dynamic")}
    assert all(row["as_ours"] == row["new_tokens"] for row in measured.values())
    [missing] = [row for row in content["rows"] if "missing" in row]
    assert (missing["engine"], missing["mode"]) == (MISSING, "plain")
    assert MISSING in missing["missing"]
    capsys.readouterr()
    assert run.main(words) == 0
    assert content_at(path)["rows"] == content["rows"]
    assert "ms a token" not in capsys.readouterr().err
