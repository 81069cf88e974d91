"""``bench batch | offload | kernels | workloads`` on a tiny pair, on a CPU."""

import json
from pathlib import Path

import pytest

from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import last_object, run

SMALL = ["--budget", "64", "--recent", "32", "--chunk", "8", "--window", "64"]


@pytest.mark.slow
def test_batches(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "batch.jsonl"
    words = ["bench", "batch", *pair.options, *SMALL, "--batches", "1", "2", "--context", "90"]
    words += ["--new-tokens", "6", "--out", str(out), "--json"]
    code, shown, err = run(capsys, *words)
    assert code == 0
    rows = last_object(shown)["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [
        (1, "all levels"), (1, "plain decoding"),
        (2, "all levels"), (2, "plain decoding"), (2, "all levels, one by one"),
    ]  # fmt: skip
    assert "to one by one" in err
    lines = out.read_text().splitlines(keepends=True)
    assert [json.loads(line)["new_tokens"] for line in lines[1:]] == [6, 6, 12, 12, 12]
    # An interrupted run measures what is missing.
    out.write_text("".join(lines[:4]) + lines[4][:9])
    assert run(capsys, *words)[0] == 0
    again = out.read_text().splitlines(keepends=True)
    assert again[:4] == lines[:4]
    assert len(again) == len(lines)


def test_offloading(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
    words = ["bench", "offload", *pair.options, *SMALL, "--context", "200", "--prompts", "1"]
    words += ["--new-tokens", "6", "--plain-tokens", "3", "--json"]
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "nothing is offloaded; give --offload" in err
    out = tmp_path / "offload.jsonl"
    code, shown, _ = run(capsys, *words, "--offload", "--out", str(out))
    assert code == 0
    ours, *plain = last_object(shown)["rows"]
    assert len(plain) == 2
    fastest = min(row["ms_per_token"] for row in plain)
    assert ours["to_fastest_plain"] == pytest.approx(fastest / ours["ms_per_token"])
    head, first, *_ = map(json.loads, out.read_text().splitlines())
    assert head["settings"]["memory"] == {"offload": True}
    assert first["memory"]["options"]


def test_kernels_are_measured_reported_and_measured_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "kernels.jsonl"
    words = [
        "bench",
        "kernels",
        "--device",
        "cpu",
        "--heads",
        "4/2/32",
        "--prefixes",
        "64",
        "--trees",
        "1",
        "5",
    ]
    words += ["--pages", "0", "16", "--out", str(out), "--json"]
    code, shown, _ = run(capsys, *words)
    assert code == 0
    rows = last_object(shown)["rows"]
    # No other kernels than the CPU's.
    methods = ["triforce", "triforce", "plain torch", "SDPA dense mask"]
    assert [row["method"] for row in rows] == 2 * methods
    assert all(row["us"] > 0 and not row["reason"] for row in rows)
    kv, ends = 2 * 65 * 2 * 32, 2 * 4 * 32
    assert rows[0]["megabytes"] == pytest.approx(4 * (kv + ends) / 1e6)
    assert (tmp_path / "kernels.md").exists()
    code, _, err = run(capsys, "bench", "kernels", "--device", "cpu", "--methods", "FlashInfer XQA")
    assert code == 2
    assert "is not measured on cpu; known: triforce, plain torch" in err


@pytest.mark.slow
def test_workloads(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "workloads.jsonl"
    words = [
        "bench",
        "workloads",
        *pair.options,
        "--workloads",
        "deft/keyword",
        "deft/speculative-32",
        "long",
    ]
    words += ["--scale", "0.002", "--new-tokens", "3", "--out", str(out), "--json"]
    code, shown, err = run(capsys, *words)
    assert code == 0
    rows = last_object(shown)["rows"]
    timed = {(row["workload"], row["way"]) for row in rows["attention"] if not row["reason"]}
    assert len(timed) == 4 * 3
    decoded = {(row["workload"], row["way"]): row for row in rows["decoding"]}
    assert len(decoded) == 3 * 2
    many = decoded["long/32x256", "engine.tree"]
    assert many["texts"] == 32
    assert many["to_one_branch"] > 0
    assert many["attention_ms"] > 0
    assert "not measured" in err
    lines = out.read_text()
    assert run(capsys, *words)[0] == 0
    assert out.read_text() == lines
