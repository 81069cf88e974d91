"""A plain forward of a block drafter in fp32 on the CPU, and the comparison of a loaded network with it."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from triforce_tree.drafters.blocks.format import BlockFormat
from triforce_tree.drafters.blocks.network import BlockNetwork, near
from triforce_tree.drafters.heads.attention import rotated_one
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.heads.published import check_equal

# Positions before the block that is compared.
_BEFORE = 5


class Reference:
    """Computes one block without cache.

    Args:
        weights: tensors by their names in ``BlockNetwork``.
        format: the configuration.
    """

    def __init__(self, weights: HeadWeights, format: BlockFormat) -> None:
        self._weights, self._format = weights, format

    def _weight(self, name: str) -> Tensor:
        return self._weights.tensors[name].float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weight(f"{name}.weight"), self._format.layers.rms_norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._weight(f"{name}.bias") if f"{name}.bias" in self._weights else None
        return F.linear(x, self._weight(f"{name}.weight"), bias)

    def hidden(self, embedded: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Returns what the language model head reads for each slot, fp32 ``[T, H]``.

        Args:
            embedded: fp32 ``[T, H]``, embeddings of the slots.
            states: fp32 ``[C, size]`` each, the target's hidden states at positions 0 to C - 1.
        """
        format, slots = self._format, len(embedded)
        context = self._norm(self._linear(torch.cat(list(states), -1), "fc"), "hidden_norm")
        positions = torch.arange(len(context) + slots, device="cpu")
        with torch.device("cpu"):
            angles = LlamaRotaryEmbedding(format.layers)(context, positions[None])
        query, key = positions[-slots:, None], positions
        hidden = embedded
        for i, (causal, window) in enumerate(zip(format.causal, format.windows, strict=True)):
            mask = (key <= query) if causal else torch.ones(slots, len(key), dtype=torch.bool, device="cpu")
            if window is not None:
                distance = len(context) - key if format.anchored else (query - key).abs()
                mask = mask & (distance < window)
            own = f"layers.{i}."
            x = self._norm(hidden, f"{own}input_layernorm")
            x, after = self._convolved(x, f"{own}attention_conv")
            hidden = hidden + after(self._attention(x, context, angles, mask, f"{own}self_attn."))
            x = self._norm(hidden, f"{own}post_attention_layernorm")
            x, after = self._convolved(x, f"{own}mlp_conv")
            gated = F.silu(self._linear(x, f"{own}mlp.gate_proj")) * self._linear(x, f"{own}mlp.up_proj")
            hidden = hidden + after(self._linear(gated, f"{own}mlp.down_proj"))
        return self._norm(hidden, "norm")

    def _attention(
        self, x: Tensor, context: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, own: str
    ) -> Tensor:
        # All positions are projected to queries too, for the sake of one call; only those of slots are used.
        both = torch.cat([context, x])
        size = self._format.layers.head_dim
        q, k, v = (self._linear(both, f"{own}{n}_proj").view(1, len(both), -1, size) for n in "qkv")
        q, k = self._norm(q, f"{own}q_norm"), self._norm(k, f"{own}k_norm")
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *angles)
        out = F.scaled_dot_product_attention(q[:, :, -len(x) :], k, v, mask, enable_gqa=True)
        return self._linear(out.transpose(1, 2).flatten(2)[0], f"{own}o_proj")

    def _convolved(self, x: Tensor, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Returns the convolution of ``x`` before a part of a layer, and the function to apply after it."""
        if self._format.convolution is None:
            return x, lambda y: y
        taps, group = self._format.convolution
        dynamic = self._linear(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1)
        base = self._weight(f"{name}.base_kernel")

        def convolve(side: int, y: Tensor) -> Tensor:
            out = torch.zeros_like(y)
            for t in range(len(y)):
                for i in range(min(taps, t + 1)):
                    out[t] += (base[side, i] + dynamic[t, side, i].repeat_interleave(group)) * y[t - i]
            return out

        return convolve(0, x), lambda y: convolve(1, y)

    def corrected(self, logits: Tensor, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """Returns the logits of the tokens after each of a path of tokens, fp32 ``[D, V]``; -inf for tokens
        that are never drawn.

        Args:
            logits, hidden: fp32 ``[D, V]`` and ``[D, H]``, those of the slots, from the first that predicts.
            tokens: the D tokens, the first of which is the root.
        """
        format, rows = self._format, []
        state = torch.zeros(0 if format.markov is None else format.markov[1], device="cpu")
        for depth, token in enumerate(tokens):
            slot = hidden[depth]
            if format.selector is not None:
                best, ids = logits[depth].topk(min(format.selector[1], logits.shape[1]))
                best = best * format.logit_scale
                best = format.softcap * torch.tanh(best / format.softcap) if format.softcap else best
                after = self._weight("candidate_selector.successor_codebook")[ids]
                gate = self._linear(slot, "candidate_selector.hidden_projection")
                before = self._weight("candidate_selector.predecessor_codebook")[token] * gate
                rows.append(torch.full_like(logits[depth], -torch.inf).scatter(0, ids, best + after @ before))
                continue
            embedded = self._weight("markov_head.markov_w1.weight")[token]
            kind = "vanilla" if format.markov is None else format.markov[0]
            if kind == "gated":
                gate = self._linear(torch.cat([slot, embedded]), "markov_head.gate_proj")
                embedded = embedded * gate.sigmoid()
            elif kind == "rnn":
                joint = self._linear(torch.cat([state, embedded, slot]), "markov_head.joint_proj")
                gate, new, out = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                embedded = out.tanh()
            rows.append(logits[depth] + self._linear(embedded, "markov_head.markov_w2"))
        return torch.stack(rows)


@torch.no_grad()
def check_network(
    network: BlockNetwork,
    weights: HeadWeights,
    embedded: Tensor,
    head: Callable[[Tensor], Tensor],
    size: int,
) -> None:
    """Compares a block after random hidden states with the reference.

    Args:
        network: the loaded network.
        weights: the tensors that it was loaded from.
        embedded: ``[1, T, H]``, embeddings of the slots.
        head: the language model head.
        size: hidden size of the target.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    format, device, dtype = network.format, embedded.device, network.fc.weight.dtype
    random = torch.Generator().manual_seed(0)
    states = list(
        torch.randn(len(format.inputs), 1, _BEFORE, size, generator=random, dtype=torch.float32, device="cpu")
    )
    fused = network.fuse([state.to(device) for state in states])
    positions = torch.arange(_BEFORE + format.block, device=device)[None]
    before, own = positions[:, :_BEFORE], positions[:, _BEFORE:]
    keys_before, values_before = network.context(fused)
    keys_before = rotated_one(keys_before, *network.angles(before))

    def seen(i: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = near(format, i, own, positions)
        return torch.cat([keys_before[i], keys], 2), torch.cat([values_before[i], values], 2), mask

    hidden = network(embedded.to(dtype), own, seen)
    reference = Reference(weights, format)
    plain = reference.hidden(embedded[0].float().cpu(), [state[0] for state in states])
    source = f"the drafter in {str(weights.folder)!r} computes"
    check_equal(f"{source} hidden states", hidden[0].float().cpu(), plain, dtype)
    if network.parent_head is None:
        return
    # The first two tokens of a path.
    hidden = hidden[:, format.first_slot :][:, :2]
    tokens, logits = torch.tensor([[1, 0]], device=device), head(hidden)
    rows, handed = [], network.first_states(1)
    for depth in range(hidden.shape[1]):
        row, handed = network.parent_head(
            logits[:, depth], hidden[:, depth], tokens[:, depth : depth + 1], handed
        )
        rows.append(row[0, 0].float().cpu())
    chosen = tokens[0, : len(rows)].tolist()
    plain = reference.corrected(logits[0].float().cpu(), hidden[0].float().cpu(), chosen)
    drawn = plain > -torch.inf
    check_equal(f"{source} logits", torch.stack(rows)[drawn], plain[drawn], dtype)
