"""Stages are timed on made-up sequences, whose keys and values nothing has written."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny
from triforce_tree.config import load_arguments

V = 40
TARGET = tiny("gemma3", vocab_size=V)
SMALL = {"budget": 24, "chunk": 4, "recent": 8, "sinks": 2, "window": 6}
PATHS: dict[str, dict[str, Any]] = {
    "chosen levels": {},
    "8 bits": {"kv_bits": 8},
    "offload": {"offload": True, "levels": 3},
}
# Processors of which some fail on NaN.
OPTIONS: list[dict[str, Any]] = [
    {"eta_cutoff": 1e-3}, {"epsilon_cutoff": 1e-3}, {"typical_p": 0.7}, {"min_p": 0.1}, {"top_h": 0.5},
]  # fmt: skip


@pytest.fixture
def no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a call the first one on a machine; libraries that were compiled stay."""
    for kept in Path(os.environ["TRIFORCE_TREE_CACHE"]).glob("*"):
        if kept.name != "stage_costs.json":
            (tmp_path / kept.name).symlink_to(kept)
    monkeypatch.setenv("TRIFORCE_TREE_CACHE", str(tmp_path))


@pytest.mark.usefixtures("poisoned_empty", "no_costs")
@pytest.mark.parametrize("path", PATHS)
def test_no_path_reads_it(path: str) -> None:
    draft = perturbed(TARGET, 0.1)
    engine = triforce_tree.load(TARGET, draft, **load_arguments({**SMALL, **PATHS[path]}))
    prompts = [prompt_of(90 - number, V) for number in range(2)]
    first = engine.generate(prompts, do_sample=True, eta_cutoff=1e-3, max_new_tokens=6)
    # Costs for other options are measured beside the keys and values of these texts, which stay.
    second = engine.generate(prompts, do_sample=True, epsilon_cutoff=1e-3, max_new_tokens=6)
    assert first.new_tokens == second.new_tokens
    greedy = engine.generate(prompts, do_sample=False, max_new_tokens=6)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        wanted = TARGET.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, pad_token_id=0
        )
        assert greedy.sequences[number, -6:].tolist() == wanted[0, -6:].tolist()


@pytest.mark.usefixtures("poisoned_empty", "no_costs")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_the_embedded_pair_with_defaults(options: dict[str, Any]) -> None:
    out = triforce_tree.load().generate("Once upon a time", do_sample=True, max_new_tokens=6, **options)
    assert out.new_tokens == 6
