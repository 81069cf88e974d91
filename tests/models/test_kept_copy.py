"""The copy that forwards run on: kept between calls, and made anew wherever it would differ."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.models.families import tiny
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


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_another(change: str) -> None:
    target = HFModel(tiny("llama-gqa"))
    with target.active():
        kept = target.running
    target.refresh()
    with target.active():
        assert target.running is kept
    CHANGES[change](target.model)
    assert target.changes.differs()
    target.refresh()
    assert not target.changes.differs()
    with target.active():
        assert target.running is not kept


def test_a_copy_of_one_s_own_may_be_changed() -> None:
    target = HFModel(tiny("llama-gqa"))
    with target.active():
        kept = target.running
    with target.active(own=True):
        target.running.model.layers[0].mlp = nn.Identity()
    with target.active():
        assert target.running is kept
        assert not isinstance(kept.model.layers[0].mlp, nn.Identity)


def test_modules_and_parameters_are_those_of_torch() -> None:
    model = tiny("llama-gqa")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.extra = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    model.lm_head.weight = model.model.embed_tokens.weight
    for ours, theirs in ((modules_of(model), model.modules()), (parameters_of(model), model.parameters())):
        assert [*map(id, ours)] == [*map(id, theirs)]
    assert parameter_bytes(model) == sum(p.nbytes for p in model.parameters())
