"""The copy that forwards run on: kept between calls, and made anew wherever it would differ."""

from collections.abc import Callable

import pytest
import torch
from families import prompt_of, tiny
from program_cases import SMALL
from torch import nn
from transformers import PreTrainedModel

import triforce_tree
from triforce_tree.models import model_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import modules_of, parameter_bytes, parameters_of

CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "a weight": lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.zeros(64, 32))),
    "a module": lambda m: setattr(m.model.layers[0], "mlp", nn.Identity()),
    "a hook": lambda m: m.model.norm.register_forward_hook(lambda *_: None),
    "a forward": lambda m: setattr(m.model.norm, "forward", m.model.norm.forward),
    "an attribute": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5),
    "a buffer": lambda m: setattr(m.model.rotary_emb, "inv_freq", torch.ones(4)),
    "a setting": lambda m: setattr(m.config, "rms_norm_eps", 0.25),
    "a nested setting": lambda m: m.config.rope_parameters.update(rope_theta=2.0),
}


def test_it_is_kept_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    shallow_copy = model_copy.shallow_copy

    def counted(model: PreTrainedModel) -> PreTrainedModel:
        made.append(model)
        return shallow_copy(model)

    engine = triforce_tree.load(tiny("llama-gqa"), tiny("llama-gqa"), profile=False, levels=2, **SMALL)
    session = engine.session(prompt_of(100))
    session.generate(do_sample=False, max_new_tokens=3)
    monkeypatch.setattr(model_copy, "shallow_copy", counted)
    session.generate(prompt_of(9), do_sample=False, max_new_tokens=3)
    assert made == []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("of", ["model", "copy"])
def test_a_change_makes_another(change: str, of: str) -> None:
    """Of the model: the copy must follow. Of the copy: as of one that was made for this call."""
    target = HFModel(tiny("llama-gqa"))
    with target.active():
        kept = target.running
    with target.active():
        assert target.running is kept
        if of == "copy":
            CHANGES[change](kept)
    if of == "model":
        CHANGES[change](target.model)
    with target.active():
        assert target.running is not kept


def test_modules_and_parameters_are_those_of_torch() -> None:
    model = tiny("llama-gqa")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.extra = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    model.lm_head.weight = model.model.embed_tokens.weight
    for ours, theirs in (
        (modules_of(model), model.modules()),
        (parameters_of(model), model.parameters()),
    ):
        assert [*map(id, ours)] == [*map(id, theirs)]
    assert parameter_bytes(model) == sum(p.nbytes for p in model.parameters())
