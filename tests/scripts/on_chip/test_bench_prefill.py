"""The benchmark of prefill: what it times, on a tiny model."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from triforce_tree.kernels.attention import flash_attn_4
from triforce_tree.kernels.attention.plan import Heads
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


def test_paths_of_a_package_that_is_missing(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = script("benchmarks.on_chip.prefill_paths")
    monkeypatch.setattr(flash_attn_4, "unavailable", lambda: "it is not installed")
    assert paths.usable(["engine", "cudnn", "flash-attn-4", "flash"]) == ["engine", "flash"]
    assert capsys.readouterr().out.startswith("left out: flash-attn 4 (it is not installed); pip install")
    assert paths.usable(["cudnn", "flash"]) == ["cudnn", "flash"]
    monkeypatch.setattr(flash_attn_4, "unavailable", lambda: None)
    assert paths.usable([*paths.PATHS]) == [*paths.PATHS]
    assert not capsys.readouterr().out


def test_each_path_fixes_the_choice(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = script("benchmarks.on_chip.prefill_paths")
    monkeypatch.delenv(flash_attn_4.VARIABLE, raising=False)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    found = {}
    for path in paths.PATHS:
        with paths.way(path):
            found[path] = flash_attn_4._setting(), torch.backends.cuda.cudnn_sdp_enabled()
    assert found["engine"] == found["eager"] == (None, cudnn)
    assert (found["cudnn"], found["flash-attn-4"]) == (("0", cudnn), ("1", cudnn))
    assert found["flash"] == ("0", False)
    assert (flash_attn_4._setting(), torch.backends.cuda.cudnn_sdp_enabled()) == (None, cudnn)


def test_attention_alone(script: Any) -> None:
    paths, tables = (script(f"benchmarks.on_chip.{name}") for name in ("prefill_paths", "tables"))
    device = torch.device("cpu")
    rows = paths.attention_alone(Heads(4, 2, 16), 80, 300, ["engine", "eager"], device, torch.float32)
    # Layers are no part of it.
    assert [row["path"] for row in rows] == ["engine"]
    assert rows[0]["error"] < 1e-5
    flops = 4 * 16 * 4 * (80 * 300 + 80 * 81 / 2)
    assert rows[0]["tflops"] == pytest.approx(flops / rows[0]["seconds"] / 1e12)
    both = [rows[0] | {"shape": "tiny", "path": path} for path in ("engine", "cudnn", "flash-attn-4")]
    assert [row["path"] for row in tables._alone({"attention": both})] == ["cudnn", "flash-attn-4"]
    assert [row["path"] for row in tables._alone({"attention": both[:1]})] == ["engine"]
    assert tables._alone({}) == []
    whole = {"path": "engine", "choices": {"compared": 5, "flash_attn_4": 3}}
    assert tables.prefill_path(whole) == "flash-attn 4, causal, for 3 of 5 kinds of calls"
    assert tables.prefill_path({"path": "engine"}) == tables.PREFILL_PATHS["cudnn"]
