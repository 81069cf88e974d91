"""Decoding by transformers with a static cache that holds the keys and values of our engine.

The static cache uses the memory of our store, because the device cannot hold a second full cache. So both
engines read the same bytes from the same addresses.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from transformers import StaticCache

from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.recurrent.pass_through import CACHE


def alias(store: KVStore, target: HFModel) -> StaticCache:
    """Returns a static cache whose layers use the memory of the store."""
    cache = StaticCache(config=target.model.config, max_cache_len=store.slots)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        # DLPack gives each tensor its own storage. With written views of one storage, torch.compile would
        # copy them or fail.
        layer.keys, layer.values = map(from_dlpack, store.layers[index].kv)
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        layer.cumulative_length = torch.zeros((), dtype=torch.int64, device=layer.device)
        layer.is_initialized = True
        for tensor in (layer.keys, layer.values, layer.cumulative_length):
            torch._dynamo.mark_static_address(tensor)
    return cache


@torch.no_grad()
def static_decoding(target: HFModel, store: KVStore, prompts: Sequence[Sequence[int]], new: int) -> float:
    """Decodes greedily after prompts of one length whose keys and values are in the store.

    Args:
        target: the model, with transformers' attention (SDPA).
        store: keys and values of all tokens of each prompt but the last; later slots are overwritten.
        new: new tokens of each sequence.

    Returns:
        median milliseconds per token.
    """
    length, device = len(prompts[0]) - 1, store.device
    cache = alias(store, target)
    model: Any = target.model
    roots = torch.tensor([[p[-1]] for p in prompts], device=device)

    def rewind() -> None:
        """Resets the cache to ``length`` tokens; later slots, which the mask hides, must be finite."""
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.cumulative_length.fill_(length)
        for group in store.groups:
            for part in (group.k, group.v):
                part[..., length:, :] = 0

    def step(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=True, **{CACHE: cache}).logits
        best: Tensor = logits[:, -1:].argmax(-1).clone()
        return best

    rewind()
    step(roots).tolist()
    rewind()
    tokens, times = roots, []
    for _ in range(new):
        start = time.perf_counter()
        tokens = step(tokens)
        # generate() checks after each token whether the text has ended, so it also waits for each token.
        tokens.tolist()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
