"""Models that quantisation libraries made, where those are installed (`make test-real` installs them)."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
from tests.support.models.families import greedy, perturbed, prompt_of
from tests.support.processes.messages import says
from triforce_tree.config import load_arguments
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
    engine = triforce_tree.load(target, perturbed(plain, 0.1), **load_arguments({**SMALL, **options}))
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
    engine = triforce_tree.load(target, perturbed(plain, 0.1), **load_arguments(SMALL))
    outs = engine.generate(batch, max_new_tokens=6, do_sample=False)
    for prompt, out in zip(batch, outs.sequences.tolist(), strict=True):
        assert out[-6:] == greedy(target, prompt, 6)
    for refused in ({"retrieval_weight_bits": 8}, {"offload_weights": True, "retrieval_weight_bits": 8}):
        with pytest.raises(ValueError, match=says("quantised")):
            triforce_tree.load(target, **load_arguments(refused))


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
    """Stores the layers' matrices as ``change`` returns them, and names the method in config.json."""
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


def _float8_rows(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), name + "_scale": scale}


def _int8_rows(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), name + "_scale": scale}


def _int4_groups(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(1, (-1, 64))
    scale = groups.abs().amax(2) / 7
    codes = (groups / scale[:, :, None]).round().flatten(1) + 8
    return {
        name + "_packed": _packed(codes),
        name + "_scale": scale,
        name + "_shape": torch.tensor(weight.shape),
    }


@pytest.mark.parametrize(
    "form, change, weights, inputs, error",
    [
        (
            "float-quantized",
            _float8_rows,
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            "float",
            0.25,
        ),
        ("int-quantized", _int8_rows, {"num_bits": 8, "type": "int", "strategy": "channel"}, "int", 0.1),
        (
            "pack-quantized",
            _int4_groups,
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
            None,
            0.5,
        ),
    ],
    ids=["float8", "int8", "int4"],
)
def test_compressed_tensors(
    form: str,
    change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
    weights: dict[str, Any],
    inputs: str | None,
    error: float,
    folder: Path,
    plain: PreTrainedModel,
) -> None:
    """Inputs of 8 bits have a scale for each token, so that tokens are independent."""
    pytest.importorskip("compressed_tensors")
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights | {"symmetric": True}}
    if inputs is not None:
        token = {"num_bits": 8, "type": inputs, "symmetric": True, "strategy": "token", "dynamic": True}
        group["input_activations"] = token
    _stored(
        folder, change, quant_method="compressed-tensors", format=form, quantization_status="compressed",
        config_groups={"group_0": group}, ignore=["lm_head"],
    )  # fmt: skip
    target = load_model(folder)
    assert quantisation(target) == "compressed-tensors"
    ids = torch.tensor([prompt_of(60)])
    with torch.no_grad():
        theirs, ours = plain(ids).logits, target(ids).logits
    assert 0 < (theirs - ours).norm() < error * theirs.norm()
    for options in ({"levels": 3}, {"levels": 3, "offload": True}):
        decodes_exactly(target, plain, **options)


def _in_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes ``[in, out]``, zeros and scales ``[in / 64, out]``: a weight is ``(code - zero) * scale``."""
    groups = weight.T.unflatten(0, (-1, 64))
    low, high = groups.amin(1), groups.amax(1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(1, 15)
    codes = ((groups / scale[:, None]).round() + zero[:, None]).clamp(0, 15)
    return codes.flatten(0, 1), zero, scale


def _packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of a row in each int32, the one in column ``order[i]`` at bit ``4 * i``."""
    columns = codes.long().unflatten(1, (-1, 8))[:, :, list(order)]
    return (columns << torch.arange(0, 32, 4)).sum(2).to(torch.int32)


def _gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, zero, scale = _in_4_bits(weight)
    parts = {
        "qweight": _packed(codes.T).T.contiguous(),
        "qzeros": _packed(zero - 1),
        "g_idx": torch.arange(len(codes), dtype=torch.int32) // 64,
        "scales": scale,
    }
    return {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}


def _awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, zero, scale = _in_4_bits(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": _packed(codes, order), "qzeros": _packed(zero, order), "scales": scale}
    return {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}


@pytest.mark.parametrize(
    "method, change, settings",
    [
        ("gptq", _gptq, {"desc_act": False, "sym": False, "checkpoint_format": "gptq"}),
        ("awq", _awq, {"zero_point": True, "version": "gemm"}),
    ],
    ids=["gptq", "awq"],
)
def test_gptq_and_awq(
    method: str,
    change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
    settings: dict[str, Any],
    folder: Path,
    plain: PreTrainedModel,
) -> None:
    """The first run compiles a kernel of the library, which takes a minute."""
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum.gptq")
    _stored(folder, change, quant_method=method, bits=4, group_size=64, **settings)
    target = load_model(folder)
    assert quantisation(target) == method
    unpacked = copy.deepcopy(plain)
    with torch.no_grad():
        for name, weight in unpacked.named_parameters():
            if "_proj" in name:
                codes, zero, scale = _in_4_bits(weight)
                groups = codes.unflatten(0, (-1, 64)) - zero[:, None]
                weight.copy_((groups * scale[:, None]).flatten(0, 1).T)
    ids = torch.tensor([prompt_of(60)])
    with torch.no_grad():
        theirs, ours = unpacked(ids).logits, target(ids).logits
    assert (theirs - ours).norm() < 0.02 * theirs.norm() < 0.2 * (theirs - plain(ids).logits).norm()
    for options in ({"levels": 3}, {"levels": 2}, {"levels": 3, "offload": True}):
        decodes_exactly(target, plain, **options)
    engine = triforce_tree.load(folder, perturbed(plain, 0.1), **load_arguments(SMALL))
    outs = engine.generate([prompt_of(60), prompt_of(48)], max_new_tokens=6, do_sample=False)
    for length, out in zip((60, 48), outs.sequences.tolist(), strict=True):
        assert out[-6:] == greedy(target, prompt_of(length), 6)
    for refused in ({"retrieval_weight_bits": 8}, {"offload_weights": True, "retrieval_weight_bits": 8}):
        with pytest.raises(ValueError, match=says(f"quantised ({method})")):
            triforce_tree.load(folder, **load_arguments(refused))
