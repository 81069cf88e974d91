"""The comparison at load finds a forward that differs from the model's own."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.families import CAPPED, FAMILIES_BY_LENGTH, prompt_of, tiny
from triforce_tree import UnsupportedModelError
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.loading import load_guard, rounding
from triforce_tree.loading.checkpoints import load_model
from triforce_tree.loading.load_guard import compare_at_load, named_lengths
from triforce_tree.models import attention
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.supported import likely_cause

WINDOW = 100  # longer than the first comparison, which all models get


def sinks_without_window() -> PreTrainedModel:
    return tiny("gpt-oss", layer_types=["full_attention"] * 2)


def changed(**parts: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Plants a fault: some attention parameters of each layer are changed."""

    def make(*args: Any) -> AttentionParams:
        how = AttentionParams(*args)
        return replace(how, **{name: f(getattr(how, name)) for name, f in parts.items()})

    return lambda patch: patch.setattr(attention, "AttentionParams", make)


def dropped(_: Any) -> None:
    return None


def chosen_by_each_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LengthRope, "of", classmethod(lambda cls, model: None))


FAULTS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[pytest.MonkeyPatch], None]]] = {
    "scale": (lambda: tiny("llama-gqa"), changed(scale=lambda scale: 1.1 * scale)),
    "short window": (lambda: tiny("mistral-window"), changed(window=dropped)),
    "window": (lambda: tiny("mistral", sliding_window=WINDOW), changed(window=dropped)),
    "window off by one": (
        lambda: tiny("mistral", sliding_window=WINDOW),
        changed(window=lambda window: window + 1),
    ),
    "window of some layers": (
        lambda: tiny("gemma3", sliding_window=WINDOW, num_hidden_layers=6, layer_types=None),
        changed(window=dropped),
    ),
    "softcap": (lambda: tiny("gemma2", sliding_window=WINDOW), changed(softcap=dropped)),
    "sinks": (sinks_without_window, changed(sinks=dropped)),
    "longrope": (lambda: tiny("phi3-longrope"), chosen_by_each_forward),
    "longrope's scale": (lambda: tiny("phimoe"), chosen_by_each_forward),
    "chunks": (lambda: tiny("llama4", attention_chunk_size=WINDOW), changed(window=dropped)),
    "chunks as a window": (
        lambda: tiny("llama4", attention_chunk_size=WINDOW),
        changed(chunked=lambda chunked: False),
    ),
    "temperature": (
        lambda: tiny("llama4", floor_scale=WINDOW, attn_scale=0.5),
        lambda patch: patch.setattr(attention, "scaled_queries", lambda module, query, positions: query),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_load(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inject = FAULTS[fault]
    inject(monkeypatch)
    model = make()
    name = type(model).__name__
    with pytest.raises(UnsupportedModelError, match=rf"^{name} would not be decoded.*differ by [\d.]+"):
        triforce_tree.load(model)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_without_fault_pass(fault: str, dtype: torch.dtype) -> None:
    model = FAULTS[fault][0]().to(dtype)
    report = triforce_tree.load(model)._hierarchy.guard
    assert report.errors
    # transformers counts the positions of Llama 4's queries from the length of its cache.
    assert bool(report.skipped) == (type(model).__name__ == "Llama4ForCausalLM")
    assert max(report.errors.values()) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("fault", ["short window", "softcap", "sinks"])
def test_noise_explains_rounding_but_no_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rounding changes the choice of experts, no fixed limit could separate rounding from faults."""
    monkeypatch.setattr(rounding, "_ROUNDING_16", 1e-6)
    make, inject = FAULTS[fault]
    report = triforce_tree.load(make().bfloat16())._hierarchy.guard
    assert max(report.errors.values()) > 1e-4
    inject(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=r"differ by [\d.]+"):
        triforce_tree.load(make().bfloat16())


def test_lengths_of_real_models_are_compared() -> None:
    rope = dict(FAMILIES_BY_LENGTH["phi3-longrope"][2]["rope_parameters"])
    rope["original_max_position_embeddings"] = 4096
    model = tiny(
        "phi3-longrope",
        max_position_embeddings=131072,
        sliding_window=262144,
        rope_parameters=rope,
        original_max_position_embeddings=4096,
    )
    assert named_lengths(model) == {4096}
    report = compare_at_load(HFModel(model))
    assert any("both sides of 4096" in what for what in report.errors)
    assert any("beyond 4096" in what for what in report.errors)


def test_a_comparison_that_takes_too_long_is_reported_as_skipped() -> None:
    model = tiny("mistral", sliding_window=1 << 21, max_position_embeddings=1 << 23)
    report = compare_at_load(HFModel(model))
    assert list(report.skipped) == [f"a sequence beyond {1 << 21} tokens"]
    assert "elements" in report.skipped[f"a sequence beyond {1 << 21} tokens"]
    assert f"positions on both sides of {1 << 21}" in report.errors


def test_a_first_comparison_that_memory_is_short_for(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = load_guard._Guard._reference_logits, []

    def short_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return own(*args, **kwargs)

    monkeypatch.setattr(load_guard._Guard, "_reference_logits", short_once)
    report = triforce_tree.load(tiny("mistral", sliding_window=WINDOW)).guard
    assert report.skipped == {"a sequence of 40 tokens": "memory is short"}
    assert f"a sequence beyond {WINDOW} tokens" in report.errors


def test_one_layer_of_each_kind_computes() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    model = tiny("gemma3", sliding_window=WINDOW, num_hidden_layers=12, layer_types=types * 2)
    called: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(lambda *_, index=index: called.append(index))
    checked = HFModel(model)
    called.clear()
    assert compare_at_load(checked).layers == (0, 1, 5)
    assert set(called) == {0, 1, 5}
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_layers_without_rotary_embedding_are_a_separate_kind() -> None:
    model = tiny("smollm3", num_hidden_layers=6, no_rope_layers=[1, 1, 1, 0, 1, 1])
    assert compare_at_load(HFModel(model)).layers == (0, 1, 3)


def test_attention_of_torch_ignores_capped_scores(tmp_path: Path) -> None:
    """Some releases of transformers choose it; a model loaded from a folder still caps its scores."""
    model = CAPPED["gemma2"]()
    model.save_pretrained(tmp_path)
    model.config._attn_implementation = "sdpa"
    assert re.search("ignores attn_logit_softcapping.*attn_implementation='eager'", likely_cause(model, ()))
    assert load_model(tmp_path).config._attn_implementation == "eager"


def test_model_and_random_state_are_unchanged() -> None:
    model = CAPPED["gemma2"]()
    model.train()
    state = torch.get_rng_state()
    compare_at_load(HFModel(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.config._attn_implementation == "eager"


def test_only_layers_that_compute_copy_streamed_weights() -> None:
    model = tiny("llama-gqa", num_hidden_layers=12)
    clone = copy.deepcopy(model)
    streamed = StreamedWeights(clone, "cpu")
    checked = HFModel(clone, streamed)
    before = streamed.copies
    report = compare_at_load(checked)
    assert report.errors
    assert not report.skipped
    assert streamed.copies - before < 24, "two passes over all layers would be more"
    out = triforce_tree.Engine(clone, config=None, streamed=streamed).generate(
        prompt_of(20), max_new_tokens=6, do_sample=False
    )
    expected = model.generate(torch.tensor([prompt_of(20)]), max_new_tokens=6, do_sample=False)
    assert out.sequences.tolist() == expected.tolist()
    streamed.close()


def test_nan_logits_are_not_compared() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    skipped = compare_at_load(HFModel(model)).skipped
    assert list(skipped.values()) == ["the model's own logits are not finite"]
