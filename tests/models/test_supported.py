"""Models that cannot be decoded correctly are refused at load with the reason."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import triforce_tree
from tests.support.models.families import SMALL_SETTINGS, build, greedy, perturbed, prompt_of, small, tiny
from tests.support.models.program_cases import decoded, program_of
from triforce_tree import UnsupportedModelError
from triforce_tree.config import load_arguments
from triforce_tree.kernels.device import KNOWN, emulated
from triforce_tree.models.experts import few_row
from triforce_tree.models.experts.few_row import FEW_ROW_EXPERTS, FEW_ROW_OR_GROUPED
from triforce_tree.models.hf_model import HFModel

# model class -> settings, and why it is refused
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "MiniMaxForCausalLM": (
        {}, r"recurrent state in a way that is not known here \(MiniMaxLightningAttention\)"
    ),
    "DeepseekV4ForCausalLM": ({}, "512 tokens that an indexer chooses"),
    "T5ForConditionalGeneration": ({"d_kv": 8}, "encoder-decoder"),
    "MambaForCausalLM": ({}, "attention|recurrent|state"),
    "Mamba2ForCausalLM": (
        {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1}, "has recurrent layers alone"
    ),
    "Zamba2ForCausalLM": (
        {
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4,
            "mamba_ngroups": 1, "num_mem_blocks": 1, "num_key_value_heads": 4,
        },
        "an attention module serves several layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_architectures_are_refused_with_the_reason(name: str) -> None:
    settings, reason = UNSUPPORTED[name]
    model = small(f"{name.split('For')[0]}Config", name, **settings)
    with pytest.raises(UnsupportedModelError, match=rf"{name}.*({reason})"):
        triforce_tree.load(model)


@pytest.mark.parametrize("family", ["llama4", "gemma4"])
def test_drafts_with_unusual_rotary_embeddings(family: str) -> None:
    """The draft's window is recomputed when full, so no key is rotated twice."""
    draft, prompt = tiny(family), prompt_of(60)
    small = {"levels": 2, "rounds": 1, "tree": "chain:3"}
    out = triforce_tree.load(draft, draft, **load_arguments({**small, "window": 100})).generate(
        prompt, max_new_tokens=24, do_sample=False
    )
    assert out.levels[-1].accepted >= 15, "the draft is the target"
    target = tiny("llama")
    out = triforce_tree.load(target, draft, **load_arguments({**small, "window": 6})).generate(
        prompt, max_new_tokens=24, do_sample=False
    )
    assert out.sequences[0, 60:].tolist() == greedy(target, prompt, 24)


@pytest.mark.parametrize(
    "places, reason",
    [
        ({"model.layers.0": 0, "model.layers.1": 1}, r"spread over 0, 1 \(hf_device_map\)"),
        ({"model": 0, "lm_head": "cpu"}, r"spread over 0, cpu \(hf_device_map\)"),
        ({"": "disk"}, r"spread over disk \(hf_device_map\)"),
    ],
)
def test_a_model_that_accelerate_spread_over_devices_is_refused(places: dict[str, Any], reason: str) -> None:
    model = tiny("llama")
    model.hf_device_map = places
    with pytest.raises(UnsupportedModelError, match=rf"LlamaForCausalLM is {reason}.*without device_map"):
        triforce_tree.load(model)


def test_a_decoder_of_speech_names_its_positions_otherwise() -> None:
    sizes = {"d_model": 32, "decoder_layers": 1, "encoder_layers": 1, "decoder_attention_heads": 2}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    model = build(
        "WhisperConfig", "WhisperForCausalLM", vocab_size=64, max_target_positions=80, **sizes, **ids
    )
    model.generation_config.decoder_start_token_id = None
    assert HFModel(model).learned_positions == 80
    with pytest.raises(ValueError, match=r"70 prompt tokens \+ 12 new ones = 82 exceed the model's 80"):
        triforce_tree.load(model, levels=1).generate(list(range(64)) + [2] * 6, max_new_tokens=12)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_copied_layers_have_configurations_of_their_own(family: str) -> None:
    model, prompt = tiny(family), prompt_of(60)
    engine = triforce_tree.load(model)
    assert engine.generate(prompt, max_new_tokens=8, do_sample=False).sequences[0, 60:].tolist() == greedy(
        model, prompt, 8
    )
    layers = model.model.layers
    layers[1] = copy.deepcopy(layers[1])
    for own in (engine, triforce_tree.load(model)):
        out = own.generate(prompt, max_new_tokens=8, do_sample=False)
        assert out.sequences[0, 60:].tolist() == greedy(model, prompt, 8)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel computes no logits .*AutoModelForCausalLM"):
        triforce_tree.load(tiny("llama").model)


class _Doubled(LlamaForCausalLM):
    """Gives its forward twice the embeddings of the tokens."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["inputs_embeds"] = 2 * self.model.embed_tokens(inputs.pop("input_ids"))
        return inputs


class _Shifted(LlamaForCausalLM):
    """Gives its forward other tokens."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + 1) % self.config.vocab_size}


class _Renamed(LlamaForCausalLM):
    """Prepares inputs as its base class does."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


@pytest.mark.parametrize("kind", [_Doubled, _Shifted])
def test_inputs_that_decoding_would_pass_by_are_refused(kind: type[LlamaForCausalLM]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} changes what its forward gets"):
        triforce_tree.load(kind(tiny("llama").config).eval())


class _Sampled(LlamaForCausalLM):
    """Has a loop of its own."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return super()._sample(*args, **kwargs)


class _Updated(LlamaForCausalLM):
    """Changes what its forward gets next."""

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super()._update_model_kwargs_for_generation(*args, **kwargs)


class _Derived(_Updated):
    pass


@pytest.mark.parametrize(
    "kind, method",
    [(_Sampled, "_sample"), (_Updated, "_update_model_kwargs"), (_Derived, "_update_model_kwargs")],
)
def test_a_loop_that_decoding_would_pass_by_is_refused(kind: type[LlamaForCausalLM], method: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^{kind.__name__} has its own {method}[^\n]*$"):
        triforce_tree.load(kind(tiny("llama").config).eval())


def test_a_loop_that_is_replaced_after_load_is_refused() -> None:
    model = tiny("llama")
    engine = triforce_tree.load(model)
    model._sample = print
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has its own _sample"):
        engine.generate([1, 2], max_new_tokens=2)


class _Prefixed(LlamaForCausalLM):
    """Generates after a longer prompt."""

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("attention_mask", None)
        return super().generate(torch.cat([inputs[:, :1], inputs], 1), **kwargs)


class _Cut(LlamaForCausalLM):
    """Returns the new tokens alone."""

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        return super().generate(inputs, **kwargs)[:, inputs.shape[1] :]


class _Noted(LlamaForCausalLM):
    """Generates as its base class does."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


@pytest.mark.parametrize("kind", [_Prefixed, _Cut, _Noted])
def test_a_generate_of_a_class_is_not_passed_by(kind: type[LlamaForCausalLM]) -> None:
    model, ids = kind(tiny("llama").config).eval(), torch.tensor([prompt_of(20)])
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **asked).tolist()
    assert model.generate(ids, custom_generate=triforce_tree.custom_generate(), **asked).tolist() == expected
    engine = triforce_tree.load(model)
    for several in ({}, {"num_beams": 2}):
        if kind is _Noted:
            engine.generate(ids, **asked, **several)
            continue
        with pytest.raises(
            ValueError, match=rf"^{kind.__name__} has its own generate, [^\n]*custom_generate="
        ):
            engine.generate(ids, **asked, **several)


@pytest.mark.parametrize("part", ["none", "head", "all"])
def test_derived_classes_and_weights_of_zeros(part: str) -> None:
    model, prompt = _Renamed(tiny("llama").config).eval(), prompt_of(20)
    for name, weight in model.named_parameters():
        if part == "all" or (part == "head" and name.startswith("lm_head")):
            weight.data.zero_()
    out = triforce_tree.load(model).generate(prompt, max_new_tokens=4, do_sample=False)
    assert out.sequences[0, 20:].tolist() == greedy(model, prompt, 4)


def test_a_forward_in_autocast_is_named() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        model = accelerator.prepare(tiny("llama"))
        with pytest.raises(UnsupportedModelError, match=r"in autocast .*unwrap_model\(model, keep_fp32_wrap"):
            triforce_tree.load(model)
        triforce_tree.load(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.filterwarnings("ignore")  # torch's own, about its next release
def test_dynamic_quantisation_is_named() -> None:
    model = torch.ao.quantization.quantize_dynamic(tiny("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModelError, match="dynamic quantisation scales the inputs of a layer by"):
        triforce_tree.load(model)


def test_weights_without_data_are_refused() -> None:
    with torch.device("meta"):
        empty = type(tiny("llama"))(tiny("llama").config)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM has weights without data"):
        HFModel(empty)
    for name, weight in tiny("llama").state_dict().items():
        module, _, own = name.rpartition(".")
        setattr(empty.get_submodule(module), own, torch.nn.Parameter(weight))
    with pytest.raises(
        UnsupportedModelError, match=r"has buffers without data \(model\.rotary_emb\.inv_freq"
    ):
        triforce_tree.load(empty)
    part = tiny("llama")
    part.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM has weights without data"):
        HFModel(part)


def test_a_window_as_large_as_all_positions_is_ignored() -> None:
    for window, narrow in ((2047, True), (2048, False), (4096, False)):
        model = tiny("mistral", sliding_window=window)
        assert any(shape.window is not None for shape in HFModel(model).kv_shapes) is narrow
        if not narrow:
            [new], _ = decoded(program_of(model, perturbed(model, 0.05), 3), [prompt_of(70)], [12])
            assert new == greedy(model, prompt_of(70), 12)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "llama4"])
def test_a_window_of_one_token(family: str) -> None:
    """The expected texts are made without transformers' cache, which does not drop tokens for this window."""
    name = "attention_chunk_size" if family == "llama4" else "sliding_window"
    target, prompts = tiny(family, **{name: 1}), [prompt_of(70), prompt_of(5)]
    expected = [greedy(target, prompt, 12, use_cache=False) for prompt in prompts]
    for levels in (1, 2, 3):
        settings = load_arguments(SMALL_SETTINGS)
        engine = triforce_tree.load(target, perturbed(target, 0.05), levels=levels, **settings)
        out = engine.generate(prompts, max_new_tokens=12, do_sample=False)
        assert out.sequences[:, 70:].tolist() == expected
    for window in (0, -3):
        with pytest.raises(
            UnsupportedModelError, match=rf"has a window of {window} tokens, [^\n]*{name}[^\n]*$"
        ):
            triforce_tree.load(tiny(family, **{name: window}))


@pytest.mark.parametrize("arch", ["sm_90", "sm_89"])
@pytest.mark.parametrize("before", ["grouped_mm", "eager"])
def test_experts_on_a_gpu(arch: str, before: str) -> None:
    gpu = torch.device("cuda")
    with emulated(KNOWN[arch]):
        for dtype in (torch.bfloat16, torch.float16):
            model = tiny("mixtral").to(dtype)
            model.set_experts_implementation(before)
            few_row.use_capturable_experts(model, gpu)
            # torch's grouped products take many rows where a graph can hold them: bf16, sm_90 and sm_100.
            grouped = arch == "sm_90" and dtype == torch.bfloat16
            expected = FEW_ROW_OR_GROUPED if grouped else FEW_ROW_EXPERTS
            assert model.config._experts_implementation == expected
        # What the user chose is kept.
        model.set_experts_implementation("batched_mm")
        few_row.use_capturable_experts(model, gpu)
        assert model.config._experts_implementation == "batched_mm"
        # Our kernel takes 16 bits only.
        single = tiny("mixtral")
        few_row.use_capturable_experts(single, gpu)
        assert single.config._experts_implementation == "batched_mm"
        # Models without experts raise if asked for an implementation.
        few_row.use_capturable_experts(tiny("llama-gqa"), gpu)


@pytest.mark.parametrize("captures, expected", [(True, "grouped_mm"), (False, "batched_mm")])
def test_experts_use_an_implementation_that_can_be_captured(
    captures: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_row, "grouped_products_capture", lambda device: captures)
    target = tiny("mixtral")
    assert target.config._experts_implementation == "grouped_mm"
    draft = perturbed(target, 0.05)
    program = program_of(target, draft, 3, retrieval_weight_bits=8)
    for step in (program.full, program.retrieval_model, program.drafter.model):
        assert step.model.config._experts_implementation == expected
    assert target.config._experts_implementation == draft.config._experts_implementation == "grouped_mm"
    [new], _ = decoded(program, [prompt_of(70)], [12])
    assert new == greedy(target, prompt_of(70), 12)
