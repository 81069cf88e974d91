"""The networks of EAGLE-3.1 and P-EAGLE heads as they are trained.

See arXiv 2503.01840, 2605.09992 and 2602.01469. They compute the same as
``triforce_tree/drafters/heads/eagle_layer.py``, which joins weights and keeps no gradients.
"""

from typing import Any

import torch
from torch import Tensor, nn

from scripts.train_drafters.segments import Cache
from scripts.train_drafters.teacher import Teacher
from scripts.train_drafters.unrolled import UnrolledLayer

_THETA = 10_000.0


class EagleNetwork(UnrolledLayer):
    """A layer over pairs of a fused hidden state of the target and the token after it.

    Args:
        own_head: a language model head of its own, which begins as the target's.
        teacher, depths, mlp, cache: as for :class:`UnrolledLayer`.
    """

    def __init__(self, teacher: Teacher, depths: int, mlp: int, own_head: bool, cache: Cache) -> None:
        size, layers = teacher.size, teacher.layers
        numbers = [max(1, layers // 3), max(1, 2 * layers // 3), layers]
        features = tuple(number - 1 for number in numbers)
        super().__init__(teacher, depths, cache, features, 2 * size, mlp, _THETA, within_cache=True)
        self._numbers = numbers
        self.fc_norm = nn.ModuleList(self.rms_norm() for _ in features)
        self.fc = self.linear(size, len(features) * size)
        self.hidden_norm = self.rms_norm()
        self.lm_head = self.linear(*teacher.head.shape) if own_head else None
        with torch.no_grad():
            # It begins with what the target's language model head reads for the token before.
            self.fc.weight[:, -size:] += torch.eye(size)
            self.fc_norm[-1].weight.copy_(teacher.last_norm)
            if self.lm_head is not None:
                self.lm_head.weight.copy_(teacher.head)
        self.to(teacher.head.device)

    @property
    def head(self) -> Tensor:
        return super().head if self.lm_head is None else self.lm_head.weight

    def fused(self, states: list[Tensor]) -> Tensor:
        normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        made: Tensor = self.fc(torch.cat(normed, -1))
        return made

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.cat([self.input_norm(embedded), self.hidden_norm(hidden)], -1)

    def config(self) -> dict[str, Any]:
        """Returns ``config.json`` of the published layout."""
        (vocabulary, size), teacher = self.head.shape, self._teacher[0]
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
            "intermediate_size": self._mlp, "num_attention_heads": teacher.heads,
            "num_key_value_heads": teacher.kv_heads, "head_dim": teacher.head_dim, "num_hidden_layers": 1,
            "vocab_size": vocabulary, "draft_vocab_size": vocabulary, "rms_norm_eps": teacher.eps,
            "hidden_act": "silu", "rope_theta": _THETA, "max_position_embeddings": 2048,
            "tie_word_embeddings": False, "fc_norm": True, "norm_output": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self._numbers},
        }  # fmt: skip

    def published(self) -> dict[str, Tensor]:
        """Returns the tensors by their published names."""
        found = self.tensors("midlayer.") | {
            "fc.weight": self.fc.weight, "norm.weight": self.norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
        }  # fmt: skip
        found |= {f"fc_norm.{i}.weight": norm.weight for i, norm in enumerate(self.fc_norm)}
        return found if self.lm_head is None else found | {"lm_head.weight": self.lm_head.weight}


class ParallelEagleNetwork(EagleNetwork):
    """A layer that drafts all depths in one forward, from pairs of a mask token and a learnt state.

    The arguments are those of :class:`EagleNetwork`.
    """

    _MASK_TOKEN = 0

    def __init__(self, teacher: Teacher, depths: int, mlp: int, own_head: bool, cache: Cache) -> None:
        super().__init__(teacher, depths, mlp, own_head, cache)
        width = len(self.features) * teacher.size
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(1, width, device=teacher.head.device))

    def pairs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        state = self.fused([*self.mask_hidden.chunk(len(self.features), -1)])
        return torch.full_like(tokens, self._MASK_TOKEN), state.expand_as(hidden)

    def config(self) -> dict[str, Any]:
        masks = {"ptd_token_id": self._MASK_TOKEN, "para_num": self.depths, "norm_output": False}
        return super().config() | masks

    def published(self) -> dict[str, Tensor]:
        return super().published() | {"mask_hidden": self.mask_hidden}
