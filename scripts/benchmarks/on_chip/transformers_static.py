"""transformers' own fastest decoding on the keys and values that our engine has computed.

Its static cache is made of our store's memory, since a second full cache would not fit beside the first:
decoding reads the same bytes from the same place.
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

# torch.compile's CUDA graphs: a run that compiles, some that record, and then the replays that count.
_WARM_UPS = 6


def alias(store: KVStore, target: HFModel) -> StaticCache:
    """A static cache whose layers are the store's own memory."""
    cache = StaticCache(config=target.model.config, max_cache_len=store.slots)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        # Through DLPack each tensor has a storage of its own: views of one storage that are written to
        # would make torch.compile copy or refuse.
        layer.keys, layer.values = map(from_dlpack, store.layer(index))
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        layer.cumulative_length = torch.zeros((), dtype=torch.int64, device=layer.device)
        layer.is_initialized = True
        for tensor in (layer.keys, layer.values, layer.cumulative_length):
            torch._dynamo.mark_static_address(tensor)
    return cache


@torch.no_grad()
def static_decoding(
    target: HFModel, store: KVStore, prompts: Sequence[Sequence[int]], new: int, compiled: bool
) -> dict[str, Any]:
    """Greedy decoding after prompts of one length whose keys and values are in the store.

    Args:
        target: the model, with its own attention (SDPA).
        store: holds all but each prompt's last token; the slots after them are overwritten.
        new: tokens of each text.
        compiled: by ``torch.compile(mode="reduce-overhead")``.

    Returns:
        median milliseconds a token, seconds of compiling and warming up, and the tokens.
    """
    length, device = len(prompts[0]) - 1, store.device
    cache = alias(store, target)
    model: Any = target.model
    forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False) if compiled else model
    roots = torch.tensor([[p[-1]] for p in prompts], device=device)

    def rewind() -> None:
        """The next token goes to slot ``length``; slots after it, which the mask hides, must be finite."""
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.cumulative_length.fill_(length)
        for group in store.groups:
            for part in group.kv:
                part[..., length:, :] = 0

    def step(tokens: Tensor) -> Tensor:
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        logits = forward(input_ids=tokens, use_cache=True, **{CACHE: cache}).logits
        best: Tensor = logits[:, -1:].argmax(-1).clone()
        return best

    start = time.perf_counter()
    for _ in range(_WARM_UPS if compiled else 1):
        rewind()
        step(roots).tolist()
    warm_up = time.perf_counter() - start
    rewind()
    tokens, times, out = roots, [], []
    for _ in range(new):
        start = time.perf_counter()
        tokens = step(tokens)
        # generate() looks after each token whether the text has ended, so it waits for it too.
        out.append(tokens[:, 0].tolist())
        times.append(time.perf_counter() - start)
    texts = [list(text) for text in zip(*out, strict=True)]
    return {"ms_per_token": 1e3 * statistics.median(times), "warm_up_seconds": warm_up, "tokens": texts}
