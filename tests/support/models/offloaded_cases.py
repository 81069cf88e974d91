"""Small cycles whose caches are offloaded, what they should write, and the logits of one forward."""

from functools import cache

import torch
from families import greedy, perturbed, prompt_of, tiny
from program_cases import SMALL
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.layerwise_prefill import fill_by_layers
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_view import StreamedView
from triforce_tree.kv.prefill import SequenceRows
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.few_row import few_row_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel

PROMPTS = [prompt_of(length) for length in (83, 150, 67)]
NEW = [40, 30, 20]
# 2 layers, 2 KV heads of 8: a row of a layer takes 128 bytes in fp32.
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
    """Of the last ``width`` tokens, from an offloaded cache, and from one on the device."""
    target, prompt = HFModel(model(family)), PROMPTS[1]
    step = StepModel(few_row_copy(target.model))
    own = OffloadedCache(target, 1, 160, 0, 40, 0, 0, split)
    store = KVStore(target.kv_shapes, 1, 200, target.device, target.dtype)
    with target.active():
        own.prefill([prompt[: len(prompt) + 1 - width]], 16)
        fill_by_layers(target, prompt[:-width], 16, _Whole(store, target))
    mask = torch.ones(width, width, dtype=torch.bool).tril()
    start = torch.tensor([len(prompt) - width])
    tokens, positions = torch.tensor([prompt[-width:]]), start[:, None] + torch.arange(width)
    made = []
    for rows in (StreamedView(own, width, mask), TreeAttentionView(store, width, mask=mask)):
        rows.begin(start)
        made.append(step(tokens, positions, rows)[0])
    return made[0], made[1]


class _Whole:
    """A prefill's rows, all into one store."""

    def __init__(self, store: KVStore, model: HFModel) -> None:
        self.store, self.heads = store, model.heads
        self.places = [
            None if shape.window is not None else layer for layer, shape in enumerate(model.kv_shapes)
        ]

    def windowed(self) -> SequenceRows:
        return SequenceRows(self.store, 0)

    def buffer(self, rows: int) -> Tensor:
        return torch.empty((rows, 2, self.heads.kv, self.heads.dim))

    def part(self, layer: int, start: int, rows: Tensor):
        return lambda: None

    def whole(self, layer: int, rows: Tensor) -> None:
        for cached, new in zip(self.store.layer(layer), rows.permute(1, 2, 0, 3), strict=True):
            cached[0, :, : rows.shape[0]] = new
