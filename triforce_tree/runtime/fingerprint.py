"""Makes names of machines and models, which are keys of stored measurements."""

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def shape_of(model: PreTrainedModel) -> str:
    """Returns a string of everything that decides a model's speed, such as family, sizes and dtype."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    parts: tuple[str, ...] = (
        str(config.model_type),
        f"{config.num_hidden_layers}x{config.hidden_size}",
        f"{heads}q{getattr(config, 'num_key_value_heads', None) or heads}kv",
        f"mlp{getattr(config, 'intermediate_size', 0)}",
        f"v{config.vocab_size}",
        str(model.dtype).removeprefix("torch."),
    )
    if hasattr(model, "peft_config"):
        parts += ("adapters",)
    if getattr(model, "is_quantized", False):
        method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        parts += str(getattr(method, "value", method or "quantised")), f"{size / 2**20:.0f}MiB"
    return "-".join(parts)


def hardware(device: torch.device | None = None) -> str:
    """Returns the name of the GPU, or for a CPU its model and number of cores.

    Without ``device`` it is the GPU if there is one.
    """
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Linux tells which cores the process may use; elsewhere all count.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu()}, {cores} cores"


@cache
def _cpu() -> str:
    """Returns the model of the CPU. Cached, as Linux takes milliseconds for it if there are many cores."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return model
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), model)


# A digest of weights reads this many bytes of each tensor.
_SAMPLES = 256
# Attributes with which modules of peft choose their adapters.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def weights_digest(model: PreTrainedModel) -> str:
    """Returns a digest of the names, shapes and dtypes of all parameters, of some bytes of each, and of the
    adapters of peft that are active.

    A training step or quantisation changes the digest; a change of a few elements may not.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if chosen := {key: value for key, value in vars(module).items() if key in _OF_ADAPTERS}:
            digest.update(f"{name} {sorted(chosen.items())}".encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        # Tensors of quantisation libraries may have no bytes of their own.
        if type(weight.data) is torch.Tensor and weight.device.type != "meta" and weight.numel():
            flat = weight.detach().flatten().contiguous().view(torch.uint8)
            places = torch.linspace(
                0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64, device="cpu"
            )
            digest.update(flat[places.long().to(flat.device)].cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of a tokenizer's vocabulary."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(repr(words).encode()).hexdigest()[:32]
