"""A transformers causal LM as a function of tensors alone, so that a CUDA graph can hold it.

The model is a structural clone that shares its weights with the user's: its attention setting, its linear
layers and its compiled layers are its own, and the user's object is never touched.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from triforce_tree.kernels.device import describe
from triforce_tree.models.attention import AttentionParams
from triforce_tree.models.few_row import few_row_copy, why_not_exchanged
from triforce_tree.models.fused_linears import fused
from triforce_tree.models.hf_model import HFModel, PassThrough, narrowing
from triforce_tree.models.host_linear import use_few_row_linears
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.runtime.distributed import broadcast_tensor

ATTENTION = "triforce_tree_cycle"
MOST_ROWS = 128
"""Rows a sequence of the forwards that are compiled and captured."""

# All models of a family share one compiled function, with a version for each count of rows and sequences.
_COMPILED_SHAPES = 256
_LOG = logging.getLogger(__name__)


class Attend(Protocol):
    """What the attention layers of one forward do with their queries, keys and values."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, /) -> Tensor:
        """Store the new rows of ``layer``, and attend.

        Args:
            q, k, v: ``[B, H_q, T, D]`` and ``[B, H_kv, T, D]``, rotated.

        Returns:
            ``[B, T, H_q, D]``.
        """


class _Running(threading.local):
    """The forward under way. Layers run in order, so a count names them, and compiled layers stay alike."""

    attend: Attend | None = None
    layer = 0


_running = _Running()


def _attend_now(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    if _running.attend is None:
        raise RuntimeError(f"attention implementation {ATTENTION!r} was called outside a StepModel")
    layer = _running.layer
    _running.layer += 1
    return _running.attend(layer, q, k, v, AttentionParams(scale, window or None, softcap or None, sinks))


@torch.library.custom_op("triforce_tree::planned_attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """An operator takes numbers alone: 0 stands for no window, and for no softcap."""
    return _attend_now(q, k, v, scale, window, softcap, sinks)


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    batch, heads, rows, dim = q.shape
    return q.new_empty(batch, rows, heads, dim)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = narrowing(module, sliding_window) or 0
    # The operator is for the compiler; a call through it takes longer than a small attention itself.
    attend = torch.ops.triforce_tree.planned_attend if torch.compiler.is_compiling() else _attend_now
    return attend(query, key, value, scale, window, softcap or 0.0, s_aux), None


AttentionInterface.register(ATTENTION, _attention)


class StepModel:
    """Logits of T tokens a sequence.

    Args:
        clone: a model whose weights may be shared but whose modules are this object's own.
        compiled: fuse each decoder layer's small operations with ``torch.compile``; where that fails the
            layers run as they are, and a warning says why.
        lengths: the choice of rotary frequencies, where they depend on the text's length.
        features: decoder layers whose outputs are kept in ``hidden`` after each call.
        positions: how many the model has learned; None where any may be asked for. Passes reach beyond the
            most tokens of a text; what they compute there is never read, but it must have a position.

    Attributes:
        capturable: whether a CUDA graph can hold a call.
        hidden: by decoder layer, ``[B, T, hidden_size]``.
    """

    def __init__(
        self,
        clone: PreTrainedModel,
        compiled: bool = False,
        lengths: LengthRope | None = None,
        features: Sequence[int] = (),
        positions: int | None = None,
    ) -> None:
        self.model, self._positions = clone.eval(), positions
        self.capturable = lengths is None or not lengths.waits_for_host
        self.hidden: dict[int, Tensor] = {}
        self.model.set_attn_implementation(ATTENTION)
        _capturable_experts(self.model, next(self.model.parameters()).device)
        if lengths is not None:
            lengths.hold(self.model)
        self._limit: Callable[[], AbstractContextManager[Any]] = nullcontext
        if compiled:
            self._limit = partial(torch._dynamo.config.patch, recompile_limit=_COMPILED_SHAPES)
            for layer in decoder_layers(clone):
                layer.forward = _compiled(layer.forward)
        for index in sorted({*features}):
            decoder_layers(clone)[index].register_forward_hook(partial(self._keep, index))

    def _keep(self, index: int, layer: nn.Module, args: Any, output: Any) -> None:
        self.hidden[index] = output[0] if isinstance(output, tuple) else output

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, last: int = 0) -> Tensor:
        """Logits ``[B, T, V]`` of int64 ``[B, T]``; with ``last`` = n those of the last n tokens alone.

        On several cards they are rank 0's on every rank, so that all choose alike.
        """
        if self._positions is not None:
            positions = positions.clamp_max(self._positions - 1)
        _running.attend, _running.layer = attend, 0
        try:
            # Once for all layers: for each of them it would take a quarter of the host's time.
            with self._limit():
                out = self.model(
                    input_ids=tokens,
                    position_ids=positions,
                    past_key_values=PassThrough(),
                    use_cache=True,
                    logits_to_keep=last,
                )
        finally:
            _running.attend = None
        logits: Tensor = out.logits
        return broadcast_tensor(logits.contiguous())


def step_model(model: HFModel, compiled: bool, features: Sequence[int] = ()) -> StepModel:
    """A model's forwards over fixed buffers, with linear layers for few rows where these can be exchanged.

    Args:
        compiled: see :class:`StepModel`.
        features: decoder layers whose outputs are kept.
    """
    on_gpu = model.device.type == "cuda"
    exchanged = on_gpu and why_not_exchanged(model.model) is None
    clone = few_row_copy(model.model) if exchanged else shallow_copy(model.model)
    if not on_gpu:
        use_few_row_linears(clone)
    # Layers of other libraries, and weights that come from the host layer by layer, may wait for the device.
    made = StepModel(clone, compiled and exchanged, model.length_rope, features, model.learned_positions)
    made.capturable = made.capturable and exchanged and model.streamed is None
    return made


def _capturable_experts(clone: PreTrainedModel, device: torch.device) -> None:
    """Let the experts of a clone be multiplied without the host, where their present form waits for it.

    Grouped products read the groups' sizes on the host but for bf16 on some architectures, and experts one by
    one (eager) do so everywhere; batched ones gather each row's experts, and never do.
    """
    if not clone._can_set_experts_implementation():
        return
    before = getattr(clone.config.get_text_config(decoder=True), "_experts_implementation", None)
    grouped = _grouped_products_capture(device) and (device.type != "cuda" or clone.dtype == torch.bfloat16)
    if before == "grouped_mm" and not grouped:
        clone.set_experts_implementation("batched_mm")
    elif before == "eager" and device.type == "cuda":
        clone.set_experts_implementation("grouped_mm" if grouped else "batched_mm")


def _grouped_products_capture(device: torch.device) -> bool:
    """Whether a CUDA graph can hold torch's grouped product of bf16 matrices on this device."""
    # torch has a kernel for these two, and elsewhere copies the groups' sizes to the host.
    return device.type != "cuda" or describe(device).capability[0] in (9, 10)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers, found by its length.

    Raises:
        ValueError: there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of its {count} decoder layers")


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` under torch.compile, or itself once compiling has failed."""
    fast = torch.compile(forward, backend=fused, fullgraph=True, dynamic=False)
    failed = False

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        # Many rows gain little, and every count of them would be compiled anew.
        if not failed and hidden.shape[1] <= MOST_ROWS:
            layer = _running.layer
            try:
                return fast(hidden, *args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if _running.layer != layer:
                    # The layer ran as far as its attention, so this is no failure to compile it.
                    raise
                failed = True
                _LOG.warning("torch.compile failed, decoder layers run uncompiled: %s", error)
        return forward(hidden, *args, **kwargs)

    return run
