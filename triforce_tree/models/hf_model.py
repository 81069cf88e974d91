"""Any transformers causal LM as a function of tokens and a cache.

No model code is ours: transformers' attention interface calls :func:`_attention` in every layer, which
hands queries, keys and values to the cache named in the forward's own keyword.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.device import explained
from triforce_tree.models.attention import AttentionParams, KVCache, KVShape
from triforce_tree.models.host_linear import few_row_linears
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.models.recorder import LayerCall, Recorder
from triforce_tree.models.supported import UnsupportedModelError, refuse_unsupported
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.locks import held

ATTENTION = "triforce_tree"


@dataclass(frozen=True)
class _Run:
    """What one forward's attention layers need; travels as a keyword through the model.

    ``called`` collects the indices of the layers whose attention came to us.
    """

    cache: KVCache
    called: set[int] = field(default_factory=set)


class Streamed(Protocol):
    """Weights of the decoder layers that are in host memory, and come when their layer is called.

    Attributes:
        bytes: of these weights; ``slot_bytes``: of the device's memory that they come to.
        copied: bytes that have come so far.
    """

    bytes: int
    slot_bytes: int
    copied: int

    def bring(self, weight: Tensor) -> None:
        """Before a parameter is read outside its layer's call."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside, layers are called without computing."""

    def check(self) -> None:
        """Raise RuntimeError where the weights were given back."""

    def close(self) -> None:
        """Give their memory back."""


class PassThrough(Cache):
    """A transformers cache that hands new keys and values on to the attention function, which stores them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _NoRunError(RuntimeError):
    """The attention function was called without the keyword that names its cache."""


def narrowing(module: torch.nn.Module, window: int | None) -> int | None:
    """``window``, or None where it is as large as all positions that the model has."""
    config: Any = getattr(module, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    return None if window is None or (limit is not None and window >= limit) else window


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    triforce: _Run | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if triforce is None:
        raise _NoRunError(
            f"attention implementation {ATTENTION!r} was called outside triforce_tree; restore the "
            "model with model.set_attn_implementation('sdpa')"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = AttentionParams(scale, narrowing(module, sliding_window), softcap, s_aux)
    triforce.called.add(module.layer_idx)  # type: ignore[arg-type]
    out = triforce.cache.attend(module, query, key, value, how)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def own_arithmetic(device: torch.device) -> Iterator[None]:
    """Inside, models compute in their own dtype, without gradients, on tensors that later calls may write."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {device.type, "cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class HFModel:
    """A loaded causal LM, checked once for what hierarchical decoding needs.

    Args:
        model: any ``transformers`` causal LM with attention layers of the common interface. It is never
            changed: forwards run on a :func:`shallow_copy` with our attention, made by :meth:`active`.
        streamed: its layers' weights, where they are in host memory.

    Raises:
        UnsupportedModelError: the family ignores the attention interface or keeps other state.
    """

    def __init__(self, model: PreTrainedModel, streamed: Streamed | None = None) -> None:
        self.model, self.streamed = model, streamed
        config = model.config.get_text_config(decoder=True)
        self.name = type(model).__name__
        self.layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        refuse_unsupported(model)
        try:
            self.length_rope = LengthRope.of(model)
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error
        except Exception as error:  # any failure of foreign code means: of no known form
            raise UnsupportedModelError(
                f"{self.name} has a rotary embedding of no known form, whose frequencies depend on the "
                f"text's length ({type(error).__name__}: {error})"
            ) from error
        self._running: PreTrainedModel | None = None
        self._probe()

    @property
    def device(self) -> torch.device:
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def learned_positions(self) -> int | None:
        """Entries of its table of position embeddings; None for rotary ones, which any position has."""
        rotary = any(name.endswith("inv_freq") for name, _ in self.model.named_buffers())
        return None if rotary else self.max_positions

    @property
    def running(self) -> PreTrainedModel:
        """The modules that compute inside :meth:`active`; they share all tensors with ``model``.

        Raises:
            RuntimeError: outside of it.
        """
        if self._running is None:
            raise RuntimeError(f"{self.name} was called outside HFModel.active()")
        return self._running

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forwards are possible inside, for one thread at a time.

        They compute in the model's own dtype whatever ``torch.autocast`` is around, and outside
        ``torch.inference_mode``, whose tensors could not be written to by a later call without it.

        Raises:
            RuntimeError: streamed weights were given back.
        """
        with held(self.model):
            if self.streamed is not None:
                self.streamed.check()
            if self._running is not None:
                yield
                return
            own = shallow_copy(self.model)
            own.set_attn_implementation(ATTENTION)
            own.eval()
            if self.length_rope is not None:
                self.length_rope.hold(own)
            with ExitStack() as stack:
                stack.enter_context(own_arithmetic(self.device))
                stack.enter_context(explained(self.device))
                stack.enter_context(few_row_linears(own))
                try:
                    self._running = own
                    yield
                finally:
                    self._running = None

    @torch.no_grad()
    def forward(
        self, tokens: list[int], cache: KVCache, last_only: bool = False, whole: bool = True
    ) -> Tensor:
        """Logits of T new tokens, whose keys and values go into the cache.

        Args:
            tokens: T ids.
            last_only: compute the last row's logits alone (prefill).
            whole: every layer must attend; False where layers are called without computing.

        Returns:
            ``[T, V]`` or ``[1, V]`` in the model's dtype, rank 0's on every rank.

        Raises:
            RuntimeError: a layer attended past our attention function, so its rows are not in the cache.
        """
        ids = torch.tensor([tokens], device=self.device)
        run = _Run(cache)
        out = self.running(
            input_ids=ids,
            position_ids=cache.positions(len(tokens)).to(self.device)[None],
            past_key_values=PassThrough(),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            triforce=run,
        )
        if whole and len(run.called) != self.layers:
            raise RuntimeError(
                f"{self.layers - len(run.called)} of {self.layers} layers of {self.name} did not attend "
                "through transformers' attention interface; was a forward of theirs replaced after load?"
            )
        cache.advance(len(tokens))
        logits: Tensor = out.logits[0, -1:] if last_only else out.logits[0]
        return broadcast_tensor(logits.contiguous())

    def _probe(self) -> None:
        recorder = Recorder()
        problem = None
        try:
            with self.active():
                self.forward([1], recorder, whole=False)
        except _NoRunError:
            problem = "its decoder layers do not hand the keywords of a forward on to it"
        except Exception as error:  # any failure of foreign code means: cannot work, and why
            problem = f"{type(error).__name__}: {error}"
        if problem is None and len(recorder.keys) != self.layers:
            problem = (
                f"{len(recorder.keys)} of its {self.layers} layers used transformers' attention interface"
            )
        if problem:
            raise UnsupportedModelError(
                f"{self.name} cannot be decoded hierarchically: its attention does not pass through "
                f"transformers' attention interface with our cache ({problem})"
            )
        for index, (keys, values) in recorder.widths.items():
            if keys != values:
                raise UnsupportedModelError(
                    f"{self.name} has keys of {keys} and values of {values} numbers a head (layer {index}; "
                    "multi-head latent attention does so), but caches and kernels need one width"
                )
        self.calls = {
            i: LayerCall(recorder.modules[i], how, *_heads_and_dim(recorder.keys[i]), recorder.query_heads[i])
            for i, how in sorted(recorder.variants.items())
        }
        self.kv_shapes = [
            KVShape(Heads(call.query_heads, call.kv_heads, call.dim), call.how.window)
            for call in self.calls.values()
        ]
        self.has_windows = any(shape.window is not None for shape in self.kv_shapes)
        self.has_softcap = any(call.how.softcap for call in self.calls.values())
        # Of layers that see whole texts, where there are any: those are what memory and time go to.
        self.heads = min(self.kv_shapes, key=lambda shape: shape.window is not None).heads


def _heads_and_dim(keys: Tensor) -> tuple[int, int]:
    """Of keys ``[B, H_kv, T, D]``."""
    return keys.shape[1], keys.shape[3]
