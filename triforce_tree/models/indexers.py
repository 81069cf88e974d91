"""Indexers of sparse attention: modules that choose the tokens which each query of a layer attends to.

transformers writes the indexers of DeepSeek-V3.2, GLM-5 and others to one pattern: the module passes the keys
of new tokens to the cache's ``update_indexer``, scores all keys that this returns, hides those that a mask
hides, and returns the indices of the best ones. These go to the attention function as ``indices``. In our
copies the cache stores the keys in KV slots and returns those of all slots, and the mask says which slots a
query sees. So the module's own code chooses slots, for each node of a token tree by what this node sees.
"""

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from triforce_tree.models.running_forward import indexed_pass, running

# Most scores of one call of an indexer, in elements; an indexer holds some of such tensors at once.
_MOST_SCORES = 1 << 26
_PARAMETERS = {"hidden_states", "position_embeddings", "attention_mask"}


def indexers(model: nn.Module) -> list[nn.Module]:
    """Returns the indexers of a model that choose single tokens by the pattern above."""
    return [module for module in model.modules() if _known(module)]


def _known(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return (
        code is not None
        and "update_indexer" in code.co_names
        and inspect.signature(forward).parameters.keys() >= _PARAMETERS
    )


def attach_indexers(copy: nn.Module) -> bool:
    """Makes the indexers of a model copy choose among the slots of the running forward.

    Returns:
        whether there are any. Forwards of the copy then need :func:`mask_of_slots`.
    """
    found = indexers(copy)
    for module in found:
        own: Any = module
        own.triforce_forward = own.forward
        own.forward = MethodType(_choose, module)
    return bool(found)


def mask_of_slots(device: torch.device) -> Tensor:
    """Returns the attention mask for forwards of copies with indexers, which the layers pass on unread.

    Without a mask of four dimensions the layers' own code would fail, and transformers would make one of the
    new tokens alone.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class NewKeys:
    """The keys of a forward's new tokens, for a trial without a cache; see ``IndexedPass``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def visible(self, queries: int) -> Tensor:
        return torch.ones(1, queries, queries, dtype=torch.bool, device=self._device).tril()

    def index_keys(self, layer: int, new: Tensor, first: int) -> Tensor:
        return new


def _choose(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the slots int32 ``[B, T, K]`` that an indexer chooses, the best first.

    If a query sees fewer than K slots, the others follow in any order.
    """
    given = inspect.signature(module.triforce_forward).bind(*args, **kwargs).arguments
    states, count = indexed_pass(), given["hidden_states"].shape[1]
    given["attention_mask"] = seen = states.visible(count)  # [B, T, S]
    block = max(1, _MOST_SCORES // (module.n_heads * seen.shape[0] * seen.shape[2]))
    chosen = []
    for first in range(0, count, block):
        running.index_from = first
        tokens = slice(first, first + block)
        parts = {name: _tokens_of(value, count, tokens) for name, value in given.items()}
        chosen.append(module.triforce_forward(**parts))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, 1)


def _tokens_of(value: Any, count: int, tokens: slice) -> Any:
    """Returns the part of an argument for some of ``count`` tokens; what has no such dimension as it is."""
    if isinstance(value, tuple):
        return tuple(_tokens_of(each, count, tokens) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == count:
        return value[:, tokens]
    return value
