"""Forwards of any transformers causal LM over an explicit KV cache.

There is no model code here: transformers' attention interface calls :func:`_attention` in every layer, which
passes queries, keys and values on to the cache that travels through the forward as a keyword.
"""

import logging
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
from triforce_tree.models.few_row import quantisation
from triforce_tree.models.host_linear import few_row_linears
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.models.recorder import LayerCall, Recorder
from triforce_tree.models.supported import UnsupportedModelError, refuse_unsupported
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.locks import held

ATTENTION = "triforce_tree"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ForwardContext:
    """What the attention layers of one forward need; passed through the model as a keyword.

    ``called`` collects the indices of the layers that called our attention function.
    """

    cache: KVCache
    called: set[int] = field(default_factory=set)


class Streamed(Protocol):
    """Weights of decoder layers that are kept in host memory, and copied to the device for each layer's call.

    Attributes:
        bytes: size of these weights; ``slot_bytes``: of the device memory that they are copied into.
        copied: bytes copied so far.
    """

    bytes: int
    slot_bytes: int
    copied: int

    def bring(self, weight: Tensor) -> None:
        """Copy a parameter to the device; called before it is read outside its layer's call."""

    def paused(self) -> AbstractContextManager[None]:
        """A context in which calling a layer copies no weights, as it does not compute."""

    def check(self) -> None:
        """Raise RuntimeError if the weights have been released."""

    def close(self) -> None:
        """Release the weights' memory."""


class PassThrough(Cache):
    """A transformers cache that returns new keys and values to the attention function, which stores them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _NoContextError(RuntimeError):
    """The attention function was called without the keyword that carries the cache."""


def effective_window(module: torch.nn.Module, window: int | None) -> int | None:
    """``window``, or None if it is at least as large as the model's maximum number of positions."""
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
    triforce: _ForwardContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if triforce is None:
        raise _NoContextError(
            f"attention implementation {ATTENTION!r} was called outside triforce_tree; restore the "
            "model with model.set_attn_implementation('sdpa')"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = AttentionParams(scale, effective_window(module, sliding_window), softcap, s_aux)
    triforce.called.add(module.layer_idx)  # type: ignore[arg-type]
    out = triforce.cache.attend(module, query, key, value, how)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def plain_torch_modes(device: torch.device) -> Iterator[None]:
    """Inside, autocast, gradients and inference mode are off; later calls cannot write inference tensors."""
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
        model: any ``transformers`` causal LM whose layers use the attention interface. It is never changed:
            forwards run on a :func:`shallow_copy` with our attention, made by :meth:`active`.
        streamed: the weights of its layers, if they are kept in host memory.

    Attributes:
        capturable: whether CUDA graphs can hold linear layers of other libraries in it; None until tried.

    Raises:
        UnsupportedModelError: the family ignores the attention interface or keeps other state.
    """

    def __init__(self, model: PreTrainedModel, streamed: Streamed | None = None) -> None:
        self.model, self.streamed = model, streamed
        self.capturable: bool | None = None
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
        except Exception as error:  # third-party code: any failure means an unknown kind
            raise UnsupportedModelError(
                f"{self.name} has a rotary embedding of an unknown kind whose frequencies depend on the "
                f"sequence length ({type(error).__name__}: {error})"
            ) from error
        self._running: PreTrainedModel | None = None
        if quantisation(model) is not None:
            self._settle()
        self._probe()

    @property
    def device(self) -> torch.device:
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def learned_positions(self) -> int | None:
        """Size of the position embedding table; None for rotary embeddings, which are defined everywhere."""
        rotary = any(name.endswith("inv_freq") for name, _ in self.model.named_buffers())
        return None if rotary else self.max_positions

    @property
    def running(self) -> PreTrainedModel:
        """The copy of ``model`` that computes inside :meth:`active`; it shares all tensors with it.

        Raises:
            RuntimeError: called outside :meth:`active`.
        """
        if self._running is None:
            raise RuntimeError(f"{self.name} was called outside HFModel.active()")
        return self._running

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, forwards may run, in one thread at a time.

        They compute in the model's own dtype even under ``torch.autocast``, and outside
        ``torch.inference_mode``, as a later call could not write to inference tensors.

        Raises:
            RuntimeError: the streamed weights have been released.
        """
        with held(self.model):
            if self.streamed is not None:
                self.streamed.check()
            if self._running is not None:
                yield
                return
            running = shallow_copy(self.model)
            running.set_attn_implementation(ATTENTION)
            running.eval()
            if self.length_rope is not None:
                self.length_rope.attach(running)
            with ExitStack() as stack:
                stack.enter_context(plain_torch_modes(self.device))
                stack.enter_context(explained(self.device))
                stack.enter_context(few_row_linears(running))
                try:
                    self._running = running
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
            last_only: compute only the last token's logits (prefill).
            whole: check that every layer has attended; False if some layers are skipped.

        Returns:
            ``[T, V]`` or ``[1, V]`` in the model's dtype, rank 0's on every rank.

        Raises:
            RuntimeError: a layer bypassed our attention function, so the cache lacks its keys and values.
        """
        ids = torch.tensor([tokens], device=self.device)
        context = _ForwardContext(cache)
        out = self.running(
            input_ids=ids,
            position_ids=cache.positions(len(tokens)).to(self.device)[None],
            past_key_values=PassThrough(),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            triforce=context,
        )
        if whole and len(context.called) != self.layers:
            raise RuntimeError(
                f"{self.layers - len(context.called)} of {self.layers} layers of {self.name} did not attend "
                "through transformers' attention interface; load the model again if a forward was replaced"
            )
        cache.advance(len(tokens))
        logits: Tensor = out.logits[0, -1:] if last_only else out.logits[0]
        return broadcast_tensor(logits.contiguous())

    def _settle(self) -> None:
        """Run the model's own forward once.

        Quantisation libraries change layers in their first forward (bitsandbytes moves weights into a state
        of its own, compressed-tensors unpacks them), and copies must be made of what is there afterwards.
        """
        settings = getattr(self.model.config, "quantization_config", None)
        threshold = getattr(settings, "llm_int8_threshold", 0)
        if getattr(settings, "load_in_8bit", False) and threshold:
            _LOG.warning(
                "%s rounds a token's activations by the outliers of all tokens of a forward "
                "(llm_int8_threshold=%s), so that tokens verified together change each other's logits a "
                "little; llm_int8_threshold=0.0 makes them independent",
                self.name, threshold,
            )  # fmt: skip
        with held(self.model), plain_torch_modes(self.device):
            try:
                self.model(input_ids=torch.ones(1, 1, dtype=torch.int64, device=self.device))
            except Exception as error:  # third-party code
                raise UnsupportedModelError(
                    f"{self.name} is quantised ({quantisation(self.model)}), and its own forward fails here "
                    f"({type(error).__name__}: {' '.join(str(error).split())[:240]})"
                ) from error

    def _probe(self) -> None:
        recorder = Recorder()
        problem = None
        try:
            with self.active():
                self.forward([1], recorder, whole=False)
        except _NoContextError:
            problem = "its decoder layers do not pass the keywords of a forward on to it"
        except Exception as error:  # third-party code: any failure means unsupported
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
                    f"{self.name} has keys of {keys} and values of {values} elements per head (layer "
                    f"{index}; as in multi-head latent attention), but caches and kernels need one width"
                )
        self.calls = {
            i: LayerCall(recorder.modules[i], how, *_heads_and_dim(recorder.keys[i]), recorder.query_heads[i])
            for i, how in sorted(recorder.params.items())
        }
        self.kv_shapes = [
            KVShape(Heads(call.query_heads, call.kv_heads, call.dim), call.how.window)
            for call in self.calls.values()
        ]
        self.has_windows = any(shape.window is not None for shape in self.kv_shapes)
        self.has_softcap = any(call.how.softcap for call in self.calls.values())
        # Of the full-attention layers, if there are any: they take most of the memory and time.
        self.heads = min(self.kv_shapes, key=lambda shape: shape.window is not None).heads


def _heads_and_dim(keys: Tensor) -> tuple[int, int]:
    """H_kv and D of keys ``[B, H_kv, T, D]``."""
    return keys.shape[1], keys.shape[3]
