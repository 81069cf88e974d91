"""Quantised models decode exactly, with the layers of the quantisation library."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import triforce_tree
from scripts.inflate.pair import inflate
from tests.support.models.families import greedy, perturbed, prompt_of, small, tiny
from tests.support.models.tiny_pair import settings
from tests.support.processes.messages import says
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import load_model
from triforce_tree.models.few_row import FewRowLinear, few_row_copy, why_not_replaceable
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import captures
from triforce_tree.planning.memory_map import tensor_bytes
from triforce_tree.runtime import capture_probe
from triforce_tree.runtime.fingerprint import shape_of

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


def quantised(model: PreTrainedModel, layer: Any = Int8Linear) -> PreTrainedModel:
    for module in model.model.layers.modules():
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, layer(child))
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
    engine = triforce_tree.load(target, DRAFT, **load_arguments({**SMALL, **options}))
    out = engine.generate(prompt, max_new_tokens=8, do_sample=False)
    assert len(out.levels) == 3
    assert out.sequences[0, 60:].tolist() == greedy(target, prompt, 8)


def test_quantised_drafts_are_accepted() -> None:
    engine = triforce_tree.load(
        TARGET, quantised(tiny("llama-gqa")), **load_arguments(SMALL | {"levels": 2, "rounds": 1})
    )
    prompt = prompt_of(60)
    out = engine.generate(prompt, max_new_tokens=16, do_sample=False)
    assert out.sequences[0, 60:].tolist() == greedy(TARGET, prompt, 16)
    assert out.levels[1].accepted > 0


def test_the_reason_why_linears_cannot_be_replaced() -> None:
    assert why_not_replaceable(TARGET) is None
    assert why_not_replaceable(marked(tiny("llama-gqa"))) == "LlamaForCausalLM is quantised (is_quantized)"
    assert why_not_replaceable(wrapped(tiny("llama-gqa"))) == "LlamaForCausalLM is quantised (Wrapped)"
    assert why_not_replaceable(quantised(tiny("llama-gqa"))) == ("LlamaForCausalLM is quantised (Int8Linear)")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    assert why_not_replaceable(GPT2LMHeadModel(GPT2Config(**sizes))) == (
        "GPT2LMHeadModel has no nn.Linear inside a list of layers"
    )


def test_an_unknown_quantisation_method_is_refused(tmp_path: Path) -> None:
    TARGET.save_pretrained(tmp_path)
    settings(quantization_config={"quant_method": "abacus"})(tmp_path)
    with pytest.raises(ValueError, match=says("quantisation method that", "abacus", "16 bits")):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "method, asked, packages",
    [
        ("gptq", "quantizer_gptq.is_optimum_available", "gptqmodel optimum"),
        ("awq", "quantizer_awq.is_gptqmodel_available", "gptqmodel"),
        ("compressed-tensors", "quantizer_compressed_tensors.is_compressed_tensors_available", "compressed-"),
        ("fbgemm_fp8", "quantizer_fbgemm_fp8.is_kernels_available", None),
    ],
)
def test_a_method_whose_package_is_not_installed_is_refused(
    method: str, asked: str, packages: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TARGET.save_pretrained(tmp_path)
    own = {"bits": 4, "group_size": 64} if method in ("gptq", "awq") else {}
    settings(quantization_config={"quant_method": method, **own})(tmp_path)
    monkeypatch.setattr(f"transformers.quantizers.{asked}", lambda *_, **__: False)
    said = (
        says(tmp_path, f"quantised ({method})", "not installed", f"pip install {packages}", "16 bits")
        if packages
        else says(tmp_path, "needs a package that is not installed", "install it")
    )
    for load in (load_model, triforce_tree.load):
        with pytest.raises(ValueError, match=said):
            load(tmp_path)


def test_a_library_that_refuses_the_machine_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TARGET.save_pretrained(tmp_path)
    settings(quantization_config={"quant_method": "gptq", "bits": 4})(tmp_path)

    def refuses(**_: Any) -> None:
        raise RuntimeError("GPU is required")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuses)
    with pytest.raises(ValueError, match=says("quantised, gptq", "GPU is required", "supports", "16 bits")):
        load_model(tmp_path)


def test_streaming_and_low_bits_are_refused_with_the_remedy() -> None:
    target = quantised(tiny("llama-gqa"))
    with pytest.raises(ValueError, match=says("quantised (Int8Linear)", "offload_weights=False")):
        triforce_tree.load(target, retrieval_weight_bits=8, advanced={"offload_weights": True})
    engine = triforce_tree.load(target, DRAFT, **load_arguments(SMALL))
    for make in (
        lambda: triforce_tree.load(target, retrieval_weight_bits=4),
        lambda: engine.with_options(retrieval_weight_bits=4),
    ):
        with pytest.raises(ValueError, match=says("retrieval_weight_bits=4", "quantised", "bits=16")):
            make()
    # Two levels have no retrieval level.
    assert engine.with_options(retrieval_weight_bits=4, levels=2)


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    """Libraries that quantise activations replace the forward of single layers."""
    target, calls = tiny("llama-gqa"), []
    layer = target.model.layers[0].mlp.up_proj
    plain = layer.forward

    def coarse(x: Tensor) -> Tensor:
        calls.append(1)
        return plain((8 * x).round() / 8)

    layer.forward = coarse
    clone = few_row_copy(target)
    assert type(clone.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(clone.model.layers[0].mlp.down_proj) is FewRowLinear
    ids = torch.tensor([prompt_of(9)])
    with torch.no_grad():
        assert torch.equal(clone(ids).logits, target(ids).logits)
    assert len(calls) == 2


class Packed(Tensor):
    """A tensor subclass of 8 bits that reports 32, as torchao's do."""

    @staticmethod
    def __new__(cls, words: Tensor) -> "Packed":
        made: Packed = Tensor._make_wrapper_subclass(cls, words.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.words = words
        return made

    words: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["words"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].words)
        raise NotImplementedError(func)


def test_the_bytes_of_packed_weights_are_counted() -> None:
    model = tiny("llama-gqa")
    before, layer = tensor_bytes(model), model.model.layers[0].mlp.up_proj
    words = torch.zeros(layer.weight.shape, dtype=torch.int8)
    layer.weight = nn.Parameter(Packed(words), requires_grad=False)
    assert tensor_bytes(model) == before - 3 * words.numel()


def test_what_a_library_does_at_the_first_forward_is_done_once() -> None:
    target, plain, seen = quantised(tiny("llama-gqa")), tiny("llama-gqa"), []

    def unpack(model: nn.Module, *_: Any) -> None:
        seen.append(model)
        handle.remove()
        model.model.layers[0].mlp.up_proj = plain.model.layers[0].mlp.up_proj

    handle = target.register_forward_pre_hook(unpack)
    engine = triforce_tree.load(target, DRAFT, **load_arguments(SMALL))
    out = engine.generate(prompt_of(60), max_new_tokens=8, do_sample=False)
    assert seen == [target]
    assert out.sequences[0, 60:].tolist() == greedy(target, prompt_of(60), 8)


def test_a_quantised_model_that_does_not_run_is_refused() -> None:
    target = quantised(tiny("llama-gqa"))
    target.model.layers[1].mlp.up_proj.forward = _without_kernel
    with pytest.raises(
        ValueError, match=says("quantised (Int8Linear)", "its own forward fails", "no kernel")
    ):
        triforce_tree.load(target)


def test_a_quantised_model_is_not_inflated() -> None:
    with pytest.raises(ValueError, match=says("quantised (Int8Linear)", "cannot be inflated")):
        inflate(quantised(tiny("llama-gqa")), "64x2x4/2x8x128")


def test_outliers_of_other_tokens_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    target = marked(tiny("llama-gqa"))
    for threshold, warned in ((6.0, True), (0.0, False)):
        caplog.clear()
        target.config.quantization_config = BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=threshold
        )
        HFModel(target)
        assert any("llm_int8_threshold=6.0" in message for message in caplog.messages) is warned


def _without_kernel(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this device")


def test_coarse_inputs_are_no_difference_to_transformers() -> None:
    """Inputs rounded to 8 bits: a difference in the last bit may round to the next step."""

    class Coarse(Int8Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.abs().amax(-1, keepdim=True) / 31
            return super().forward((x / scale).round() * scale)

    assert triforce_tree.load(quantised(tiny("llama-gqa"), Coarse))._hierarchy.guard.errors


def test_speeds_of_a_quantised_model_are_kept_apart() -> None:
    assert shape_of(marked(tiny("llama-gqa"))) != shape_of(TARGET)


@pytest.mark.parametrize("change", [quantised, wrapped, None])
def test_layers_that_wait_for_the_device_are_called_directly(
    change: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def waits(run: Any, device: Any, pool: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = HFModel(change(tiny("llama-gqa")) if change else tiny("llama-gqa"))
    replaced = change is None
    with model.active():
        assert captures(model, replaced)
        assert not caplog.messages
        monkeypatch.setattr(capture_probe, "Captured", waits)
        assert not captures(model, replaced)
    [said] = caplog.messages
    assert re.search("LlamaForCausalLM runs without CUDA graphs.*not permitted", said)
    assert ("quantised" in said) != replaced


@pytest.mark.gpu
def test_experts_that_are_looped_over_on_the_host_are_called_directly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small("AriaTextConfig", "AriaTextForCausalLM").to("cuda")
    out = triforce_tree.load(
        model, perturbed(model, 0.05), levels=3, **load_arguments({**SMALL, "rounds": 2})
    ).generate(prompt_of(90), max_new_tokens=12, do_sample=False)
    assert out.sequences[0, 90:].tolist() == greedy(model, prompt_of(90), 12)
    assert "AriaTextForCausalLM runs without CUDA graphs" in caplog.text


def test_a_graph_that_ignores_its_input_is_not_used() -> None:
    first, second = torch.randn(2, 3, 4).unbind()
    assert capture_probe.why_not_capturable(torch.sin, first, second) is None
    kept: list[Tensor] = []

    def cached(x: Tensor) -> Tensor:
        kept.append(x.sin())
        # From the fourth call on, a direct one, the result is new.
        return kept[0] if len(kept) < 4 else kept[-1]

    assert re.match("a replayed graph differs", str(capture_probe.why_not_capturable(cached, first, second)))


def test_running_out_of_memory_is_no_reason() -> None:
    def large(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        capture_probe.why_not_capturable(large, torch.zeros(2), torch.ones(2))


class Waiting(Int8Linear):
    """A quantised layer that reads a result on the host, as detection of outliers does."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 1e4).any()):
            raise AssertionError("an outlier")
        return super().forward(x)


@pytest.mark.gpu
@pytest.mark.parametrize("layer, captured", [(Int8Linear, True), (Waiting, False)])
def test_captured_where_a_graph_can_hold_it(layer: Any, captured: bool, caplog: Any) -> None:
    target = quantised(tiny("llama-gqa"), layer).cuda()
    prompt = prompt_of(60)
    engine = triforce_tree.load(target, perturbed(tiny("llama-gqa"), 0.1).cuda(), **load_arguments(SMALL))
    out = engine.generate(prompt, max_new_tokens=8, do_sample=False)
    assert out.sequences[0, 60:].tolist() == greedy(target, prompt, 8)
    assert engine.target.capturable is captured
    assert any("without CUDA graphs" in message for message in caplog.messages) is not captured
