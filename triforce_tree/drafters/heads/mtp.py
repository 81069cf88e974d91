"""The network of multi-token prediction (MTP) layers that checkpoints hold beside the model's own layers.

Each is a decoder layer of the target's family over ``eh_proj`` of the normed embedding of a token and the
normed hidden state before it (DeepSeek-V3, arXiv 2412.19437). The state of the target is the one after its
final norm, embeddings and head are the target's, and what a layer passes on is its output after its own norm,
as in ``transformers.modeling_layers.MtpModel``.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_layers import MtpModel

from triforce_tree.drafters.base import UnusableDrafterError
from triforce_tree.drafters.heads.attention import Attended, attend
from triforce_tree.drafters.heads.published import MOST_ERROR
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.models.attention import keep_chunks
from triforce_tree.models.experts.few_row import capturable_experts
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.kernel_layers.modules import KernelLayers
from triforce_tree.models.model_copy import text_decoder
from triforce_tree.models.running_forward import ATTENTION, Attend, running_forward
from triforce_tree.runtime.capture_probe import why_not_capturable
from triforce_tree.runtime.executor import free_memory

_CHECKED = 8  # tokens
_LOG = logging.getLogger(__name__)


class MtpNetwork:
    """MTP layers beside a target, see ``PairNetwork`` in ``heads/pairs.py``.

    The layers' own modules compute; their attention calls ours. Queries and keys are rotated by the positions
    in the text, as the layers were trained.

    Args:
        model: the layers, on the target's device and in its dtype. Its embeddings, head and rotary embedding
            are replaced by the target's.
        target: the target.
        source: where the layers come from, for messages.

    Attributes:
        model: the layers.

    Raises:
        UnusableDrafterError: the layers compute in a way that is not supported, or their outputs differ from
            those of transformers' own forward.
    """

    stacked = False
    rotates = True

    def __init__(self, model: MtpModel, target: HFModel, source: str) -> None:
        # Typed as any module, whose attributes are modules or tensors.
        self.model: Any = model
        self._source, config = source, target.model.config
        self.model.embed_tokens = target.source.get_input_embeddings()
        self.model.shared_head = target.source.get_output_embeddings()
        decoder: Any = text_decoder(target.source)
        self.model.rotary_emb = decoder.rotary_emb
        self.inputs: tuple[int, ...] = (target.layers,)
        self.layers: int = len(model.layers)
        self.size: int = config.get_text_config(decoder=True).hidden_size
        self.dtype = target.dtype
        own = [*model.layers.parameters(), *model.layers.buffers()]
        self.weight_bytes = sum(tensor.nbytes for tensor in own)
        keep_chunks(model)
        reference = self._reference(target)
        model.config._attn_implementation_internal = ATTENTION
        experts = model.config._experts_implementation
        model.config._experts_implementation = capturable_experts(experts, target.dtype, target.device)
        KernelLayers(self.model).attach(self.model)
        self._measure(target.device)
        self._compare(reference, target)
        self.capturable = self._captures(target)

    def angles(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        raise AssertionError("the layers rotate queries and keys themselves")

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        (state,) = states
        return state.to(self.dtype)

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attended: Attended, outputs: int
    ) -> tuple[Tensor, Tensor]:
        """See ``PairNetwork.forward``."""
        own: Any = self.model.layers[layer]
        embedded = self.model.embed_tokens(tokens).to(self.dtype)
        x = own.eh_proj(torch.cat([own.enorm(embedded), own.hnorm(hidden)], -1))
        pairs = x.shape[1]

        def last(_: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            out = attended(q, k, v, params.scale).transpose(1, 2)
            return F.pad(out, (0, 0, 0, 0, pairs - outputs, 0))

        out = self._attention(layer, x, positions, last)
        if not outputs:
            return x[:, :0], x[:, :0]
        kept, block = slice(pairs - outputs, None), own.mtp_block
        x = x[:, kept] + out[:, kept]
        inner = block.mlp(block.post_attention_layernorm(x))
        # Some families return the router's logits too.
        x = own.post_norm(x + (inner[0] if isinstance(inner, tuple) else inner))
        return x, x

    def logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self.model.shared_head(normed)
        return logits

    def _attention(self, layer: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the output ``[B, T, H]`` of a layer's attention for its input ``[B, T, H]``."""
        model, block = self.model, self.model.layers[layer].mtp_block
        kinds = {"layer_type": model.config.layer_types[layer]} if model.has_per_layer_rope else {}
        rotary = model.rotary_emb(x, position_ids=positions, **kinds)
        with running_forward(attend):
            out: Tensor = block.self_attn(
                hidden_states=block.input_layernorm(x), position_embeddings=rotary, attention_mask=None,
                position_ids=positions,
            )[0]  # fmt: skip
        return out

    @torch.no_grad()
    def _measure(self, device: torch.device) -> None:
        """Sets the sizes of keys and values, and the windows, by the calls of the layers' attention."""
        seen: list[tuple[tuple[int, int, int], AttentionParams]] = []

        def note(_: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            seen.append(((k.shape[1], k.shape[3], v.shape[3]), params))
            return v.new_zeros(*q.shape[:1], q.shape[2], q.shape[1], v.shape[3])

        x = torch.zeros(1, 1, self.size, device=device, dtype=self.dtype)
        zero = torch.zeros(1, 1, device=device, dtype=torch.int64)
        for layer in range(self.layers):
            self._attention(layer, x, zero, note)
        sizes, params = zip(*seen, strict=True)
        if len(seen) != self.layers or len({*sizes}) > 1:
            raise UnusableDrafterError(
                f"the MTP layers of {self._source} have keys and values of different sizes "
                f"{sorted({*sizes})}, which is not supported; use drafter='lookup'"
            )
        if any(p.softcap is not None or p.sinks is not None or p.chunked for p in params):
            raise UnusableDrafterError(
                f"the MTP layers of {self._source} attend with capped scores, sinks or chunks, which is not "
                "supported; use drafter='lookup'"
            )
        self.kv_heads, self.key_size, self.value_size = sizes[0]
        self.windows: tuple[int | None, ...] = tuple(p.window for p in params)

    def _inputs(self, target: HFModel) -> tuple[Tensor, Tensor, Tensor]:
        """Returns made-up tokens ``[1, T]``, states ``[1, T, H]`` and positions ``[1, T]``."""
        random = torch.Generator().manual_seed(0)
        states = torch.randn(1, _CHECKED, self.size, generator=random, dtype=torch.float32, device="cpu")
        tokens = torch.randint(target.vocab_size, (1, _CHECKED), generator=random, device="cpu")
        positions = torch.arange(1, _CHECKED + 1, device=target.device)[None]
        return tokens.to(target.device), states.to(target.device, self.dtype), positions

    @torch.no_grad()
    def _reference(self, target: HFModel) -> list[Tensor]:
        """Returns the outputs of each layer by transformers' own forward."""
        tokens, hidden, positions = self._inputs(target)
        outputs = []
        self.model.config._attn_implementation_internal = "eager"
        for layer in range(self.layers):
            hidden = self.model.forward_layer(layer, hidden, positions, None, input_ids=tokens)
            outputs.append(hidden)
        return outputs

    @torch.no_grad()
    def _compare(self, reference: list[Tensor], target: HFModel) -> None:
        """Compares the outputs of each layer for made-up inputs with transformers' own.

        Raises:
            UnusableDrafterError: they differ by more than rounding.
        """
        tokens, hidden, positions = self._inputs(target)
        for layer, expected in enumerate(reference):
            hidden = self._causal(layer, tokens, hidden, positions)
            errors = (hidden - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
            # A token whose experts are nearly tied may be routed to others.
            if not float(errors.median()) <= MOST_ERROR[self.dtype]:
                raise UnusableDrafterError(
                    f"MTP layer {layer} of {self._source} computes outputs that differ from those of "
                    f"transformers' own forward by {float(errors.median()):.1%}; use drafter='lookup', and "
                    "please report this with the checkpoint's config.json"
                )
            hidden = expected

    @torch.no_grad()
    def _captures(self, target: HFModel) -> bool:
        """Returns whether a CUDA graph can hold forwards of the layers. Logs the reason if it cannot."""
        tokens, hidden, positions = self._inputs(target)

        def run(tokens: Tensor) -> Tensor:
            out = hidden
            for layer in range(self.layers):
                out = self._causal(layer, tokens, out, positions)
            return out

        if reason := why_not_capturable(run, tokens, tokens.flip(1)):
            _LOG.warning("the MTP layers of %s run without CUDA graphs: %s", self._source, reason)
        free_memory()
        return reason is None

    def _causal(self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Returns the outputs of a layer for a text of its own, without a cache."""
        distance, window = positions.mT - positions, self.windows[layer]
        mask = (distance >= 0) & (distance < (window or _CHECKED + 1))

        def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return attend(q, k, v, mask[None], scale)

        return self.forward(layer, tokens, hidden, positions, attended, tokens.shape[1])[0]
