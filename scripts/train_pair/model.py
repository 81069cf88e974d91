"""A Llama whose parameters carry Hugging Face's names, written for training speed.

Tokens are kept flat: activations are [T, hidden] with T = batch x length. Everything but attention
is compiled once for pieces of ``CHUNK`` tokens, so one compilation serves every context length.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CHUNK = 65536  # tokens per compiled call


@dataclass(frozen=True)
class Shape:
    """Sizes of one model of the pair."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    theta: float
    positions: int

    def hf_config(self, end: int) -> dict:
        """The ``config.json`` of this shape; ``end`` is the id of the end-of-text token."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocabulary,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": "bfloat16",
        }

    def to_dict(self) -> dict:
        return asdict(self)


TARGET = Shape(
    hidden=384, layers=6, heads=3, head_dim=128, mlp=1152, vocabulary=4096, theta=5e6, positions=131072
)
DRAFT = Shape(
    hidden=256, layers=2, heads=4, head_dim=64, mlp=512, vocabulary=4096, theta=1e4, positions=131072
)


@lru_cache(maxsize=8)
def rotation(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary embedding, each [length, head_dim] fp32, halves repeated."""
    step = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float64), theta**-step)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [..., head_dim]; cos and sin broadcast to it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


class Block(nn.Module):
    """One decoder layer; ``before`` and ``after`` are what surrounds attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner = shape.hidden, shape.heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, inner, bias=False),
                "k_proj": nn.Linear(hidden, inner, bias=False),
                "v_proj": nn.Linear(hidden, inner, bias=False),
                "o_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, shape.mlp, bias=False),
                "up_proj": nn.Linear(hidden, shape.mlp, bias=False),
                "down_proj": nn.Linear(shape.mlp, hidden, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden)

    @property
    def before_weights(self) -> tuple[Tensor, ...]:
        """Norm and projections to q, k and v."""
        attn = self.self_attn
        return self.input_layernorm.weight, attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight

    @property
    def after_weights(self) -> tuple[Tensor, ...]:
        """Projection of what was attended to, norm, and the MLP's gate, up and down."""
        norm, mlp = self.post_attention_layernorm, self.mlp
        return (
            self.self_attn.o_proj.weight,
            norm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
        )


def before(
    x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, hidden], cos and sin [T, head_dim] -> q, k, v, each [T, heads, head_dim]."""
    y = rms_norm(x, norm)
    q, k, v = (linear(y, w).unflatten(-1, (-1, head_dim)) for w in (wq, wk, wv))
    cos, sin = cos[:, None], sin[:, None]
    return rotate(q, cos, sin).to(x.dtype), rotate(k, cos, sin).to(x.dtype), v


def after(
    x: Tensor, mixed: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """x [T, hidden], mixed [T, heads * head_dim] -> the layer's output [T, hidden]."""
    x = x + linear(mixed, wo)
    y = rms_norm(x, norm)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


def nll(x: Tensor, norm: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood [T] fp32 of ``labels`` [T] given last hidden states [T, hidden]."""
    return F.cross_entropy(linear(rms_norm(x, norm), embedding).float(), labels, reduction="none")


class Llama(nn.Module):
    """Parameters plus the flat forward; the pieces around attention may be compiled."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.model.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.model.norm = nn.RMSNorm(shape.hidden)
        self.use_plain_pieces()
        self.backend = SDPBackend.MATH
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.layers) ** 0.5 if last else 1))

    @property
    def head(self) -> tuple[Tensor, Tensor]:
        """The final norm, and the embedding, which is the output matrix as well."""
        return self.model.norm.weight, self.model.embed_tokens.weight

    def use_plain_pieces(self) -> None:
        """Eager functions: for lengths that vary."""
        self.before: Callable = before
        self.after: Callable = after
        self.nll: Callable = nll

    def compile_pieces(self) -> None:
        """Compiles for fixed shapes; pieces of other lengths fall back to another compilation."""
        self.before = torch.compile(before, dynamic=False)
        self.after = torch.compile(after, dynamic=False)
        self.nll = torch.compile(nll, dynamic=False)

    def hidden_states(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens [B, L] -> last hidden states before the final norm, [B * L, hidden]."""
        batch, length = tokens.shape
        cos, sin = (
            t.repeat(batch, 1) for t in rotation(length, self.shape.head_dim, self.shape.theta, tokens.device)
        )
        pieces = list(range(0, batch * length, CHUNK))
        x = F.embedding(tokens.flatten(), self.model.embed_tokens.weight).to(dtype)
        for block in self.model.layers:
            weights = block.before_weights
            parts = [
                self.before(
                    x[i : i + CHUNK], *weights, cos[i : i + CHUNK], sin[i : i + CHUNK], block.head_dim
                )
                for i in pieces
            ]
            q, k, v = (
                _join([p[j] for p in parts]).unflatten(0, (batch, length)).transpose(1, 2) for j in range(3)
            )
            with sdpa_kernel(self.backend):
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(batch * length, -1)
            weights = block.after_weights
            x = _join([self.after(x[i : i + CHUNK], mixed[i : i + CHUNK], *weights) for i in pieces])
        return x

    def losses(self, tokens: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Negative log-likelihood [B, L] of ``labels`` [B, L]."""
        x = self.hidden_states(tokens, dtype)
        flat = labels.flatten()
        parts = [
            self.nll(x[i : i + CHUNK], *self.head, flat[i : i + CHUNK]) for i in range(0, len(flat), CHUNK)
        ]
        return _join(parts).view_as(labels)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [T, vocabulary] of last hidden states [T, hidden]."""
        norm, embedding = self.head
        return linear(rms_norm(x, norm), embedding)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
