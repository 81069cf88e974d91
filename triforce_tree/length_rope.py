"""Rotary embeddings whose frequencies depend on the length of the text: longrope and dynamic NTK.

transformers chooses them anew in every forward, by the largest position among its tokens. A prompt that is
fed in chunks, or a token tree that reaches beyond the original length, would mix both sets in one text.
Here the choice is made once for a text, and every forward of it follows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from triforce_tree.config import StreamingConfig
from triforce_tree.model_copy import shallow_copy

_KINDS = ("longrope", "dynamic")
_NO_LIMIT = 2**62
# Positions of a draft behind its window: tokens that it is fed again, and its tree.
_BEYOND_WINDOW = 128


class LengthRope:
    """The frequencies of a model whose rotary embedding has two sets of them, or more.

    The family's own module goes on to choose: it is shown one more position than the forward has, beyond the
    original length for the set of long texts, and positions cut at the original length for that of short
    ones. The state is two tensors of fixed address, so a CUDA graph follows a later choice.

    Args:
        model: a transformers causal LM that :meth:`of` has found such a module in.
        names: of its rotary modules.
        original: tokens up to which texts are short.
        kind: ``longrope`` or ``dynamic``.

    Attributes:
        waits_for_host: the family chooses on the host, which no CUDA graph can hold.
    """

    def __init__(self, model: PreTrainedModel, names: Sequence[str], original: int, kind: str) -> None:
        self.name, self.original, self.kind = type(model).__name__, original, kind
        device = next(model.parameters()).device
        self._limit = torch.zeros((), dtype=torch.int64, device=device)
        self._beyond = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._names = names
        self.choose(False)
        self.waits_for_host = self._waits(shallow_copy(model), device)

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

    def choose_for_window(self, positions: int) -> None:
        """The same for a draft, which never sees more positions than its window has."""
        self.choose(self.kind == "longrope" and positions > self.original)

    def hold(self, copy: nn.Module) -> None:
        """Let the rotary modules of a copy of the model follow the choice, for good."""
        for name in self._names:
            self._attach(copy.get_submodule(name))

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

    def _waits(self, copy: PreTrainedModel, device: torch.device) -> bool:
        self.hold(copy)
        hidden = torch.zeros(1, 1, 1, device=device)
        position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        counter = _HostReads()  # type: ignore[no-untyped-call]
        for module in map(copy.get_submodule, self._names):
            kinds = getattr(module, "rope_type", None)
            for layers in kinds if isinstance(kinds, dict) else (None,):
                more = {} if layers is None else {"layer_type": layers}
                module(hidden, position, **more)  # the first call may compute frequencies
                with counter:
                    module(hidden, position, **more)
        return counter.count > 0


def fix_rotation(
    target: LengthRope | None, draft: LengthRope | None, prompts: Sequence[int], streaming: StreamingConfig
) -> None:
    """Choose rotary frequencies that depend on the text's length, before anything of a text is computed.

    Args:
        target, draft: those of the models; None where they are fixed.
        prompts: tokens of each.
        streaming: the draft sees no more positions than its window has.

    Raises:
        ValueError: the prompts need different ones.
    """
    if draft is not None:
        draft.choose_for_window(streaming.sinks + 2 * streaming.window + _BEYOND_WINDOW)
    if target is not None:
        target.choose_for_texts(prompts)


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
