"""Offloaded caches of models with sliding windows, which are kept in rings on the device."""

import pytest
import torch

from tests.support.models.families import perturbed, tiny
from tests.support.models.offloaded_cases import PIECE, PROMPTS, logits_of, program_of, references
from tests.support.models.program_cases import SMALL, decoded
from triforce_tree import load
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kv import store as store_module
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.models.attention import KVShape
from triforce_tree.models.hf_model import HFModel

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NEW = [20, 14]
SPLITS = {
    "host": Offload(0, PIECE, 2),
    "mixed": Offload(5 * PIECE, PIECE, 2),
    "last layer": Offload(2 * 208 * PIECE // 32 + 3 * PIECE, PIECE, 2, last_resident=True),
}


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RING_PAGE", 8)


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gemma3", "qwen2-window", "gpt-oss", "mistral-window", "ministral", "gemma4", "llama4"],
)
def test_families(family: str) -> None:
    """Layers of both kinds, with capped scores or sinks; windows alone; heads of two sizes."""
    for levels in (1, 2, 3):
        program = program_of(levels, 2, family)
        assert decoded(program, PROMPTS[:2], NEW)[0] == references(PROMPTS[:2], NEW, family), levels
        cache, shapes = program.cache.backend.cache, program.target.kv_shapes
        assert cache is not None
        assert cache.host.layers == sum(shape.window is None for shape in shapes)
        for layer, shape in enumerate(shapes):
            if shape.window is not None:
                assert cache.host_layers[layer] is None
                assert cache.rings.layers[layer].kv[0].shape[2] < cache.host.slots


@pytest.mark.parametrize("split", SPLITS)
def test_where_slots_are_changes_no_token(split: str) -> None:
    program = program_of(3, 2, "gemma3", split=SPLITS[split])
    assert decoded(program, PROMPTS[:2], NEW)[0] == references(PROMPTS[:2], NEW, "gemma3")


@pytest.mark.parametrize("family", ["gemma3", "qwen2-window"])
def test_logits_are_those_of_a_cache_on_the_device(family: str) -> None:
    offloaded, on_device = logits_of(SPLITS["host"], family=family)
    torch.testing.assert_close(offloaded, on_device, rtol=1e-4, atol=1e-4)
    assert torch.equal(offloaded, logits_of(SPLITS["mixed"], family=family)[0])


@pytest.mark.slow
@pytest.mark.parametrize("levels", [1, 3])
def test_rewinding(levels: int) -> None:
    program = program_of(levels, 2, "gemma3", max_seq_len=250)
    first, _ = decoded(program, PROMPTS[:2], [40, 40])
    for kept in (40, 0, 11):
        beginnings = [[*prompt, *new[:kept]] for prompt, new in zip(PROMPTS, first, strict=False)]
        rest = decoded(program, beginnings, [50 - kept] * 2, again=True)[0]
        assert [new[: 40 - kept] for new in rest] == [new[kept:] for new in first]


def test_the_cpu_attends_to_layers_without_a_window_alone() -> None:
    split = Offload(0, PIECE, 2, host_share=0.5, plain_host_share=0.5)
    program = program_of(2, 2, "gemma3", split=split)
    assert decoded(program, PROMPTS[:2], NEW)[0] == references(PROMPTS[:2], NEW, "gemma3")
    assert program.cache.backend.transfers
    assert program.cache.backend.cache.attention is not None
    assert program.cache.backend.cache.attention.bytes > 0


def test_layers_without_a_window_of_different_heads_are_refused() -> None:
    target = HFModel(tiny("llama-gqa"))
    target.kv_shapes = [KVShape(Heads(4, 2, 8)), KVShape(Heads(4, 4, 8))]
    config = HierarchyConfig.from_options(**SMALL)
    with pytest.raises(
        ValueError, match=r"values of 2 x \(8 \+ 8\) and 4 x \(8 \+ 8\) elements.*leave offload out"
    ):
        DecodingProgram(target, None, config, 1, 200, 1, SPLITS["host"])


def test_through_load_and_generate() -> None:
    target = tiny("gemma3")
    engine = load(target, perturbed(target, 0.05), **load_arguments({**SMALL, "offload": True}))
    out = engine.generate(PROMPTS[1], max_new_tokens=14, do_sample=False)
    assert out.sequences[0, len(PROMPTS[1]) :].tolist() == references(PROMPTS[1:2], [14], "gemma3")[0]
    assert out.memory is not None
    assert out.memory["offloaded"]
    assert out.memory["device_gib"]["layers with windows"] > 0
