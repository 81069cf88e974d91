"""Quantised models: exact in the step engine, declined by the captured cycle with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import greedy, perturbed, prompt_of, tiny
from test_bad_input import says
from test_model_files import settings
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import triforce_tree
from triforce_tree.few_row import why_not_exchanged
from triforce_tree.loading import load_model

SMALL: dict[str, Any] = {"budget": 16, "chunk": 4, "recent": 8, "window": 32, "tree": "chain:2", "gamma": 4}


class Int8Linear(nn.Module):
    """A layer of 8 bits with a scale a row, as libraries for quantising have them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale)


class Wrapped(Tensor):
    """A tensor of a library's own, as some keep quantised weights inside nn.Linear."""


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.model.layers.modules():
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
    return model


def wrapped(model: PreTrainedModel) -> PreTrainedModel:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Wrapped), requires_grad=False)
    return model


def marked(model: PreTrainedModel) -> PreTrainedModel:
    model.is_quantized = True
    return model


TARGET, DRAFT = tiny("llama-gqa"), perturbed(tiny("llama-gqa"), 0.1)


@pytest.mark.parametrize("change", [quantised, wrapped, marked])
def test_quantised_models_decode_step_by_step(change: Any) -> None:
    target, prompt = change(tiny("llama-gqa")), prompt_of(60)
    engine = triforce_tree.load(target, DRAFT, **SMALL)
    out = engine.generate(prompt, max_new_tokens=8, do_sample=False)
    assert out.captured is False
    assert len(out.levels) == 3
    assert out.sequences[0, 60:].tolist() == greedy(target, prompt, 8)


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("option", [{"captured": True}, {"offload": True}])
def test_the_captured_cycle_is_declined_with_the_reason(which: str, option: dict[str, Any]) -> None:
    changed = quantised(tiny("llama-gqa"))
    pair = (changed, DRAFT) if which == "target" else (TARGET, changed)
    name, value = next(iter(option.items()))
    engine = triforce_tree.load(*pair, **SMALL, **option)
    said = says(f"{name}={value} needs the captured cycle", "no nn.Linear", "leave it out")
    with pytest.raises(ValueError, match=said) as error:
        engine.generate(prompt_of(60), max_new_tokens=8, do_sample=False)
    # Plain decoding needs the target's linear layers as well.
    assert ("levels=1" in str(error.value)) is (which == "draft" and name == "offload")


def test_other_layers_than_linear_ones_are_named() -> None:
    assert why_not_exchanged(TARGET) is None
    assert why_not_exchanged(marked(tiny("llama-gqa"))) == "LlamaForCausalLM is quantised"
    assert why_not_exchanged(wrapped(tiny("llama-gqa"))) == "LlamaForCausalLM is quantised"
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    assert why_not_exchanged(GPT2LMHeadModel(GPT2Config(**sizes))) == (
        "GPT2LMHeadModel has no nn.Linear inside a list of layers"
    )


def test_a_way_of_quantising_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    TARGET.save_pretrained(tmp_path)
    settings(quantization_config={"quant_method": "abacus"})(tmp_path)
    with pytest.raises(ValueError, match=says("quantised in a way", "abacus", "16 bits")):
        load_model(tmp_path)
