"""The network of an EAGLE-3 head: fusion of hidden states, decoder layers, and a language model head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from triforce_tree.drafters.heads.attention import Attended, RmsNorm, attend, rotated, silu_gated
from triforce_tree.drafters.heads.eagle_format import EagleFormat
from triforce_tree.drafters.heads.eagle_reference import reference_logits
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.heads.published import check_equal
from triforce_tree.drafters.token_map import ABSENT, TargetLogits
from triforce_tree.models.hf_model import HFModel


class EagleLayer:
    """The network of an EAGLE-3 head (github.com/SafeAILab/EAGLE, ``cnets.py``).

    Args:
        weights: tensors by their names in the layout of SafeAILab/EAGLE.
        format: the configuration.
        inputs: the hidden states of the target that are fused, see ``PairNetwork``.
        target: has the embeddings and the language model head that are used if ``weights`` has none.

    Attributes:
        The attributes are those of ``PairNetwork`` in ``heads/pairs.py``. Only P-EAGLE heads have several
            layers.
        masked: ``[1, 1, H]``, the fused hidden state of pairs whose tokens are not known; None for heads that
            draft one depth after the other.

    Raises:
        ValueError: weights are missing, have other shapes, or would not be used.
    """

    stacked = True
    rotates = False
    capturable = True

    def __init__(
        self, weights: HeadWeights, format: EagleFormat, inputs: tuple[int, ...], target: HFModel
    ) -> None:
        self.format, llama, folder = format, format.layer, weights.folder
        self.inputs, self.dtype, features, device = inputs, target.dtype, len(inputs), target.device
        size = target.model.config.get_text_config(decoder=True).hidden_size
        if any("kv_a_proj" in name for name in weights):
            raise ValueError(
                f"the layer of the head in {str(folder)!r} has multi-head latent attention (MLA), which is "
                "not supported; give a head with a layer of Llama or Qwen"
            )
        if format.target_size not in (None, size):
            raise ValueError(
                f"the head in {str(folder)!r} was trained for a target of hidden size {format.target_size}, "
                f"and this one has {size}"
            )
        held: dict[str, int] = {}

        def get(name: str, *shape: int) -> Tensor:
            weight = weights.take(name, *shape).to(device, target.dtype)
            held[name] = weight.nbytes
            return weight

        self.layers = format.layers
        self.windows: tuple[int | None, ...] = (None,) * format.layers
        own = self.size = int(llama.hidden_size)
        self.heads: int = llama.num_attention_heads
        self.kv_heads: int = llama.num_key_value_heads
        # Qwen2's configuration has none.
        self.head_dim: int = getattr(llama, "head_dim", None) or own // self.heads
        self.key_size = self.value_size = self.head_dim
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads in {str(folder)!r} are no multiple of {self.kv_heads} KV heads"
            )
        self.scale: float = self.head_dim**-0.5

        def norm(name: str, width: int = own) -> RmsNorm:
            made = RmsNorm(width, llama.rms_norm_eps)
            made.weight = nn.Parameter(get(name, width), requires_grad=False)
            return made

        self.fc = get("fc.weight", own, features * size)
        self._fused_norm = norm("input_norm.weight", features * size) if format.norm_before_fc else None
        self._feature_norms: list[RmsNorm] = []
        if format.fc_norm:
            self._feature_norms = [norm(f"fc_norm.{i}.weight", size) for i in range(features)]
        self._layers = [
            _Layer(name, own if n else 2 * own, self.head_dim, weights, get, norm, llama)
            for n, name in enumerate(["midlayer.", *(f"layers.{n}." for n in range(1, format.layers))])
        ]
        self.hidden_norm, self.norm = norm("midlayer.hidden_norm.weight"), norm("norm.weight")
        self._embeddings: Any = target.source.get_input_embeddings()
        if "embed_tokens.weight" in weights or own != size:
            table = get("embed_tokens.weight", target.vocab_size, own)
            self._embeddings = lambda ids: F.embedding(ids, table)
        shared = target.source.get_output_embeddings()
        self._head: Any = shared
        self._drafted: TargetLogits | None = None
        if "lm_head.weight" in weights or own != size:
            drafted = -1 if "d2t" in weights else target.vocab_size
            head = get("lm_head.weight", drafted, own)
            self._head = lambda x: F.linear(x, head)
            if drafted < 0:
                self._drafted = weights.vocabulary(len(head), target.vocab_size, device)
        self.masked: Tensor | None = None
        if format.mask_token is not None:
            if format.mask_token >= target.vocab_size:
                raise ValueError(
                    f"the mask token {format.mask_token} of the head in {str(folder)!r} is not in the "
                    f"target's vocabulary of {target.vocab_size}; give a head that was trained for it"
                )
            # Writers differ in the number of dimensions.
            ones = weights.tensors["mask_hidden"].ndim - 1 if "mask_hidden" in weights else 1
            state = weights.take("mask_hidden", *[1] * ones, features * size).to(device, target.dtype)
            self.masked = self.fuse(state.view(1, 1, -1).split(size, -1))
        weights.refuse_unused(("t2d",))
        self.weight_bytes = sum(held.values()) + (0 if self._drafted is None else self._drafted.nbytes)
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(llama)
        self._rotary = rotary.to(device)
        tokens = torch.arange(3, device=device)[None] % target.vocab_size
        self._check(weights, tokens, size, self._head is shared)

    @torch.no_grad()
    def _check(self, weights: HeadWeights, tokens: Tensor, size: int, shared: bool) -> None:
        """Compares one forward of ``tokens`` and random hidden states with the plain reference.

        Args:
            shared: whether the target's language model head is used.

        Raises:
            RuntimeError: they differ by more than rounding.
        """
        pairs, device = tokens.shape[1], tokens.device
        random = torch.Generator().manual_seed(0)
        shape = (len(self.inputs), 1, pairs, size)
        states = list(torch.randn(shape, generator=random, dtype=torch.float32, device="cpu"))
        if self.format.mask_token is not None:
            tokens[:, -1] = self.format.mask_token
            for state, part in zip(states, weights.tensors["mask_hidden"].flatten().split(size), strict=True):
                state[:, -1] = part.float()
        embedded = self._embeddings(tokens)[0].float().cpu()
        fused = self.fuse([state.to(device) for state in states])
        if self.masked is not None:
            fused[:, -1:] = self.masked
        cos, sin = (angle.expand(1, -1, -1) for angle in self.angles(pairs, device))
        mask = torch.ones(1, pairs, pairs, dtype=torch.bool, device=device).tril()

        def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return attend(*rotated(q, k, cos, sin), v, mask, scale)

        hidden = normed = fused
        for layer in range(self.layers):
            hidden, normed = self.forward(layer, tokens, hidden, tokens, attended, pairs)
        ours = self.logits(normed)[0, -1].float().cpu()
        # Its matrix may be in blocks of a GGUF file, which have another dtype.
        head = (lambda state: self._head(state.to(device, self.dtype))) if shared else None
        plain = reference_logits(weights, self.format, embedded, [state[0] for state in states], head)
        if self._drafted is not None:
            plain = self._drafted(plain.to(device)).cpu()
            kept = plain > ABSENT
            ours, plain = ours[kept], plain[kept]
        check_equal(f"the head in {str(weights.folder)!r} computes logits", ours, plain, self.dtype)

    def angles(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines, fp32 ``[count, head_dim]``, of positions 0 to ``count - 1``."""
        positions = torch.arange(count, device=device)[None]
        cos, sin = self._rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
        return cos[0], sin[0]

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Projects the target's hidden states, each ``[B, T, hidden_size]``, to one ``[B, T, H]``."""
        states = [state.to(self.fc.dtype) for state in states]
        if self._feature_norms:
            states = [norm(state) for norm, state in zip(self._feature_norms, states, strict=True)]
        joined = torch.cat(list(states), -1)
        return F.linear(joined if self._fused_norm is None else self._fused_norm(joined), self.fc)

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attended: Attended, outputs: int
    ) -> tuple[Tensor, Tensor]:
        """See ``PairNetwork.forward``; layer 0 reads embeddings beside the hidden states."""
        own = self._layers[layer]
        x = own.input_norm(hidden if layer else self._embeddings(tokens).to(hidden.dtype))
        if not layer:
            x = torch.cat([x, self.hidden_norm(hidden)], -1)
        out = attended(*own.project(x), self.scale)
        hidden = hidden[:, hidden.shape[1] - outputs :]
        return self.finish(hidden, out, layer) if outputs else (hidden, hidden)

    def finish(self, hidden: Tensor, attended: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the hidden state for the next layer or depth and what ``logits`` reads, ``[B, T, H]`` each.

        Args:
            hidden: ``[B, T, H]``, the input of the layer.
            attended: ``[B, H_q, T, D]``, the output of its attention.
        """
        residual = self.hidden_norm(hidden) if self.format.norm_before_residual and not layer else hidden
        hidden, normed = self.norm.added(*self._layers[layer].finish(residual, attended))
        # No state is fed back by a P-EAGLE head.
        return normed if self.format.norm_output and self.masked is None else hidden, normed

    def logits(self, normed: Tensor) -> Tensor:
        """Returns logits ``[B, T, V]`` over the target's vocabulary."""
        logits: Tensor = self._head(normed)
        return logits if self._drafted is None else self._drafted(logits)


class _Layer:
    """The weights of a decoder layer, but for the norms that only the first one has.

    Args:
        name: what the names of its tensors begin with.
        width: the size of what queries, keys and values are computed from.
        dim: the size of a head.
        weights, get, norm: all tensors; and functions that take a tensor and a norm of them.
        config: the configuration of the layer.
    """

    def __init__(
        self,
        name: str,
        width: int,
        dim: int,
        weights: HeadWeights,
        get: Callable[..., Tensor],
        norm: Callable[..., RmsNorm],
        config: Any,
    ) -> None:
        own, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self._widths = rows = [heads * dim, *[kv_heads * dim] * 2]
        self._dim = dim
        parts = [f"{name}self_attn.{part}_proj" for part in "qkv"]
        self._qkv = torch.cat([get(f"{p}.weight", n, width) for p, n in zip(parts, rows, strict=True)])
        self._bias = None
        if f"{parts[0]}.bias" in weights:
            self._bias = torch.cat([get(f"{p}.bias", n) for p, n in zip(parts, rows, strict=True)])
        self._query_norm: RmsNorm | None = None
        self._key_norm: RmsNorm | None = None
        if config.model_type == "qwen3" or f"{name}self_attn.q_norm.weight" in weights:
            self._query_norm = norm(f"{name}self_attn.q_norm.weight", dim)
            self._key_norm = norm(f"{name}self_attn.k_norm.weight", dim)
        output = f"{name}self_attn.o_proj"
        self._out = get(f"{output}.weight", own, rows[0])
        self._out_bias = get(f"{output}.bias", own) if f"{output}.bias" in weights else None
        self._gate_up = torch.cat([get(f"{name}mlp.{part}_proj.weight", -1, own) for part in ("gate", "up")])
        self._down = get(f"{name}mlp.down_proj.weight", own, len(self._gate_up) // 2)
        self.input_norm = norm(f"{name}input_layernorm.weight")
        self._mlp_norm = norm(f"{name}post_attention_layernorm.weight")

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries ``[B, H_q, T, D]``, keys and values ``[B, H_kv, T, D]``, before rotation."""
        both = F.linear(x, self._qkv, self._bias)
        q, k, v = (
            part.unflatten(-1, (-1, self._dim)).transpose(1, 2) for part in both.split(self._widths, -1)
        )
        if self._query_norm is not None and self._key_norm is not None:
            q, k = self._query_norm(q), self._key_norm(k)
        return q, k, v

    def finish(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output of the MLP and the residual stream that it is added to, ``[B, T, H]`` each."""
        out = F.linear(attended.transpose(1, 2).flatten(2), self._out, self._out_bias)
        hidden, normed = self._mlp_norm.added(out, residual)
        gate, up = F.linear(normed, self._gate_up).chunk(2, -1)
        return F.linear(silu_gated(gate, up), self._down), hidden
