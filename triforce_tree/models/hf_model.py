"""Forwards of any transformers causal LM over an explicit KV cache.

There is no model code here, see ``models.attention``.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.device import explained
from triforce_tree.models.attention import KVCache, KVShape, use_our_attention
from triforce_tree.models.chunk_graphs import ChunkGraphs
from triforce_tree.models.experts.streamed import Streamed
from triforce_tree.models.few_row import foreign_quantisation, quantisation
from triforce_tree.models.fingerprint import Changes
from triforce_tree.models.host.linears import use_few_row_linears
from triforce_tree.models.host.widened import renew_widened, widen, widens
from triforce_tree.models.indexers import attach_indexers, indexers, mask_of_slots
from triforce_tree.models.kernel_layers.modules import KernelLayers
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.model_copy import hooked, parameter_bytes, shallow_copy
from triforce_tree.models.recorder import LayerCall, Recorder
from triforce_tree.models.recurrent.mixers import attach
from triforce_tree.models.recurrent.pass_through import CACHE, PassThrough
from triforce_tree.models.running_forward import Attend, running_forward
from triforce_tree.models.supported import (
    UnsupportedModelError,
    max_positions,
    refuse_unsupported,
    refuse_without_attention,
)
from triforce_tree.models.tensor_parallel import agreed_logits
from triforce_tree.option_checks import check_positions
from triforce_tree.runtime import distributed
from triforce_tree.runtime.cpu_threads import shared_cpus
from triforce_tree.runtime.devices import plain_torch_modes
from triforce_tree.runtime.locks import held
from triforce_tree.runtime.token_ids import id_tensor

if TYPE_CHECKING:
    from triforce_tree.models.step_model import StepModel

_LOG = logging.getLogger(__name__)


class HFModel:
    """A loaded causal LM, checked once for what hierarchical decoding needs.

    Args:
        model: any ``transformers`` causal LM whose layers use the attention interface. It is never changed:
            forwards run on a :func:`shallow_copy` of ``source`` with our attention, made by :meth:`active`.
        streamed: the weights of its layers, if they are kept in host memory.

    Attributes:
        widens: whether its weights have 16 bits, and forwards compute in fp32 on the CPU.
        source: the model that copies are made of: ``model``, or its copy from ``widen``.
        dtype: the dtype that forwards compute in.
        changes: the record by which changes of ``model`` are noticed.
        revision: a number that grows with each change, except changes of weights in place. Copies must then
            be made again.
        weights_revision: a number that grows when weights are changed in place. Copies share the weights.
        capturable: whether CUDA graphs can hold its forwards; None until tried.
        parameter_bytes: the bytes of the weights.
        calls: how each layer with attention attends, by its index.
        kv_shapes: the shapes of the keys and values of these layers, in their order.
        kv_layers: the same for every layer of the model, None for a layer without attention. With indexers
            it is twice as long: its second half has each layer's indexer.
        indexed: whether an indexer chooses what layers attend to.
        states: shapes of the states of recurrent layers; None if there are none.
        layer_outputs: see ``Recorder.outputs``.
        codes: copies of its layers' code that are compiled, see ``with_own_code``.
        host_step: see ``step_model``; None until it was made.

    Raises:
        UnsupportedModelError: the family ignores the attention interface or keeps other state.
    """

    def __init__(self, model: PreTrainedModel, streamed: Streamed | None = None) -> None:
        self.model, self.streamed = model, streamed
        self.capturable: bool | None = None
        self.indexed = bool(indexers(model))
        self.name = type(model).__name__
        config: Any = model.config.get_text_config(decoder=True)
        if getattr(config, "num_hidden_layers", None) is None:
            raise UnsupportedModelError(
                f"{self.name} is no stack of decoder layers: its configuration has no num_hidden_layers"
            )
        refuse_unsupported(model)
        self.widens = streamed is None and widens(model)
        self.dtype: torch.dtype = torch.float32 if self.widens else model.dtype
        self._own_dtype: torch.dtype = model.dtype
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self.revision = self.weights_revision = 0
        self._copy: PreTrainedModel | None = None
        self._running: PreTrainedModel | None = None
        self._kernel_layers: KernelLayers | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        self.host_step: StepModel | None = None
        self._scales_queries = self._shares_kv = self._by_kernels = False
        self.calls: dict[int, LayerCall] = {}
        self._attended: dict[int, nn.Module] = {}
        if foreign_quantisation(model) is not None:
            self._settle()
        self.changes = Changes(model, moves=streamed is not None)
        self._read()

    def _read(self) -> None:
        """Finds out how the model computes, as it is now."""
        self.max_positions = max_positions(self.model.config.get_text_config(decoder=True))
        self.parameter_bytes = parameter_bytes(self.model)
        self.source = widen(shallow_copy(self.model)) if self.widens else self.model
        self._copy = self._kernel_layers = self._chunk_graphs = self.capturable = self.host_step = None
        self.codes: dict[CodeType, CodeType] = {}
        refuse_unsupported(self.model)
        try:
            self.length_rope = LengthRope.of(self.model)
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error
        except Exception as error:  # third-party code: any failure means an unknown kind
            raise UnsupportedModelError(
                f"{self.name} has a rotary embedding of an unknown kind whose frequencies depend on the "
                f"sequence length ({type(error).__name__}: {error})"
            ) from error
        self._probe()

    def refresh(self, compare: Callable[["HFModel"], object] | None = None) -> None:
        """Notices changes of the model since the last call, and reads the model again if there are any.

        If :attr:`revision` has changed, everything that was derived from the model must be made again.

        Args:
            compare: checks a changed model; the change is not accepted if it raises.

        Raises:
            UnsupportedModelError: the changed model cannot be decoded.
            ValueError: its dtype, device, vocabulary or number of layers has changed.
            RuntimeError: a layer does not attend through our attention function any more.
        """

        def renew() -> None:
            self.check_sizes()
            self._read()
            if compare is not None:
                compare(self)

        self.changes.refresh(renew)
        if self.widens and self.changes.weights != self.weights_revision:
            renew_widened(self.source, self.model)
        self.revision, self.weights_revision = self.changes.revision, self.changes.weights

    def check_sizes(self) -> None:
        """Raises ValueError if the model now has another dtype, device or vocabulary, or other layers."""
        config: Any = self.model.config.get_text_config(decoder=True)
        device = next(self.model.get_input_embeddings().parameters()).device
        sizes = [
            ("dtype", self._own_dtype, self.model.dtype),
            ("device", self.device, device),
            ("vocabulary size", self.vocab_size, config.vocab_size),
            ("number of layers", self.layers, config.num_hidden_layers),
        ]
        for what, size, now in sizes:
            if now != size:
                raise ValueError(
                    f"the {what} of {self.name} is {now}, and was {size} when the engine was made; "
                    "make a new engine (triforce_tree.load, or another custom_generate)"
                )

    @property
    def settings(self) -> GenerationConfig:
        """Returns the model's own generation options.

        Raises:
            ValueError: it has none.
        """
        found: GenerationConfig | None = self.model.generation_config
        if found is None:
            raise ValueError(
                f"the generation_config of {self.name} is None, so that no token is known to end a text; set "
                "model.generation_config = GenerationConfig(eos_token_id=...)"
            )
        return found

    @property
    def has_level_one(self) -> bool:
        """Returns whether level 1 can run: it would need recurrent states of its own, and gains nothing where
        an indexer already chooses what the target attends to.
        """
        return self.states is None and not self.indexed

    @property
    def learned_positions(self) -> int | None:
        """Returns the size of the position embedding table, or None for rotary embeddings, which have no
        table.
        """
        rotary = any(name.endswith("inv_freq") for name, _ in self.model.named_buffers())
        return None if rotary else self.max_positions

    def function_key(self) -> object:
        """Returns a value that stays equal as long as the model, as :meth:`refresh` has seen it, computes the
        same function.
        """
        long = self.length_rope.long if self.length_rope is not None else None
        return long, self.revision, self.weights_revision

    def check_length(self, prompt: int, new: int) -> None:
        """Raises ValueError if prompt and new tokens exceed the positions of the model."""
        check_positions(prompt, new, self.max_positions)
        if self.length_rope is not None:
            self.length_rope.check(prompt, new)

    @property
    def running(self) -> PreTrainedModel:
        """Returns the copy of ``model`` that computes inside :meth:`active`; it shares all tensors with it.

        Raises:
            RuntimeError: called outside :meth:`active`.
        """
        if self._running is None:
            raise RuntimeError(f"{self.name} was called outside HFModel.active()")
        return self._running

    @contextmanager
    def active(self, own: bool = False) -> Iterator[None]:
        """Returns a context in which forwards may run, in one thread at a time.

        They compute in the model's own dtype even under ``torch.autocast``, and outside
        ``torch.inference_mode``, because a later call could not write to inference tensors.

        Args:
            own: whether :attr:`running` is a copy made for this call, which may be changed permanently.

        Raises:
            RuntimeError: the streamed weights have been released.
        """
        with held(self.model):
            if self.streamed is not None:
                self.streamed.check()
            if self._running is not None:
                yield
                return
            with ExitStack() as stack:
                stack.enter_context(shared_cpus())
                stack.enter_context(plain_torch_modes(self.device))
                stack.enter_context(explained(self.device))
                try:
                    self._running = self._prepared() if own or self._copy is None else self._copy
                    self._copy = self._copy if own else self._running
                    yield
                finally:
                    self._running = None

    @property
    def kernel_layers(self) -> KernelLayers:
        """Returns the modules that kernels can replace in copies of the model."""
        self._kernel_layers = self._kernel_layers or KernelLayers(self.model)
        return self._kernel_layers

    def _prepared(self) -> PreTrainedModel:
        """Returns a copy of the model that can run forwards."""
        copied = shallow_copy(self.source)
        copied.eval()
        self._scales_queries = use_our_attention(copied)
        if self.length_rope is not None:
            self.length_rope.attach(copied)
        attach(copied, in_chunks=True)
        attach_indexers(copied)
        if self.device.type == "cuda":
            hooks = any(map(hooked, copied.modules()))
            self._by_kernels = not hooks and self.kernel_layers.complete(copied, few_rows=False)
            self.kernel_layers.attach(copied)
        use_few_row_linears(copied)
        return copied

    @torch.no_grad()
    def forward(
        self,
        tokens: list[int],
        cache: KVCache,
        last_only: bool = False,
        whole: bool = True,
        every_state: bool = False,
    ) -> Tensor:
        """Returns the logits of T new tokens, and stores their keys and values in the cache.

        Args:
            tokens: T ids.
            last_only: compute only the last token's logits (prefill).
            whole: check that every layer with attention has attended; False if some layers are skipped.
            every_state: compute the hidden states of all tokens in all layers. With ``last_only``, layers
                that share the keys and values of others otherwise leave out all but the last token (Gemma 4).

        Returns:
            ``[T, V]`` or ``[1, V]`` in the model's dtype, the same on every rank.

        Raises:
            RuntimeError: a layer bypassed our attention function, so the cache lacks its keys and values.
        """
        ids = id_tensor(tokens, self.device)[None]
        positions = cache.positions(len(tokens)).to(self.device)[None]
        kept: int | Tensor = 1 if last_only else 0
        if last_only and every_state and self._shares_kv:
            # With a number, the layers of transformers would leave out tokens; with indices they do not.
            kept = id_tensor([len(tokens) - 1], self.device)
        with running_forward(cache.attend, states=cache.recurrent, indexed=cache.indexed) as forward:
            out = self._call(ids, positions, kept)
            called = forward.called
        if whole and len(called) != len(self.calls):
            missing, count = len(self.calls) - len(called), len(self.calls)
            raise RuntimeError(
                f"{missing} of {count} layers of {self.name} did not attend "
                "through transformers' attention interface; load the model again if a forward was "
                "replaced, or undo that"
            )
        self._attended = called
        cache.advance(len(tokens))
        logits: Tensor = out.logits[0, -1:] if last_only else out.logits[0]
        return agreed_logits(self.model, logits.contiguous())

    def _call(self, ids: Tensor, positions: Tensor, kept: int | Tensor) -> Any:
        """Calls the running copy inside a running forward."""
        return self.running(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=kept,
            **{CACHE: PassThrough()},
            **({"triforce_positions": positions} if self._scales_queries else {}),
            **({"attention_mask": mask_of_slots(self.device)} if self.indexed else {}),
        )

    @torch.no_grad()
    def feed(self, tokens: list[int], cache: KVCache, every_state: bool = False) -> None:
        """Stores the keys and values of T new tokens in the cache.

        Args:
            every_state: see :meth:`forward`.
        """
        graphs = None if every_state else self._graphs()
        if graphs is None or not graphs.serves(len(tokens)):
            self.forward(tokens, cache, last_only=True, every_state=every_state)
        else:
            graphs.run(tokens, cache.positions(len(tokens)), cache.attend)
            cache.advance(len(tokens))

    @torch.no_grad()
    def capture_chunks(self) -> None:
        """Captures all graphs that :meth:`feed` may use, so that it captures none later."""
        with self.active():
            if (graphs := self._graphs()) is not None:
                graphs.prepare()

    def _graphs(self) -> ChunkGraphs | None:
        """Returns the graphs of chunks; None if graphs cannot hold their forwards.

        Hooks, layers without kernels, and whatever the host decides in a forward prevent it.
        """
        if not self._by_kernels or self.running is not self._copy:
            return None
        if self._chunk_graphs is None:
            special = self.indexed or self._shares_kv or self._scales_queries or self.states is not None
            alone = self.streamed is None and distributed.current() is None
            if special or not alone or self.length_rope is not None or self.learned_positions is not None:
                return None
            self._chunk_graphs = ChunkGraphs(self._run_chunk, self.device)
        return self._chunk_graphs

    def _run_chunk(self, ids: Tensor, positions: Tensor, attend: Attend) -> None:
        with running_forward(attend):
            self._call(ids, positions, 1)

    def _settle(self) -> None:
        """Runs the model's own forward once.

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
        recorder, problem, known = Recorder(self.device), None, bool(self.calls)
        cause: Exception | None = None
        try:
            with self.active(own=True):
                recorder.watch(self.running)
                columns = self.forward([1], recorder, whole=known).shape[-1]
                if columns != self.vocab_size:
                    raise ValueError(f"it computes {columns} logits for a vocabulary of {self.vocab_size}")
        except Exception as error:  # third-party code: any failure means unsupported
            if known:
                raise
            problem, cause = f"{type(error).__name__}: {error}", error
        self.states, self.layer_outputs = recorder.states.shapes, recorder.outputs
        attending = len(recorder.calls)
        if problem is None and self.states is not None and not attending:
            refuse_without_attention(self.name)
        if problem is None and not all(index in range(self.layers) for index in recorder.calls):
            problem = "an attention module serves several layers, and does not know which of them is running"
        if problem is None and self.states is None and attending != self.layers:
            problem = f"{attending} of its {self.layers} layers used transformers' attention interface"
        if problem:
            raise UnsupportedModelError(
                f"{self.name} cannot be decoded hierarchically: its attention does not pass through "
                f"transformers' attention interface with our cache ({problem})"
            ) from cause
        self.calls = {
            layer: LayerCall(self._attended[layer], *call) for layer, call in sorted(recorder.calls.items())
        }
        self.kv_shapes = [
            KVShape(call.heads, call.how.window, call.how.chunked) for call in self.calls.values()
        ]
        least = min((shape.window for shape in self.kv_shapes if shape.window is not None), default=1)
        if least < 1:
            raise UnsupportedModelError(
                f"{self.name} has a window of {least} tokens, in which a token does not see itself; set "
                "sliding_window (or attention_chunk_size) of its configuration to at least 1, or to None"
            )
        self.kv_layers: list[KVShape | None] = [None] * self.layers
        for index, shape in zip(self.calls, self.kv_shapes, strict=True):
            self.kv_layers[index] = shape
        if recorder.index_dims:
            self.kv_layers += [_index_shape(recorder.index_dims.get(layer)) for layer in range(self.layers)]
        modules = [call.module for call in self.calls.values()]
        self._shares_kv = any(getattr(module, "is_kv_shared_layer", False) for module in modules)
        self.has_softcap = any(call.how.softcap for call in self.calls.values())
        # Shape of the full-attention layers, if there are any: they take most memory and time.
        self.heads = min(self.kv_shapes, key=lambda shape: shape.window is not None).heads


def _index_shape(dim: int | None) -> KVShape | None:
    """Returns the KV slots for an indexer's keys of ``dim`` elements; None for a layer without an indexer."""
    return None if dim is None else KVShape(Heads(1, 1, dim - dim // 2, dim // 2), index=True)
