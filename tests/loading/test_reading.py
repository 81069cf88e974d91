"""Weights are read directly onto their device; a model that does not fit is refused before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import triforce_tree
from tests.support.models.families import tiny
from tests.support.models.tiny_pair import settings
from tests.support.processes.messages import says
from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.pinned import HostMemoryError
from triforce_tree.loading import checkpoints, reading
from triforce_tree.loading.checkpoints import load_model, load_target
from triforce_tree.loading.reading import ModelFiles
from triforce_tree.planning.memory_map import tensor_bytes

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama-gqa").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "float32", "auto", None])
@pytest.mark.parametrize("tied", [False, True])
def test_the_size_in_memory_is_known_before_reading(tmp_path: Path, dtype: Any, tied: bool) -> None:
    model = tiny("llama-gqa")
    model.config.tie_word_embeddings = tied
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    files = ModelFiles.find(tmp_path, CPU, dtype)
    read = files.read(CPU)
    # The buffers are only a few rotary frequencies.
    assert files.bytes == sum(w.numel() * w.element_size() for w in read.parameters())
    assert tensor_bytes(read) - files.bytes < 1000


def test_quantised_weights_count_as_they_are_stored(folder: Path) -> None:
    settings(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})(folder)
    files = ModelFiles.find(folder, CPU)
    assert files.quantised == "bitsandbytes"
    assert files.bytes == (folder / "model.safetensors").stat().st_size


@pytest.mark.usefixtures("unread")
def test_what_does_not_fit_is_refused_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "available_device_bytes", lambda *_: 1000)
    for load in (load_model, triforce_tree.load):
        with pytest.raises(ValueError, match=says("weights of", folder, "GiB, more than cpu has left")):
            load(folder)
    monkeypatch.setattr(checkpoints, "available_device_bytes", lambda *_: None)
    monkeypatch.setattr(reading, "available", lambda: (1000, "the machine"))
    with pytest.raises(HostMemoryError, match=says("the model in", folder, "the machine leaves")):
        load_model(folder)


@pytest.mark.usefixtures("unread")
def test_quantised_weights_are_neither_streamed_nor_sharded(folder: Path) -> None:
    settings(quantization_config={"quant_method": "fp8"})(folder)
    for config in (
        HierarchyConfig.from_options(offload_weights=True, retrieval_weight_bits=8),
        HierarchyConfig.from_options(gpu_memory="1MiB"),
    ):
        with pytest.raises(ValueError, match=says(folder, "quantised (fp8)", "streamed", "checkpoint of 16")):
            load_target(folder, config, CPU)


def test_weights_for_a_gpu_are_read_onto_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that will be streamed are read into host memory."""
    places: list[object] = []
    real = AutoModelForCausalLM.from_pretrained

    def note(*_: object, device_map: object = None, **keywords: Any) -> Any:
        places.append(device_map)
        return real(**keywords)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", note)
    gpu = torch.device("cuda", 1)
    ModelFiles.find(folder, gpu).read(gpu)
    ModelFiles.find(folder, gpu).read(CPU)
    assert places == [{"": gpu}, None]
