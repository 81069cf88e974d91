"""Any transformers causal LM as a function of (tokens, positions, cache, rows).

No model code is ours: transformers' attention interface calls :func:`_attention` in every layer, which
hands queries, keys and values to the cache named in the forward's own keyword.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel

from triforce_tree.caches.base import KVCache, Rows, Variant
from triforce_tree.host_linear import few_row_linears
from triforce_tree.kernels.plan import Heads
from triforce_tree.length_rope import LengthRope
from triforce_tree.parallel import same
from triforce_tree.rope import FamilyRope
from triforce_tree.supported import UnsupportedModelError, refuse_unsupported

ATTENTION = "triforce_tree"


@dataclass(frozen=True)
class _Run:
    """What one forward's attention layers need; travels as a keyword through the model."""

    cache: KVCache
    rows: Rows


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


@dataclass(frozen=True)
class LayerCall:
    """How one layer calls attention: its module, what it asks for, heads and width of its keys."""

    module: torch.nn.Module
    how: Variant
    kv_heads: int
    dim: int


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
    how = Variant(scale, narrowing(module, sliding_window), softcap, s_aux)
    out = triforce.cache.attend(module, query, key, value, triforce.rows, how)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


class HFModel:
    """A loaded causal LM, checked once for what hierarchical decoding needs.

    Args:
        model: any ``transformers`` causal LM with attention layers of the common interface. It is not
            changed: its attention implementation is switched inside :meth:`active` only.
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
        self._probe()

    @property
    def device(self) -> torch.device:
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @contextmanager
    def active(self) -> Iterator[None]:
        """Our attention inside, the user's own setting restored after.

        Raises:
            RuntimeError: streamed weights were given back.
        """
        if self.streamed is not None:
            self.streamed.check()
        before = self.model.config._attn_implementation
        training = self.model.training
        try:
            self.model.set_attn_implementation(ATTENTION)
            self.model.eval()
            with few_row_linears(self.model):
                yield
        finally:
            self.model.set_attn_implementation(before)
            self.model.train(training)

    @torch.no_grad()
    def forward(self, tokens: list[int], rows: Rows, cache: KVCache, last_only: bool = False) -> Tensor:
        """Logits of T new tokens, whose rows go into the cache's tail.

        Args:
            tokens: T ids.
            rows: depths and mask of the new rows.
            last_only: compute the last row's logits alone (prefill).

        Returns:
            ``[T, V]`` or ``[1, V]`` in the model's dtype, rank 0's on every rank.
        """
        ids = torch.tensor([tokens], device=self.device)
        with self.length_rope.held() if self.length_rope is not None else nullcontext():
            out = self.model(
                input_ids=ids,
                position_ids=cache.positions(rows)[None],
                past_key_values=PassThrough(),
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                triforce=_Run(cache, rows),
            )
        cache.advance(len(tokens))
        logits: Tensor = out.logits[0, -1:] if last_only else out.logits[0]
        return same(logits.contiguous())

    def rope(self) -> FamilyRope:
        """The family's rotation, for a cache with relative positions; checked against the model.

        Raises:
            UnsupportedModelError: keys at position p are not our rotation of the keys at position 0.
        """
        try:
            rope = FamilyRope(self.model, self.length_rope)
            self._check_rotation(rope)
        except UnsupportedModelError:
            raise
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error
        except Exception as error:  # any failure of foreign code means: rotates in a way of its own
            raise UnsupportedModelError(
                f"{self.name} cannot draft on a streaming cache: its rotary embedding is not of the common "
                f"form ({type(error).__name__}: {error}); choose another draft, or none (prompt lookup)"
            ) from error
        if len(rope.unrotated) == self.layers:
            raise UnsupportedModelError(
                f"{self.name} has no rotary positions, so it cannot draft on a streaming cache"
            )
        return rope

    def _check_rotation(self, rope: FamilyRope) -> None:
        at_zero, at_five = _Recorder(), _Recorder()
        with self.active():
            for recorder, position in ((at_zero, 0), (at_five, 5)):
                recorder.position = position
                self.forward([1], _one_row(self.device), recorder)
        rope.unrotated = frozenset(i for i in at_zero.keys if torch.equal(at_zero.keys[i], at_five.keys[i]))
        places = torch.tensor([5], device=self.device)
        for index, raw in at_zero.keys.items():
            turned = rope.rotate(at_zero.modules[index], raw, raw, places)[1]
            expected = at_five.keys[index].float()
            off = float((turned.float() - expected).norm() / expected.norm())
            if not off < 0.02:
                raise UnsupportedModelError(
                    f"{self.name} cannot draft on a streaming cache: layer {index} rotates keys in a "
                    f"way its rotary module does not tell (relative error {off:.2g})"
                )

    def _probe(self) -> None:
        recorder = _Recorder()
        problem = None
        try:
            with self.active():
                self.forward([1], _one_row(self.device), recorder)
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
            index: LayerCall(recorder.modules[index], how, *recorder.keys[index].shape[1::2])
            for index, how in recorder.variants.items()
        }
        self.has_windows = any(call.how.window is not None for call in self.calls.values())
        self.has_softcap = any(call.how.softcap for call in self.calls.values())
        shapes = [(call.kv_heads, call.dim) for call in self.calls.values()]
        self.heads, self.even_heads = Heads(recorder.query_heads, *shapes[0]), len(set(shapes)) == 1


class _Recorder:
    """A cache of nothing, which notes the keys each layer handed over."""

    length = 0
    position = 0

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.modules: dict[int, Any] = {}
        self.variants: dict[int, Variant] = {}
        self.widths: dict[int, tuple[int, int]] = {}
        self.query_heads = 0

    def positions(self, rows: Rows) -> Tensor:
        return torch.full_like(rows.depths, self.position)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        self.keys[layer.layer_idx], self.modules[layer.layer_idx] = k, layer
        self.variants[layer.layer_idx], self.query_heads = how, q.shape[1]
        self.widths[layer.layer_idx] = k.shape[-1], v.shape[-1]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def advance(self, count: int) -> None: ...

    def keep(self, rows: list[int]) -> None: ...

    def commit(self, count: int) -> None: ...

    def prefill_step(self, coming: int) -> tuple[int, int]:
        return 0, coming


def _one_row(device: torch.device) -> Rows:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Rows(zero, torch.ones(1, 1, dtype=torch.bool, device=device), zero)
