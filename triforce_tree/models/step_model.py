"""Forwards of a transformers causal LM over fixed buffers, which a CUDA graph can capture.

The model is a clone that shares its weights with the user's model. The attention setting, replaced linear
layers and compiled layers belong to the clone; the user's object is never changed.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.ahead import compiles_only
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.models.attention import use_our_attention
from triforce_tree.models.exact.device import exact_linears_copy, use_exact_norms
from triforce_tree.models.exact.host import use_exact_modules
from triforce_tree.models.experts.few_row import use_capturable_experts
from triforce_tree.models.experts.modules import expert_modules
from triforce_tree.models.few_row import (
    few_row_copy,
    has_int8_kernel,
    int8_copy,
    low_bit_copy,
    why_not_replaceable,
    with_low_bit_head,
)
from triforce_tree.models.fused_linears import fused, fused_exactly, mark_lengths
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.hidden_states import keep_hidden
from triforce_tree.models.host.decoder_layers import use_fused_decoder_layers
from triforce_tree.models.host.layers import use_fused_layers
from triforce_tree.models.host.linears import use_few_row_linears
from triforce_tree.models.host.recorded_layers import RecordedLayers, recorded_layers
from triforce_tree.models.host.widened import widen
from triforce_tree.models.indexers import NewKeys, attach_indexers, mask_of_slots
from triforce_tree.models.kernel_layers.shared_inputs import share_inputs
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.model_copy import (
    decoder_layers,
    listed_layers,
    other_layers,
    shallow_copy,
    with_own_code,
)
from triforce_tree.models.recurrent.mixers import attach
from triforce_tree.models.recurrent.pass_through import CACHE, PassThrough
from triforce_tree.models.running_forward import Attend, IndexedPass, RecurrentPass, running, running_forward
from triforce_tree.models.tensor_parallel import agreed_logits
from triforce_tree.runtime import distributed
from triforce_tree.runtime.capture_probe import why_not_capturable
from triforce_tree.runtime.executor import warms_up

MOST_ROWS = 128
"""Most tokens per sequence of a forward that is compiled and captured."""

# All programs over one state of a model share one compiled function, with versions for each size and number
# of sequences, and for each number of tokens where a layer cannot do with one version for all.
_COMPILED_SHAPES = 256
# Libraries have other kernels for one token than for a few, and for a few than for many.
_TRIED_ROWS = (1, 2, 16, 64)
_SETTINGS = bool | int | float | str | None
_LOG = logging.getLogger(__name__)


class StepModel:
    """Computes logits of T tokens per sequence by a clone of a model.

    Args:
        clone: a model whose weights may be shared, but whose modules are used by this object only.
        compiled: fuse each decoder layer's small operations with ``torch.compile``; if that fails, the layers
            run uncompiled, and a warning gives the reason.
        length_rope: the choice of rotary frequencies, if they depend on the sequence length.
        features: hidden states that are kept in ``hidden`` after each call, see ``keep_hidden``.
        max_positions: size of a learned position table, to which positions are clamped; None for no limit.
            Passes reach beyond the longest sequence; those results are never read, but need some position.
        layers: indices of the layers with attention, in their order; by default all.
        exact: compiled layers round as uncompiled ones do.
        codes: copies of the code of compiled layers, see ``with_own_code``; by default the layers' own code,
            which models share.

    Attributes:
        capturable: whether a CUDA graph can capture a call.
        hidden: the hidden states ``[B, T, hidden_size]`` by element of ``features``.
        scales_queries: whether queries are scaled by their positions.
        by_kernels: whether our kernels compute the layers completely, none of whose states are kept.
        recorded: stands for the layers on a CPU; None if it cannot.
    """

    by_kernels = False
    recorded: RecordedLayers | None = None

    def __init__(
        self,
        clone: PreTrainedModel,
        compiled: bool = False,
        length_rope: LengthRope | None = None,
        features: Sequence[int] = (),
        max_positions: int | None = None,
        layers: Sequence[int] | None = None,
        exact: bool = False,
        codes: dict[CodeType, CodeType] | None = None,
    ) -> None:
        self.model, self._max_positions = clone.eval(), max_positions
        text_config = clone.config.get_text_config(decoder=True)
        self._layers = range(text_config.num_hidden_layers) if layers is None else layers
        self.capturable = length_rope is None or not length_rope.waits_for_host
        self.hidden: dict[int, Tensor] = {}
        self._firsts: dict[str, nn.Module] | None = None
        self.scales_queries = use_our_attention(clone)
        attach(self.model, in_chunks=False)
        self.indexed = attach_indexers(self.model)
        self.device: torch.device = next(self.model.parameters()).device
        use_capturable_experts(self.model, self.device)
        if length_rope is not None:
            length_rope.attach(self.model)
        self._recompile_limit: Callable[[], AbstractContextManager[Any]] = nullcontext
        if compiled:
            self._recompile_limit = partial(torch._dynamo.config.patch, recompile_limit=_COMPILED_SHAPES)
            for layer in listed_layers(clone) or ():
                forward = layer.forward if codes is None else with_own_code(layer.forward, codes)
                layer.forward = _compiled(forward, fused_exactly if exact else fused)
        if features:
            keep_hidden(clone, decoder_layers(clone), features, self.hidden.__setitem__)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        last: int = 0,
        states: RecurrentPass | None = None,
        indexed: IndexedPass | None = None,
    ) -> Tensor:
        """Returns logits ``[B, T, V]`` for int64 ``[B, T]``; with ``last`` = n > 0 only those of the last n
        tokens.

        With several ranks every rank gets the same logits, so that all make the same choices.

        Args:
            states: states of the recurrent layers, if there are any.
            indexed: stores the keys of indexers, if there are any.
        """
        if self._max_positions is not None:
            positions = positions.clamp_max(self._max_positions - 1)
        # Set once for all layers: once per layer would take a quarter of the host time.
        masks = {"attention_mask": mask_of_slots(self.device)} if self.indexed else {}
        layers: AbstractContextManager[None] = nullcontext()
        if self.by_kernels and (compiles_only() or warms_up()):
            layers = self.one_of_each()
        elif self.recorded is not None and tokens.numel() <= self.recorded.most_rows:
            layers = self.recorded.instead()
        with running_forward(attend, self._layers, states, indexed=indexed), self._recompile_limit(), layers:
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=last,
                **{CACHE: PassThrough()},
                **({"triforce_positions": positions} if self.scales_queries else {}),
                **masks,
            )
        # Some families compute the logits of all tokens.
        logits: Tensor = out.logits[:, -last:]
        return agreed_logits(self.model, logits.contiguous())

    def one_of_each(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has only the first one of its layers that are alike: all of
        them launch the same kernels.
        """
        layers = decoder_layers(self.model)
        if self._firsts is None:
            kinds = {_kind(layer): name for name, layer in reversed(layers._modules.items())}
            self._firsts = {name: layer for name, layer in layers.named_children() if name in kinds.values()}
        return other_layers(layers, self._firsts)


def _kind(layer: nn.Module) -> Hashable:
    """Returns a value that is equal for layers of the same modules, settings and shapes."""

    def own(module: nn.Module) -> Hashable:
        settings = {name: value for name, value in vars(module).items() if isinstance(value, _SETTINGS)}
        settings.pop("layer_idx", None)
        shapes = [
            (name, part.shape, part.dtype) for name, part in module._parameters.items() if part is not None
        ]
        return type(module), tuple(settings.items()), tuple(shapes)

    return tuple(map(own, layer.modules()))


def step_model(
    model: HFModel, compiled: bool, features: Sequence[int] = (), exact: bool = False, drafts: bool = False
) -> StepModel:
    """Returns a model's forwards over fixed buffers, with few-row linear layers where they can be replaced.

    Args:
        compiled: see :class:`StepModel`.
        features: hidden states that are kept.
        exact: a row's bits do not depend on the rows beside it, see ``settings.check_exact``.
        drafts: whether the model only proposes, so that its head may have 8 bits.
    """
    on_gpu = model.device.type == "cuda"
    if not (on_gpu or exact):
        if features:
            return _host_step(shallow_copy(model.source), model, features)
        # Our kernels were compared with each of its layers, and it keeps nothing of a forward.
        model.host_step = model.host_step or _host_step(shallow_copy(model.source), model, ())
        return model.host_step
    replaced = on_gpu and why_not_replaceable(model.model) is None
    # Streamed linear layers and some rotary embeddings make the host wait.
    waits = (model.streamed is not None and not model.streamed.capturable) or (
        model.length_rope is not None and model.length_rope.waits_for_host
    )
    if on_gpu and not waits and model.capturable is None:
        model.capturable = captures(model, replaced)
    if exact:
        clone = exact_linears_copy(model.model) if on_gpu else use_exact_modules(shallow_copy(model.source))
    else:
        clone = few_row_copy(model.model) if replaced else shallow_copy(model.source)
        if drafts:
            with_low_bit_head(clone)
    # The compiler cannot see that streamed experts are overwritten inside a layer. What layers read from the
    # device while they run, it takes for constant.
    compiled = compiled and replaced and not (_streams_experts(model) or model.indexed)
    compiled = compiled and model.capturable is not False
    by_kernels = compiled and _by_kernels(clone, model)
    if exact and on_gpu:
        use_exact_norms(clone)
    step = _step(clone, model, compiled and not by_kernels, features, exact)
    step.by_kernels = by_kernels and not features
    step.capturable = not waits and model.capturable is not False
    return step


def low_bit_model(target: HFModel, bits: int, compiled: bool, features: Sequence[int]) -> StepModel:
    """Returns the forwards of the target on a copy of its weights with ``bits`` 8 or 4, for level 1."""
    by_host = bits == 8 and target.streamed is None and has_int8_kernel(target.device, target.dtype)
    bring = target.streamed.bring if target.streamed is not None else None
    clone = int8_copy(target.model) if by_host else low_bit_copy(target.model, bits, bring)
    if target.widens:
        widen(clone)
    if by_host:
        return _host_step(clone, target, features)
    by_kernels = compiled and _by_kernels(clone, target)
    compiled = compiled and not by_kernels
    step = StepModel(clone, compiled, target.length_rope, features, target.learned_positions)
    step.by_kernels = by_kernels and not features
    step.capturable = step.capturable and target.capturable is not False
    return step


def _by_kernels(clone: PreTrainedModel, model: HFModel) -> bool:
    """Lets our kernels compute the layers of a copy with few-row linears if they can do so completely.

    ``torch.compile`` would take seconds in each process for launches that compute the same.
    """
    if model.streamed is not None or not model.kernel_layers.complete(clone):
        return False
    model.kernel_layers.attach(clone)
    share_inputs(clone)
    return True


def _host_step(clone: PreTrainedModel, model: HFModel, features: Sequence[int]) -> StepModel:
    """Returns a copy of a model on the CPU that uses our kernels for layers where they give the same
    results.
    """
    linears = use_few_row_linears(clone)
    fused_modules = use_fused_layers(clone, linears)
    step = _step(clone, model, False, features)
    step.capturable = step.capturable and model.capturable is not False
    if linears and not step.scales_queries:
        layers = listed_layers(clone) or nn.ModuleList()
        use_fused_decoder_layers(layers, linears, fused_modules)
        if distributed.world_size() == 1:
            step.recorded = recorded_layers(layers)
    return step


def _step(
    clone: PreTrainedModel,
    model: HFModel,
    compiled: bool,
    features: Sequence[int] = (),
    exact: bool = False,
) -> StepModel:
    positions, layers = model.learned_positions, list(model.calls)
    return StepModel(clone, compiled, model.length_rope, features, positions, layers, exact, model.codes)


def captures(model: HFModel, replaced: bool) -> bool:
    """Returns whether CUDA graphs can capture a model's forwards. Logs the reason if they cannot.

    Args:
        replaced: whether its linear layers are ours. Then a forward of one number of tokens shows whether its
            other layers can be captured. Layers are not compiled for the trial, which would take seconds: a
            compiled layer waits for the host if the original one does.
    """
    linears = "" if replaced else f" with its linear layers ({why_not_replaceable(model.model)})"
    if replaced and model.states is not None:
        return True  # Our own scans and states are all that such layers have beside linear ones.
    step = _step(few_row_copy(model.model) if replaced else shallow_copy(model.source), model, False)
    # Others may choose by the number of a layer.
    known = replaced and model.streamed is None and model.kernel_layers.complete(step.model)

    def run(tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        with step.one_of_each() if known else nullcontext():
            return step(tokens, positions, _no_attention, indexed=NewKeys(tokens.device))

    for count in _TRIED_ROWS[1:2] if replaced else _TRIED_ROWS:
        # Two inputs without a token in common.
        first = torch.arange(2 * count, device=model.device).remainder(model.vocab_size)
        if reason := why_not_capturable(run, first[:count][None], first[count:][None]):
            _LOG.warning(
                "%s runs without CUDA graphs, as they cannot hold a forward of %d tokens%s: %s",
                model.name, count, linears, reason,
            )  # fmt: skip
            return False
    # The memory of the graphs is free again before memory is planned.
    torch.cuda.empty_cache()
    return True


def _no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return v.new_zeros(batch, tokens, heads, v.shape[-1])


def _streams_experts(model: HFModel) -> bool:
    return model.streamed is not None and bool(expert_modules(model.model))


def _compiled(forward: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``forward`` under torch.compile. Once compilation has failed, ``forward`` itself runs.

    One compiled version serves any number of tokens above one, if the layer allows it.
    """
    fast = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
    failed = False
    lengths: set[int] = set()

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        length = hidden.shape[1]
        # A compiled forward gains little for longer inputs.
        if not failed and length <= MOST_ROWS:
            reached = running.count
            if length not in lengths:
                lengths.add(length)
                mark_lengths(length, (hidden, args, kwargs))
            try:
                return fast(hidden, *args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if running.count != reached:
                    # The layer has reached its attention, so this is not a compilation failure.
                    raise
                failed = True
                _LOG.warning("torch.compile failed, decoder layers run uncompiled: %s", error)
        return forward(hidden, *args, **kwargs)

    return run
