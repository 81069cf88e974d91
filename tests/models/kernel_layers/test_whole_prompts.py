"""Prompts through layers by kernels: the keys, values and logits of a prefill as transformers wrote it."""

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config

from tests.support.models.look_alikes import made
from triforce_tree.kv.prefill import PromptCache, prefill
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.kernel_layers.modules import KernelLayers

TOKENS = 53


def filled(model: HFModel, bits: int, kernels: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns what a prompt leaves in the cache, and the logits of a token after it."""
    store = KVStore(model.kv_shapes, 1, 64, torch.device("cpu"), model.dtype, scratch=16, bits=bits)
    for group in store.groups:
        for part in group.parts:
            part.zero_()
    with model.active():
        if kernels:
            KernelLayers(model.model).attach(model.running)
        tokens = torch.randint(90, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
        prefill(model, PromptCache(store, 0), tokens, 16, None)
        logits = model.forward([7], PromptCache(store, 0, None, TOKENS))
    return [part.clone() for group in store.groups for part in group.parts], logits


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config, Phi3Config, Gemma3TextConfig])
def test_keys_values_and_logits(config: Any, bits: int) -> None:
    more = {"sliding_window": 24} if config is Gemma3TextConfig else {}
    model = HFModel(made(config, torch.bfloat16, num_hidden_layers=3, **more))
    (stored, logits), (own, expected) = (filled(model, bits, kernels) for kernels in (True, False))
    assert logits.isfinite().all()
    assert torch.equal(logits, expected)
    assert len(stored) == len(own) >= 2
    assert all(map(torch.equal, stored, own))
