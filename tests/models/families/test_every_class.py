"""A sample of transformers' classes, everything special about them on: equal to generate, or refused by name.

``scripts/checks/models`` runs all classes on all paths.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.common.results import content_at, write

_NO_INTERFACE = "0 of its 2 layers used transformers' attention interface"
# Of the sample, at load; all others run.
REFUSED = {
    "BloomForCausalLM": _NO_INTERFACE,
    "FalconForCausalLM": _NO_INTERFACE,
    "MBartForCausalLM": "counts positions by the length of transformers' cache, and takes no position_ids",
}
# Listed by name, so that pytest collects them without transformers.
SAMPLE = [
    "Afmoe", "Apertus", "Bert", "Bloom", "Cohere2", "DeepseekV3", "Exaone4", "Falcon", "GPT2", "Gemma2",
    "Gemma3", "Gemma3n", "Gemma4", "GptOss", "GraniteMoeHybrid", "Llama4", "Llama", "LongcatFlash", "MBart",
    "Ministral3", "Mistral", "Mixtral", "Nemotron", "OPT", "Phi3", "Qwen2", "Qwen2_5_VL", "Qwen3Moe",
    "Qwen3Next", "SmolLM3", "StableLm",
]  # fmt: skip
_HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@pytest.mark.parametrize("stem", SAMPLE)
def test_a_class_gives_its_own_text_or_is_refused_with_the_reason(stem: str, script: Any) -> None:
    from triforce_tree.models.model_copy import listed_layers

    build, paths = script("checks.models.build"), script("checks.models.paths")
    [name] = {stem + head for head in _HEADS} & {*script("checks.models.sample").SAMPLE}
    family = script("checks.models.classes").families()[name]
    for variant in build.variants_of(family):
        trial = paths.Trial(build.build_varied(family, variant, build.prompt_of(paths.PROMPTS[0])), "cpu")
        refusal = trial.refusal()
        if name in REFUSED:
            assert refusal is not None
            assert refusal.outcome == "refused"
            assert name in refusal.reason
            assert REFUSED[name] in refusal.reason
            continue
        assert refusal is None, refusal
        assert len(set(trial.expected(paths.PROMPTS[0]))) > 3, "a text that varies"
        listed = listed_layers(trial.model) is not None
        path = "offloaded" if variant == build.DEFAULT and listed else "2 levels"
        assert trial.run(path) == paths.Outcome("equal"), (variant, path)


@pytest.mark.gpu
@pytest.mark.parametrize("stem", [stem for stem in SAMPLE if stem + _HEADS[0] not in REFUSED])
def test_a_class_gives_its_own_text_from_cuda_graphs(stem: str, script: Any) -> None:
    """Some classes are equal but run step by step, which the outcome says."""
    build, paths = script("checks.models.build"), script("checks.models.paths")
    [name] = {stem + head for head in _HEADS} & {*script("checks.models.sample").SAMPLE}
    family = script("checks.models.classes").families()[name]
    trial = paths.Trial(build.build_varied(family, build.DEFAULT, build.prompt_of(paths.PROMPTS[0])), "cuda")
    outcome = trial.run("captured")
    assert outcome.outcome == "equal" or "run step by step" in outcome.reason, outcome


def test_the_sample_is_all_listed(script: Any) -> None:
    assert len(SAMPLE) == len(script("checks.models.sample").SAMPLE)


def test_every_class_has_settings(script: Any) -> None:
    """The tiny configuration of nearly every class can be made; the others are in the table as not built."""
    build = script("checks.models.build")
    families = script("checks.models.classes").families()
    failed = []
    for name, family in families.items():
        try:
            for variant in build.variants_of(family):
                family.config_class(**build.settings_of(family, variant))
        except Exception:
            failed.append(name)
    assert len(failed) < 0.1 * len(families), failed


def test_the_command(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of this code are kept, others are made anew; the last line counts outcomes."""
    models = script("checks.models.__main__")
    made: list[Any] = []

    def tried(jobs: Any, device: str, count: int, limit: float, done: Any) -> None:
        made.extend(jobs)
        for job in jobs:
            done(job, [job.row(path, "refused", f"{job.model_class} is not for this") for path in job.paths])

    monkeypatch.setattr(models.workers, "run", tried)
    out = tmp_path / "m.jsonl"
    words = ["--only", "llama4_text", "--paths", "1 level", "batch", "--json", "--out", str(out)]
    assert models.main(words) == 0
    assert [(job.model_class, job.paths) for job in made] == [("Llama4ForCausalLM", ("1 level", "batch"))] * 2
    counts = json.loads(capsys.readouterr().out)["counts"]
    assert counts == {"1 level": {"refused": 2}, "batch": {"refused": 2}}
    made.clear()
    assert models.main([*words[:3], "1 level", "lookup", *words[5:]]) == 0
    assert [job.paths for job in made] == [("lookup",)] * 2
    held = content_at(out)
    assert len(held["rows"]) == 6
    held["commit"] = "another"
    write(out, held)
    made.clear()
    assert models.main([*words[:3], "batch", "--keep", *words[5:]]) == 0
    assert [job.paths for job in made] == [("batch",)] * 2
    kept = content_at(out)
    assert [row.get("commit") for row in kept["rows"]] == [held["commit"], None, held["commit"]] * 2
    assert f"4 rows of commit {held['commit']}. " in script("checks.models.table").models(kept)
    kept["versions"] = {}
    for content in (kept, held):
        write(out, content)
        made.clear()
        assert models.main([*words, *(["--keep"] if content is kept else [])]) == 0
        assert len(made) == 2
        assert len(content_at(out)["rows"]) == 4
    text = script("checks.models.table").models(content_at(out))
    assert "| `Llama4ForCausalLM` |" in text
    assert "1. is not for this\n" in text
