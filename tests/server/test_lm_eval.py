"""The client of lm-evaluation-harness for servers, beside the harness's own model over transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval; pip install 'triforce-tree[lm-eval]'")
pytest.importorskip("tenacity", reason="needs the client; pip install 'lm-eval[api]'")

from tests.support.processes.served import KEY, NAME, PROMPT, expected
from triforce_tree.engine import Engine

TASK = """task: continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
TEXTS = (PROMPT, "A list is a mutable")
CHOICES = (" the current namespace", " sequence of items, and", " 7")


@pytest.mark.filterwarnings("ignore")
def test_scores_of_choices_are_those_of_transformers(
    url: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows, pair = tmp_path / "rows.jsonl", engine.target.model.config.name_or_path
    data = [{"text": t, "choices": [*CHOICES, expected(engine, t, 4)], "answer": 0} for t in TEXTS]
    rows.write_text("".join(json.dumps(row) + "\n" for row in data))
    (tmp_path / "continued.yaml").write_text(TASK.format(rows=rows))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def scores(model: str, options: str) -> list[tuple[float, bool]]:
        given: Any = {"model": model, "model_args": options, "tasks": ["continued"], "bootstrap_iters": 0}
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        found = lm_eval.simple_evaluate(**given, task_manager=tasks, device="cpu", log_samples=True)
        samples = sorted(found["samples"]["continued"], key=lambda sample: sample["doc_id"])
        return [
            (float(score), str(greedy) == "True")
            for sample in samples
            for score, greedy in sample["filtered_resps"]
        ]

    theirs = scores("hf", f"pretrained={pair},dtype=float32")
    assert any(greedy for _, greedy in theirs)
    server = f"model={NAME},base_url={url}/v1/completions,tokenizer={pair}"
    for how in ("batch_size=3", "num_concurrent=3"):
        ours = scores("local-completions", f"{server},{how}")
        assert len(ours) == len(TEXTS) * (len(CHOICES) + 1)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine[0] == pytest.approx(other[0], abs=1e-3)
            assert mine[1] == other[1]
