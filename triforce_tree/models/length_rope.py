"""Rotary embeddings whose frequencies depend on the sequence length: longrope and dynamic NTK.

transformers chooses the frequencies in every forward, by the largest position among its tokens. A prompt that
is prefilled in chunks, or a token tree that reaches beyond the original length, would mix both sets within
one sequence. Here the choice is made once for a sequence, and all its forwards use it.
"""

import inspect
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from triforce_tree.models.model_copy import shallow_copy

_KINDS = ("longrope", "dynamic")
_NO_LIMIT = 2**62


class LengthRope:
    """Fixes the rotary frequencies of a model that has two or more sets of them.

    The family's own module still makes the choice. It receives one position more than the forward has: one
    beyond the original length selects the long set; for the short set all positions are clamped to the
    original length. Where the module chooses on the host (longrope in transformers 5.17, dynamic NTK), copies
    of the model run its forward without the choice, on frequency buffers that :meth:`choose` writes. All
    state is in tensors of fixed address, so a captured CUDA graph uses a later choice too.

    Args:
        model: a transformers causal LM in which :meth:`of` has found such a module.
        names: the names of its rotary modules.
        original: the original length: the most tokens of a sequence that uses the short set.
        kind: ``longrope`` or ``dynamic``.

    Attributes:
        long: whether the long set is in use.
        waits_for_host: the family's forward reads a tensor's value on the host, so it cannot be captured.
    """

    def __init__(self, model: PreTrainedModel, names: Sequence[str], original: int, kind: str) -> None:
        self.name, self.original, self.kind = type(model).__name__, original, kind
        device = next(model.parameters()).device
        self._limit = torch.zeros((), dtype=torch.int64, device=device)
        self._beyond = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._names = names
        # Maps (module, buffer) to the frequencies in use [D], and to the short and the long set [2, D].
        self._frequencies: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self.choose(False)
        self.waits_for_host = self._waits(model)
        if self.waits_for_host and self._take_over(model):
            self.waits_for_host = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LengthRope | None":
        """Returns the instance for ``model``, or None if its frequencies do not depend on the sequence
        length.

        Raises:
            ValueError: the layers have different original lengths, or both kinds.
        """
        found: set[tuple[str, int]] = set()
        names = []
        for name, module in model.named_modules():
            kinds = getattr(module, "rope_type", None)
            by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
            if not any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
                continue
            of_module = {
                (kind, _original(module, layer_type))
                for layer_type, kind in by_layer_type.items()
                if kind in _KINDS
            }
            if of_module:
                names.append(name)
                found |= of_module
        if not found:
            return None
        if len(found) > 1:
            raise ValueError(
                f"{type(model).__name__} has rotary embeddings that change at different lengths "
                f"({', '.join(f'{kind} at {length}' for kind, length in sorted(found))}); one is supported"
            )
        ((kind, original),) = found
        return cls(model, names, original, kind)

    def check(self, prompt: int, new: int) -> None:
        """Refuses a sequence of ``prompt`` tokens and ``new`` further ones that needs more than one set.

        Raises:
            ValueError: the sequence grows beyond the original length, or is longer and the kind is dynamic.
        """
        # The last new token is never fed to the model.
        if prompt + new <= self.original + 1 or (prompt > self.original and self.kind == "longrope"):
            return
        most_new = max(0, self.original + 1 - prompt)
        remedy = f"set max_new_tokens<={most_new}" if most_new else f"give at most {self.original} tokens"
        if self.kind == "longrope":
            remedy += f", or give a prompt of more than {self.original} tokens"
        raise ValueError(
            f"{prompt} prompt tokens + {new} new ones exceed {self.original}, the length beyond which "
            f"{self.name} changes its rotary frequencies ({self.kind}), and cached keys with them; {remedy}"
        )

    def choose_for_texts(self, prompts: Sequence[int]) -> None:
        """Chooses the set for a batch of prompts, given their lengths in tokens.

        Raises:
            ValueError: some need the long set and some the short one.
        """
        if self.mixed(prompts):
            raise ValueError(
                f"prompts of {min(prompts)} and {max(prompts)} tokens lie on both sides of {self.original}, "
                f"where {self.name} changes its rotary frequencies ({self.kind}); give them one by one"
            )
        self.choose(self.kind == "longrope" and max(prompts) > self.original)

    def mixed(self, prompts: Sequence[int]) -> bool:
        """Returns whether prompts of these lengths need different sets."""
        return self.kind == "longrope" and min(prompts) <= self.original < max(prompts)

    def choose(self, long: bool) -> None:
        """Uses the long or the short set in all forwards from now on."""
        self.long = long
        self._limit.fill_(_NO_LIMIT if long else self.original - 1)
        self._beyond.fill_(self.original if long else 0)
        for used, sets in self._frequencies.values():
            used.copy_(sets[int(long)])

    def attach(self, copy: nn.Module) -> None:
        """Makes the rotary modules of a copy of the model use the chosen set, permanently."""
        for name in self._names:
            self._add_hooks(copy.get_submodule(name))
        for (name, buffer), (used, _) in self._frequencies.items():
            module = copy.get_submodule(name)
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
            setattr(module, buffer, used)

    def _add_hooks(self, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": self._selecting(kwargs["position_ids"])}
            return (args[0], self._selecting(args[1]), *args[2:]), kwargs

        def after(_: nn.Module, args: Any, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(table[..., :-1, :] for table in tables)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _selecting(self, positions: Tensor) -> Tensor:
        """Returns positions ``[B, T + 1]``: the positions ``[B, T]`` and one more, which selects the set."""
        beyond = self._beyond.expand(len(positions), 1)
        return torch.cat([torch.minimum(positions, self._limit), beyond], dim=1)

    def _attached_copy(self, model: PreTrainedModel) -> PreTrainedModel:
        copy = shallow_copy(model)
        self.attach(copy)
        return copy

    def _waits(self, model: PreTrainedModel) -> bool:
        copy = self._attached_copy(model)
        self._tables(copy)  # the first call may compute frequencies
        counter = _HostReads()  # type: ignore[no-untyped-call]
        with counter:
            self._tables(copy)
        return counter.count > 0

    def _take_over(self, model: PreTrainedModel) -> bool:
        """Makes copies run without the family's choice from now on, if they can; returns whether they do.

        They can if its cosines and sines are the same without it, and nothing else waits for the host.
        """
        if any("forward" in vars(model.get_submodule(name)) for name in self._names):
            return False  # another library has replaced it
        copy = self._attached_copy(model)
        tables, frequencies = [], []
        for long in (False, True):
            self.choose(long)
            tables.append(self._tables(copy))
            frequencies.append(
                {
                    (name, buffer): value.clone()
                    for name in self._names
                    for buffer, value in copy.get_submodule(name).named_buffers(recurse=False)
                    if buffer.endswith("inv_freq") and not buffer.endswith("original_inv_freq")
                }
            )
        for key, short in frequencies[0].items():
            sets = torch.stack([short, frequencies[1][key]])
            self._frequencies[key] = sets[0].clone(), sets
        copy = self._attached_copy(model)
        equal = True
        for long in (True, False):
            self.choose(long)
            equal = equal and all(map(torch.equal, self._tables(copy), tables[long]))
        if not equal or self._waits(model):
            self._frequencies = {}
            return False
        return True

    def _tables(self, copy: PreTrainedModel) -> list[Tensor]:
        """Returns the cosines and sines at position 1 of every rotary module and layer type."""
        position = torch.ones(1, 1, dtype=torch.int64, device=self._beyond.device)
        hidden = torch.zeros(1, 1, 1, dtype=torch.float32, device=position.device)
        tables: list[Tensor] = []
        for module in map(copy.get_submodule, self._names):
            kinds = getattr(module, "rope_type", None)
            for layer_type in kinds if isinstance(kinds, dict) else (None,):
                keywords = {} if layer_type is None else {"layer_type": layer_type}
                tables += module(hidden, position, **keywords)
        return tables


class _HostReads(TorchDispatchMode):
    """Counts the tensor values that are read on the host (``Tensor.item``)."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _original(module: nn.Module, layer_type: str | None) -> int:
    """Returns the most tokens for which a rotary module uses its initial frequencies."""
    config: Any = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if (parameters.get("rope_type") or parameters.get("type")) == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(getattr(module, "original_max_seq_len", config.max_position_embeddings))
