"""Models that accelerate has spread over devices, host memory and disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.processes.messages import says
from triforce_tree.config import load_arguments
from triforce_tree.loading import placement
from triforce_tree.loading.placement import on_one_device
from triforce_tree.models.few_row import why_not_replaceable

SMALL: dict[str, Any] = {"budget": 16, "chunk": 4, "recent": 8, "window": 32, "tree": "chain:2", "gamma": 4}
CPU = torch.device("cpu")


def dispatched(model: PreTrainedModel, folder: Path, *on_disk: str) -> PreTrainedModel:
    """Returns a model with some weights on disk and the others in memory."""
    inner = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    parts = [*(f"model.{part}" for part in inner), "lm_head"]
    places = {part: "disk" if part in on_disk else "cpu" for part in parts}
    made: PreTrainedModel = dispatch_model(model, places, main_device="cpu", offload_dir=folder)
    assert any(weight.device.type == "meta" for weight in made.parameters())
    return made


@pytest.fixture(params=[("model.layers.1",), ("model.layers.0", "model.layers.1", "model.norm", "lm_head")])
def spread(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    return dispatched(tiny("llama-gqa"), tmp_path, *request.param)


def test_they_are_gathered_and_not_changed(spread: PreTrainedModel) -> None:
    prompt, plain = prompt_of(60), tiny("llama-gqa")
    before = {name: (id(weight), weight.device) for name, weight in spread.named_parameters()}
    draft = perturbed(plain, 0.1)
    engine = triforce_tree.load(spread, draft, **load_arguments(SMALL))
    out = engine.generate(prompt, max_new_tokens=8, do_sample=False)
    assert out.sequences[0, 60:].tolist() == greedy(plain, prompt, 8)
    own = engine.target.model
    for name, weight in plain.named_parameters():
        assert torch.equal(own.get_parameter(name), weight)
    assert why_not_replaceable(own) is None
    assert {name: (id(weight), weight.device) for name, weight in spread.named_parameters()} == before
    assert greedy(spread, prompt, 8) == greedy(plain, prompt, 8)
    as_draft = triforce_tree.load(plain, spread, levels=2, **load_arguments(SMALL))
    out = as_draft.generate(prompt, max_new_tokens=8, do_sample=False)
    assert out.sequences[0, 60:].tolist() == greedy(plain, prompt, 8)


def test_tensors_on_the_device_are_shared(tmp_path: Path) -> None:
    made = dispatched(tiny("llama-gqa"), tmp_path, "model.layers.1")
    own = on_one_device(made)
    assert own.lm_head.weight is made.lm_head.weight
    assert not any("forward" in vars(module) for module in own.modules())


def test_a_device_that_is_too_small_is_named(
    spread: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "available_device_bytes", lambda *_: 100)
    with pytest.raises(ValueError, match=says("spread over", "disk", "GiB left", "offload_weights=True")):
        triforce_tree.load(spread)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = tiny("llama-gqa")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    made = dispatched(model, tmp_path, "model.embed_tokens", "lm_head")
    own = on_one_device(made, CPU)
    assert own.lm_head.weight is own.model.embed_tokens.weight
    assert own.lm_head.weight.device == CPU


def test_other_models_are_returned_as_they_are() -> None:
    model = tiny("llama-gqa")
    assert on_one_device(model) is model
    model.hf_device_map = {"": "cpu"}
    assert on_one_device(model) is model
    assert triforce_tree.load(model).target.layers == 2
    # Without hooks the weights have no source, and ``load`` refuses the model.
    model.hf_device_map = {"model": 0, "lm_head": 1}
    assert on_one_device(model) is model


def test_a_draft_elsewhere_is_copied_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_device_bytes", lambda *_: None)
    model, device = tiny("llama-gqa"), torch.device("meta")
    own = on_one_device(model, device)
    assert {tensor.device for tensor in [*own.parameters(), *own.buffers()]} == {device}
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {CPU}


@pytest.mark.gpu
@pytest.mark.parametrize("streamed", [False, True])
def test_a_draft_on_the_cpu_of_a_target_on_a_gpu(streamed: bool) -> None:
    plain, prompt = tiny("llama-gqa"), prompt_of(60)
    target = tiny("llama-gqa") if streamed else tiny("llama-gqa").to("cuda")
    options = {"offload_weights": True, "device": "cuda"} if streamed else {}
    draft = perturbed(plain, 0.1)
    out = triforce_tree.load(target, draft, levels=2, **load_arguments({**SMALL, **options})).generate(
        prompt, max_new_tokens=8, do_sample=False
    )
    assert out.sequences[0, 60:].tolist() == greedy(plain, prompt, 8)
    assert draft.device == CPU


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(64, 32, dtype=torch.int8))


def test_quantised_models_are_left_to_their_library(tmp_path: Path) -> None:
    made = dispatched(tiny("llama-gqa"), tmp_path, "model.layers.1")
    made.model.layers[0].mlp.up_proj = Packed()
    assert on_one_device(made) is made
