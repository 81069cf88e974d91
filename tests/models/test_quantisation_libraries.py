"""Models that quantisation libraries made, where those are installed (`make test-real` installs them)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import greedy, perturbed, prompt_of
from messages import says
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)

import triforce_tree
from triforce_tree.loading.checkpoints import load_model
from triforce_tree.models.few_row import quantisation

SMALL: dict[str, Any] = {"budget": 16, "chunk": 4, "recent": 8, "window": 32, "tree": "chain:2", "gamma": 4}
# What libraries warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    """Large enough for blocks of 64 weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(plain: PreTrainedModel, tmp_path: Path) -> Path:
    plain.save_pretrained(tmp_path)
    return tmp_path


def _bitsandbytes(bits: int) -> Callable[[Path], Any]:
    return lambda folder: BitsAndBytesConfig(**{f"load_in_{bits}bit": True})


def _torchao(name: str, **settings: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        import torchao.quantization as torchao

        return TorchAoConfig(getattr(torchao, name)(**settings))

    return make


# Name: (package, what makes the setting, what the layers are).
ON_THE_FLY: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "bitsandbytes, 4 bits": ("bitsandbytes", _bitsandbytes(4)),
    "bitsandbytes, 8 bits": ("bitsandbytes", _bitsandbytes(8)),
    "torchao, int8": ("torchao", _torchao("Int8WeightOnlyConfig")),
    "torchao, int4": ("torchao", _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "torchao, float8": ("torchao", _torchao("Float8WeightOnlyConfig")),
    "quanto, int8": ("optimum.quanto", lambda folder: QuantoConfig("int8")),
}


def decodes_exactly(target: PreTrainedModel, plain: PreTrainedModel, **options: Any) -> None:
    prompt = prompt_of(60)
    engine = triforce_tree.load(target, perturbed(plain, 0.1), **SMALL, **options)
    out = engine.generate(prompt, max_new_tokens=8, do_sample=False)
    assert out.sequences[0, 60:].tolist() == greedy(target, prompt, 8)


@pytest.mark.parametrize("name", ON_THE_FLY)
def test_quantised_when_loaded(name: str, folder: Path, plain: PreTrainedModel) -> None:
    package, settings = ON_THE_FLY[name]
    pytest.importorskip(package)
    target = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings(folder), device_map={"": "cpu"}, dtype=torch.float32
    )
    assert quantisation(target) is not None
    batch = [prompt_of(60), prompt_of(48)]
    for options in ({"levels": 3}, {"levels": 2}, {"levels": 3, "offload": True}):
        decodes_exactly(target, plain, **options)
    engine = triforce_tree.load(target, perturbed(plain, 0.1), **SMALL)
    outs = engine.generate(batch, max_new_tokens=6, do_sample=False)
    for prompt, out in zip(batch, outs.sequences.tolist(), strict=True):
        assert out[-6:] == greedy(target, prompt, 6)
    for refused in ({"retrieval_weight_bits": 8}, {"offload_weights": True, "retrieval_weight_bits": 8}):
        with pytest.raises(ValueError, match=says("quantised")):
            triforce_tree.load(target, **refused)


def test_a_saved_bitsandbytes_checkpoint(folder: Path, plain: PreTrainedModel) -> None:
    pytest.importorskip("bitsandbytes")
    settings = BitsAndBytesConfig(load_in_4bit=True)
    made = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )
    made.save_pretrained(folder / "saved")
    target = load_model(folder / "saved")
    assert quantisation(target) == "bitsandbytes"
    assert greedy(target, prompt_of(60), 8) == greedy(made, prompt_of(60), 8)
    decodes_exactly(target, plain)


def _stored(
    folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], **settings: Any
) -> None:
    """Store the layers' matrices as ``change`` returns them, and name the method in config.json."""
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        weights |= change(name, weight) if "_proj" in name else {name: weight}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def test_fine_grained_fp8_is_unpacked_on_a_cpu(folder: Path, plain: PreTrainedModel) -> None:
    def blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tiles = weight.reshape(weight.shape[0] // 64, 64, weight.shape[1] // 64, 64)
        scale = tiles.abs().amax((1, 3)) / 448
        packed = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
        return {name: packed, name + "_scale_inv": scale}

    _stored(folder, blocks, quant_method="fp8", weight_block_size=[64, 64], activation_scheme="dynamic")
    target = load_model(folder)
    up = target.model.layers[0].mlp.up_proj.weight
    assert up.dtype in (torch.float32, torch.bfloat16)
    assert (up.float() - plain.model.layers[0].mlp.up_proj.weight).abs().max() < 0.02
    decodes_exactly(target, plain)


def test_compressed_tensors(folder: Path, plain: PreTrainedModel) -> None:
    pytest.importorskip("compressed_tensors")

    def rows(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {name: (weight / scale).to(torch.float8_e4m3fn), name + "_scale": scale}

    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": kind | {"strategy": "channel"},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    _stored(
        folder, rows, quant_method="compressed-tensors", format="float-quantized",
        quantization_status="compressed", config_groups={"group_0": group}, ignore=["lm_head"],
    )  # fmt: skip
    target = load_model(folder)
    assert quantisation(target) == "compressed-tensors"
    for options in ({"levels": 3}, {"levels": 3, "offload": True}):
        decodes_exactly(target, plain, **options)
