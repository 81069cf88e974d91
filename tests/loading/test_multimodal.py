"""Multimodal models used for text: loaded from folders, without their encoders, with empty image inputs."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BatchEncoding, ModernBertDecoderConfig, ModernBertDecoderForCausalLM, PreTrainedModel

import triforce_tree
from tests.support.models.families import SMALL_SETTINGS, greedy, perturbed, prompt_of, tiny, without_tree
from tests.support.models.multimodal import IMAGE, MULTIMODAL, TEXT, multimodal
from tests.support.processes.messages import says
from triforce_tree.config import load_arguments
from triforce_tree.models.few_row import FewRowLinear, few_row_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import decoder_layers
from triforce_tree.models.step_model import step_model

NEW = 12
PROMPTS = [[token % TEXT for token in prompt_of(length)] for length in (70, 61)]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
SMALL = {**SMALL_SETTINGS}

model = cache(multimodal)


@cache
def expected(name: str, prompt: int = 0) -> list[int]:
    ids = PROMPTS[prompt]
    return greedy(model(name), ids, NEW, attention_mask=torch.ones(1, len(ids)))


def new(out: Any, prompt: int = 0) -> list[int]:
    return out.sequences[0, len(PROMPTS[prompt]) :].tolist()


@pytest.mark.parametrize("name", MULTIMODAL)
def test_folders(name: str, tmp_path: Path) -> None:
    """Greedy text of all numbers of levels, offloaded or not, equals that of ``model.generate``."""
    model(name).save_pretrained(tmp_path / "target")
    perturbed(model(name), 0.02).save_pretrained(tmp_path / "draft")
    engine = triforce_tree.load(tmp_path / "target", tmp_path / "draft", **load_arguments(SMALL))
    for options in ({"levels": 1}, {"levels": 2}, {"levels": 3}, {"levels": 3, "offload": True}):
        out = engine.with_options(**load_arguments(options)).generate(PROMPTS[0], **GREEDY)
        assert new(out) == expected(name), options
        assert len(out.levels) == options["levels"]
        assert all(level.accepted for level in out.levels[1:]), options
    target = engine.target.model
    assert type(target) is type(model(name))
    freed = sum(weight.numel() for weight in model(name).get_encoder(modality="image").parameters())
    assert freed > 10_000
    assert target.num_parameters() == model(name).num_parameters() - freed


@pytest.mark.parametrize("name", MULTIMODAL)
def test_layers_are_those_of_the_decoder(name: str) -> None:
    """The encoder has as many layers, and is the first module."""
    layers = decoder_layers(model(name))
    assert layers is model(name).get_decoder().layers
    copy = few_row_copy(model(name))
    assert any(isinstance(module, FewRowLinear) for module in copy.get_decoder().modules())
    encoder = copy.get_encoder(modality="image")
    assert not any(isinstance(module, FewRowLinear) for module in encoder.modules())


def test_layers_of_a_model_that_calls_its_output_layer_decoder() -> None:
    config = ModernBertDecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        pad_token_id=0,
    )
    made = ModernBertDecoderForCausalLM(config)
    assert isinstance(made.get_decoder(), nn.Linear)
    assert decoder_layers(made) is made.model.layers


class HostReads(TorchDispatchMode):
    """Counts the operators that copy values or sizes to the host, which a CUDA graph cannot capture."""

    OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.OPERATORS:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_decoding_forward_does_not_wait_for_the_host(name: str) -> None:
    step = step_model(HFModel(model(name)), compiled=False)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Any) -> torch.Tensor:
        return q.transpose(1, 2)

    ids, positions = torch.tensor([PROMPTS[0][:5]]), torch.arange(30, 35)[None]
    step(ids, positions, attend)
    with HostReads() as reads:
        step(ids, positions, attend)
        assert not reads.names
        assert bool(ids.any())
    assert reads.names, "a read is counted"


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_positions_do_not_depend_on_earlier_images(name: str) -> None:
    """A call with images leaves the difference of text and image positions on the module."""
    own = multimodal(name)
    own.model.rope_deltas = torch.full((1, 1), -9)
    engine = triforce_tree.load(own, perturbed(own, 0.02), levels=3, **load_arguments(SMALL))
    for _ in range(2):
        own.model.rope_deltas = torch.full((1, 1), -9)
        assert new(engine.generate(PROMPTS[0], **GREEDY)) == expected(name)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl"])
def test_a_batch_with_padding(name: str) -> None:
    out = triforce_tree.load(model(name), **load_arguments(without_tree(SMALL))).generate(PROMPTS, **GREEDY)
    assert out.sequences[:, -NEW:].tolist() == [expected(name, 0), expected(name, 1)]


EMPTY: dict[str, Any] = {
    "None": {"pixel_values": None},
    "an empty tensor": {"pixel_values": torch.zeros(0, 3, 28, 28)},
    "no encoded images": {"mm_encoder_outputs": {}},
    "no image of any kind": {"mm_encoder_outputs": {"image": None}},
    "types of text": {"mm_token_type_ids": torch.zeros(1, 70, dtype=torch.int64)},
    "listed types of text": {"token_type_ids": [[0] * 70]},
}


@pytest.mark.parametrize("given", EMPTY.values(), ids=EMPTY)
def test_empty_inputs_of_images_pass(given: dict[str, Any]) -> None:
    """They are accepted as keywords and in the output of a processor."""
    engine = triforce_tree.load(model("qwen3-vl"), levels=1)
    assert new(engine.generate(PROMPTS[0], **given, **GREEDY)) == expected("qwen3-vl")
    batch = BatchEncoding({"input_ids": torch.tensor([PROMPTS[0]]), **given})
    assert new(engine.generate(batch, **GREEDY)) == expected("qwen3-vl")
    assert new(engine.generate(**batch, **GREEDY)) == expected("qwen3-vl")


PICTURE = torch.zeros(4, 3 * 2 * 14 * 14)
GIVEN: dict[str, Any] = {
    "pixel_values": PICTURE,
    "image_grid_thw": torch.tensor([[1, 2, 2]]),
    "mm_encoder_outputs": {"image": PICTURE},
    "mm_token_type_ids": torch.ones(1, 70, dtype=torch.int64),
    "token_type_ids": [[0] * 69 + [1]],
    "input_features": torch.zeros(1, 2),
}


@pytest.mark.parametrize("name", GIVEN)
def test_images_are_refused_by_name(name: str) -> None:
    engine = triforce_tree.load(model("qwen3-vl"), levels=1)
    with pytest.raises(ValueError, match=says(name, "continues text alone")):
        engine.generate(PROMPTS[0], **{name: GIVEN[name]}, **GREEDY)
    with pytest.raises(ValueError, match=says(name, "continues text alone")):
        engine.generate({"input_ids": PROMPTS[0], name: GIVEN[name]}, **GREEDY)


def through_transformers(target: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    own = triforce_tree.custom_generate(levels=1)
    ids = torch.tensor([PROMPTS[0]])
    return target.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=own, **inputs, **GREEDY)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_through_transformers_own_generate(name: str) -> None:
    """transformers passes encoded images, and an empty dictionary if there are none."""
    ids = torch.zeros(1, 70, dtype=torch.int64)
    types = {"token_type_ids" if name == "gemma3" else "mm_token_type_ids": ids}
    for inputs in ({}, {} if name == "mistral3" else types):
        out = through_transformers(model(name), **inputs)
        assert out[0, 70:].tolist() == expected(name)


def test_images_through_transformers_own_generate_are_refused() -> None:
    own = triforce_tree.custom_generate(levels=1)
    prompt = torch.tensor([[1, IMAGE, 2, 3]])
    types = (prompt == IMAGE).long()
    pictures = {"pixel_values": PICTURE, "image_grid_thw": torch.tensor([[1, 2, 2]])}
    # Not all releases encode images before generation.
    named = r"(mm_encoder_outputs \(image\)|pixel_values) is not supported .* text alone"
    with pytest.raises(ValueError, match=named):
        model("qwen3-vl").generate(prompt, custom_generate=own, mm_token_type_ids=types, **pictures, **GREEDY)


def test_types_of_tokens_of_a_model_of_text_are_not_dropped() -> None:
    """``token_type_ids`` of zeros have an effect in such models, for example in GPT-2."""
    engine = triforce_tree.load(tiny("llama-gqa"), levels=1)
    with pytest.raises(ValueError, match="token_type_ids"):
        engine.generate(PROMPTS[0], token_type_ids=torch.zeros(1, 70, dtype=torch.int64), **GREEDY)
