"""The adapter for lm-evaluation-harness, beside the harness's own model over transformers."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval; pip install 'triforce-tree[lm-eval]'")

from tests.support.models.tiny_pair import TinyPair
from triforce_tree.integrations import lm_eval as adapter

# The harness's dependencies warn of what they will change.
pytestmark = pytest.mark.filterwarnings("ignore")
TASK = """task: copied
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
metric_list:
  - metric: exact_match
"""


def instances(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in args]


@pytest.fixture(scope="module")
def ours(pair: TinyPair) -> Any:
    return adapter.TriforceTreeLM(
        pair.target, pair.draft, device="cpu", dtype="float32", budget=64, recent=32, batch_size=2
    )


@pytest.fixture(scope="module")
def theirs(pair: TinyPair) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=pair.target, device="cpu", dtype="float32", batch_size=1)


TEXT = "The statement is executed once for each item. " * 20


def test_loglikelihoods_are_those_of_transformers(ours: Any, theirs: Any) -> None:
    asked = instances((TEXT, " It is an error."), ("", "Names are bound."), (TEXT[:90] + " ", "the list"))
    for mine, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-3)
        assert mine[1] == other[1]
    # A continuation that greedy decoding writes is found to be greedy.
    [(prompt, options)] = [(TEXT, {"until": [], "max_gen_toks": 5})]
    [text] = ours.generate_until(instances((prompt, options)))
    ids = ours.tok_encode(prompt)
    greedy = ours.engine.generate(ids, do_sample=False, max_new_tokens=5).sequences[0, len(ids) :].tolist()
    assert ours._loglikelihood_tokens([(None, ids, greedy)])[0][1]
    assert not ours._loglikelihood_tokens([(None, ids, [greedy[0] + 1])])[0][1]
    assert isinstance(text, str)


def test_long_texts_are_scored_in_windows(ours: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "max_length", 50)
    monkeypatch.setattr(theirs, "_max_length", 50)
    asked = instances((TEXT,), ("Short.",))
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), abs=1e-2)


def test_a_beam_search_reports_no_passes(ours: Any) -> None:
    how = {"max_gen_toks": 6, "until": [], "do_sample": True, "temperature": 1.0, "num_beams": 2}
    [text] = ours.generate_until(instances((TEXT[:200], how)))
    assert text


def test_greedy_texts_end_before_stop_strings(
    ours: Any, theirs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    until = {"max_gen_toks": 24, "until": ["e"], "do_sample": False}
    long = {"max_gen_toks": 16, "until": ["\n\n\n"], "temperature": 0.0}
    asked = instances((TEXT, long), (TEXT[:200], until), (TEXT[:300], long), (TEXT[:400], until))
    with caplog.at_level("INFO", "lm_eval"):
        texts = ours.generate_until(asked)
    assert re.search(r"\d+ new tokens at [\d.]+ ms each .*, [\d.]+ in each pass", caplog.text)
    assert texts == theirs.generate_until(asked)
    assert not any("e" in text for text in (texts[1], texts[3]))


def test_temperature_and_limits_are_taken(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    generate = ours.engine.generate

    def seen(prompts: Any, **options: Any) -> Any:
        given.update(options, prompts=prompts)
        return generate(prompts, **options)

    monkeypatch.setattr(ours.engine, "generate", seen)
    monkeypatch.setattr(ours, "max_length", 60)
    options = {"max_gen_toks": 7, "until": "zzz", "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    ours.generate_until(instances((TEXT, options)))
    assert (given["max_new_tokens"], given["temperature"], given["top_p"]) == (7, 0.7, 0.9)
    assert given["stop_strings"] == ["zzz"]
    assert given["prompts"] == [ours.tok_encode(TEXT)[-53:]]
    with pytest.raises(ValueError, match="max_gen_toks=60 leaves no tokens for the prompt"):
        ours.generate_until(instances((TEXT, {"max_gen_toks": 60})))


def test_a_task_runs_from_the_command_line(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    data = [{"question": TEXT, "answer": f" {word}"} for word in ("item", "name", "list")]
    rows.write_text("".join(json.dumps(row) + "\n" for row in data))
    (tmp_path / "copied.yaml").write_text(TASK.format(rows=rows))
    options = f"pretrained={pair.target},draft={pair.draft},dtype=float32,budget=64,recent=32"
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", [
        "lm_eval", "--model", "triforce_tree", "--model_args", options, "--tasks", "copied",
        "--device", "cpu", "--include_path", str(tmp_path), "--output_path", str(out),
    ])  # fmt: skip
    adapter.main()
    [result] = out.rglob("results_*.json")
    scores = json.loads(result.read_text())["results"]["copied"]
    assert 0 <= scores["exact_match,none"] <= 1
    assert scores["sample_len"] == 3
