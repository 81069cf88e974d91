"""Rotary embeddings whose frequencies depend on the length of the text: longrope and dynamic NTK.

transformers chooses them anew in every forward, by the largest position among its tokens. A prompt that is
fed in chunks, or a token tree that reaches beyond the original length, would mix both sets in one text.
Here the choice is made once for a text, and every forward of it follows.
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
    """The frequencies of a model whose rotary embedding has two sets of them, or more.

    The family's own module goes on to choose: it is shown one more position than the forward has, beyond the
    original length for the set of long texts, and positions cut at the original length for that of short
    ones. Where it would choose on the host (longrope in transformers 5.17, dynamic NTK), copies run its
    forward without the choice, on frequency buffers that :meth:`choose` writes. All state is in tensors of
    fixed address, so a CUDA graph follows a later choice.

    Args:
        model: a transformers causal LM that :meth:`of` has found such a module in.
        names: of its rotary modules.
        original: tokens up to which texts are short.
        kind: ``longrope`` or ``dynamic``.

    Attributes:
        waits_for_host: the family's forward itself asks the host, which no CUDA graph can hold.
    """

    def __init__(self, model: PreTrainedModel, names: Sequence[str], original: int, kind: str) -> None:
        self.name, self.original, self.kind = type(model).__name__, original, kind
        device = next(model.parameters()).device
        self._limit = torch.zeros((), dtype=torch.int64, device=device)
        self._beyond = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._names = names
        # By module and buffer: the frequencies in use [D], and those of short and long texts [2, D].
        self._frequencies: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self.choose(False)
        self.waits_for_host = self._waits(model)
        if self.waits_for_host and self._take_over(model):
            self.waits_for_host = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LengthRope | None":
        """That of ``model``; None where its frequencies are fixed.

        Raises:
            ValueError: its layers have different original lengths, or both kinds.
        """
        found: set[tuple[str, int]] = set()
        names = []
        for name, module in model.named_modules():
            kinds = getattr(module, "rope_type", None)
            own = kinds if isinstance(kinds, dict) else {None: kinds}
            if not any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
                continue
            here = {(kind, _original(module, layers)) for layers, kind in own.items() if kind in _KINDS}
            if here:
                names.append(name)
                found |= here
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
        """Refuse a text of ``prompt`` tokens and ``new`` further ones that has no one set of frequencies.

        Raises:
            ValueError: the text would change them on its way, or a dynamic embedding would.
        """
        # The last new token is never fed.
        if prompt + new <= self.original + 1 or (prompt > self.original and self.kind == "longrope"):
            return
        room = max(0, self.original + 1 - prompt)
        remedy = f"set max_new_tokens<={room}" if room else f"give at most {self.original} tokens"
        if self.kind == "longrope":
            remedy += f", or give a prompt of more than {self.original} tokens"
        raise ValueError(
            f"{prompt} prompt tokens + {new} new ones exceed {self.original}, the length beyond which "
            f"{self.name} changes its rotary frequencies ({self.kind}), and cached keys with them; {remedy}"
        )

    def choose_for_texts(self, prompts: Sequence[int]) -> None:
        """The frequencies for texts of these many tokens, new ones to come.

        Raises:
            ValueError: some are long and some are not.
        """
        if self.mixed(prompts):
            raise ValueError(
                f"prompts of {min(prompts)} and {max(prompts)} tokens lie on both sides of {self.original}, "
                f"where {self.name} changes its rotary frequencies ({self.kind}); give them one by one"
            )
        self.choose(self.kind == "longrope" and max(prompts) > self.original)

    def mixed(self, prompts: Sequence[int]) -> bool:
        """Whether texts of so many tokens have different frequencies."""
        return self.kind == "longrope" and min(prompts) <= self.original < max(prompts)

    def choose(self, long: bool) -> None:
        """The frequencies of all forwards from now on."""
        self._limit.fill_(_NO_LIMIT if long else self.original - 1)
        self._beyond.fill_(self.original if long else 0)
        for used, both in self._frequencies.values():
            used.copy_(both[int(long)])

    def choose_for_window(self, positions: int) -> None:
        """The same for a draft, which never sees more positions than its window has."""
        self.choose(self.kind == "longrope" and positions > self.original)

    def hold(self, copy: nn.Module) -> None:
        """Let the rotary modules of a copy of the model follow the choice, for good."""
        for name in self._names:
            self._attach(copy.get_submodule(name))
        for (name, buffer), (used, _) in self._frequencies.items():
            module = copy.get_submodule(name)
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
            setattr(module, buffer, used)

    def _attach(self, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": self._shown(kwargs["position_ids"])}
            return (args[0], self._shown(args[1]), *args[2:]), kwargs

        def after(_: nn.Module, args: Any, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(table[..., :-1, :] for table in tables)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _shown(self, positions: Tensor) -> Tensor:
        """``[B, T]`` to ``[B, T + 1]``."""
        beyond = self._beyond.expand(len(positions), 1)
        return torch.cat([torch.minimum(positions, self._limit), beyond], dim=1)

    def _held(self, model: PreTrainedModel) -> PreTrainedModel:
        copy = shallow_copy(model)
        self.hold(copy)
        return copy

    def _waits(self, model: PreTrainedModel) -> bool:
        copy = self._held(model)
        self._tables(copy)  # the first call may compute frequencies
        counter = _HostReads()  # type: ignore[no-untyped-call]
        with counter:
            self._tables(copy)
        return counter.count > 0

    def _take_over(self, model: PreTrainedModel) -> bool:
        """Whether copies can run without the family's choice; they do from then on.

        They can where its cosines and sines are the same without it, and nothing else asks the host.
        """
        if any("forward" in vars(model.get_submodule(name)) for name in self._names):
            return False  # another library has replaced it
        copy = self._held(model)
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
            both = torch.stack([short, frequencies[1][key]])
            self._frequencies[key] = both[0].clone(), both
        copy = self._held(model)
        same = True
        for long in (True, False):
            self.choose(long)
            same = same and all(map(torch.equal, self._tables(copy), tables[long]))
        if not same or self._waits(model):
            self._frequencies = {}
            return False
        return True

    def _tables(self, copy: PreTrainedModel) -> list[Tensor]:
        """Cosines and sines of position 1, of every rotary module and layer type."""
        position = torch.ones(1, 1, dtype=torch.int64, device=self._beyond.device)
        hidden = torch.zeros(1, 1, 1, device=position.device)
        tables: list[Tensor] = []
        for module in map(copy.get_submodule, self._names):
            kinds = getattr(module, "rope_type", None)
            for layers in kinds if isinstance(kinds, dict) else (None,):
                tables += module(hidden, position, **({} if layers is None else {"layer_type": layers}))
        return tables


class _HostReads(TorchDispatchMode):
    """Counts tensors whose value the host asks for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _original(module: nn.Module, layer_type: str | None) -> int:
    """Tokens up to which a rotary module has the frequencies that it began with."""
    config: Any = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if (parameters.get("rope_type") or parameters.get("type")) == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(getattr(module, "original_max_seq_len", config.max_position_embeddings))
