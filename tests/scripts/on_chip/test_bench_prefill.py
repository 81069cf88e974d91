"""The benchmark of prefill: what it times, on a tiny model."""

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.models.prefill.layers import PrefillLayers


@pytest.mark.parametrize("path", ["engine", "eager"])
def test_parts_of_a_prompt(script: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = script("benchmarks.on_chip.prefill")
    config = LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=9, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    model = HFModel(LlamaForCausalLM(config).eval())
    spans: dict[str, int] = {}
    own = prefill.Parts.seconds

    def counted(parts: Any) -> Any:
        spans.update({name: len(found) for name, found in parts._spans.items()})
        return own(parts)

    monkeypatch.setattr(prefill.Parts, "seconds", counted)
    row = prefill.measure(model, 100, 32, path, 1)
    # Four chunks; seven linears of the first and the last of nine layers.
    assert spans == {"linears": 4 * 7 * 2, "attention": 4 * 9}
    assert row["seconds"] > row["parts"]["attention"] > 0
    assert row["parts"]["linears"] > 0
    assert not model.model.model.layers[0].mlp.up_proj._forward_hooks


def test_eager_layers_are_transformers_own(script: Any) -> None:
    prefill = script("benchmarks.on_chip.prefill")
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    layers = PrefillLayers(model)
    for path, replaced in (("engine", True), ("eager", False)):
        copy = shallow_copy(model)
        with prefill.way(path):
            layers.attach(copy)
        assert ("forward" in vars(copy.model.layers[0].mlp)) == replaced
