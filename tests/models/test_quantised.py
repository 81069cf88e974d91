"""Quantised models decode exactly, with the layers of the quantisation library."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import greedy, perturbed, prompt_of, tiny
from messages import says
from model_folders import settings
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import triforce_tree
from triforce_tree.loading.checkpoints import load_model
from triforce_tree.models.few_row import why_not_replaceable

SMALL: dict[str, Any] = {"budget": 16, "chunk": 4, "recent": 8, "window": 32, "tree": "chain:2", "gamma": 4}


class Int8Linear(nn.Module):
    """A linear layer of 8 bits with a scale per row, as in quantisation libraries."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale)


class Wrapped(Tensor):
    """A tensor subclass, which some libraries use for quantised weights inside nn.Linear."""


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
@pytest.mark.parametrize("options", [{}, {"offload": True}], ids=["on the device", "offloaded"])
def test_quantised_targets_decode_exactly(change: Any, options: dict[str, Any]) -> None:
    target, prompt = change(tiny("llama-gqa")), prompt_of(60)
    engine = triforce_tree.load(target, DRAFT, **SMALL, **options)
    out = engine.generate(prompt, max_new_tokens=8, do_sample=False)
    assert len(out.levels) == 3
    assert out.sequences[0, 60:].tolist() == greedy(target, prompt, 8)


def test_quantised_drafts_are_accepted() -> None:
    engine = triforce_tree.load(TARGET, quantised(tiny("llama-gqa")), **SMALL, levels=2)
    prompt = prompt_of(60)
    out = engine.generate(prompt, max_new_tokens=16, do_sample=False)
    assert out.sequences[0, 60:].tolist() == greedy(TARGET, prompt, 16)
    assert out.levels[1].accepted > 0


def test_the_reason_why_linears_cannot_be_replaced() -> None:
    assert why_not_replaceable(TARGET) is None
    assert why_not_replaceable(marked(tiny("llama-gqa"))) == "LlamaForCausalLM is quantised"
    assert why_not_replaceable(wrapped(tiny("llama-gqa"))) == "LlamaForCausalLM is quantised"
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    assert why_not_replaceable(GPT2LMHeadModel(GPT2Config(**sizes))) == (
        "GPT2LMHeadModel has no nn.Linear inside a list of layers"
    )


def test_an_unknown_quantisation_method_is_refused(tmp_path: Path) -> None:
    TARGET.save_pretrained(tmp_path)
    settings(quantization_config={"quant_method": "abacus"})(tmp_path)
    with pytest.raises(ValueError, match=says("quantisation method that", "abacus", "16 bits")):
        load_model(tmp_path)
