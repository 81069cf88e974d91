"""Small programs with offloaded caches, the tokens that they should emit, and the logits of one forward."""

from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.backend import CacheSpec, PromptRun
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.layerwise_prefill import DeviceStates, prefill_by_layers
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_prefill import prefill_offloaded
from triforce_tree.kv.offload.views import StreamedView
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.few_row import few_row_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel

PROMPTS = [prompt_of(length) for length in (83, 150, 67)]
NEW = [40, 30, 20]
# 2 KV heads of 8 dimensions: a KV slot of a layer takes 128 bytes in fp32, and a piece holds 32 of them.
PIECE = 32 * 128

model = cache(tiny)


@cache
def draft_of(family: str) -> PreTrainedModel:
    return perturbed(model(family), 0.05)


@cache
def _reference(family: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    return greedy(model(family), list(prompt), new_tokens, attention_mask=torch.ones(1, len(prompt)))


def references(prompts: list[list[int]], new: list[int], family: str = "llama-gqa") -> list[list[int]]:
    return [_reference(family, tuple(p), n) for p, n in zip(prompts, new, strict=True)]


def program_of(
    levels: int,
    batch: int = 1,
    family: str = "llama-gqa",
    max_seq_len: int = 200,
    split: Offload | None = None,
    **options: object,
) -> DecodingProgram:
    config = HierarchyConfig.from_options(**{**SMALL, **options})
    draft = None if levels == 1 else TreeDrafter(HFModel(draft_of(family)), config)
    split = split or Offload(0, PIECE, 2)
    return DecodingProgram(HFModel(model(family)), draft, config, batch, max_seq_len, levels, split)


def logits_of(split: Offload, width: int = 7, family: str = "llama-gqa") -> tuple[Tensor, Tensor]:
    """Returns logits of the last ``width`` tokens, from an offloaded cache and from one on the device."""
    target, prompt = HFModel(model(family)), PROMPTS[1]
    step = StepModel(few_row_copy(target.model))
    cache = OffloadedCache(CacheSpec(target, HierarchyConfig.from_options(**SMALL), 1, 160, 1), split)
    store = KVStore(target.kv_shapes, 1, 200, target.device, target.dtype)
    with target.active():
        prefill_offloaded(cache, [prompt[: len(prompt) + 1 - width]], 16, [0], PromptRun())
        sink = _StoreSink(store, target)
        prefill_by_layers(target, prompt[:-width], 16, sink, None, None, DeviceStates())
    mask = torch.ones(width, width, dtype=torch.bool).tril()
    start = torch.tensor([len(prompt) - width])
    tokens, positions = torch.tensor([prompt[-width:]]), start[:, None] + torch.arange(width)
    logits = []
    for view in (StreamedView(cache, width, mask), TreeAttentionView(store, width, mask=mask)):
        view.begin(start)
        logits.append(step(tokens, positions, view)[0])
    return logits[0], logits[1]


class _StoreSink:
    """A layerwise prefill into a store on the device."""

    start = 0

    def __init__(self, store: KVStore, model: HFModel) -> None:
        self.store, self.heads = store, model.heads
        self.host_layers = [
            None if shape.window is not None else layer for layer, shape in enumerate(model.kv_shapes)
        ]

    def rings(self) -> PromptCache:
        return PromptCache(self.store, 0)

    def buffer(self, tokens: int) -> Tensor:
        return torch.empty((tokens, self.heads.row))

    def chunk_done(self, layer: int, start: int, kv: Tensor):
        return lambda: None

    def layer_done(self, layer: int, kv: Tensor) -> None:
        for cached, new in zip(self.store.layers[layer].kv, self.heads.split(kv), strict=True):
            cached[0, :, : kv.shape[0]] = new.transpose(0, 1)
