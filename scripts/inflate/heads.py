"""Places the attention heads of a small Llama in an inflated one.

Under grouped-query attention each small KV head gets KV heads of its own. The query heads of such a group
that have no small head are copies of one that has, without effect on the output: a retrieval cache
selects chunks by the whole group, and random queries would disturb the selection. So 9 query heads over 3 KV
heads go into the first 12 of 32 over the first 3 of 8. The heads after them are these again, without effect.

Heads of h dimensions become heads of m h. The rotary frequency i of h / 2 is θ^(-2i/h), and of the large
head's m h / 2 frequencies number m i is the same: dimensions i and i + h/2 go to m i and m i + m h/2. All
other dimensions of the queries are zero, so that those of the keys, which are random, have no effect. The
softmax divides by sqrt(m h) rather than sqrt(h), for which the queries are larger by sqrt(m). Values take
the first h dimensions, and the output projection is zero for the others.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from scripts.inflate.shapes import Shape

# Rotary frequencies that follow from θ and the place alone, and do not change with the length.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class HeadPlaces:
    """Names the small head that each head of the new model holds.

    Attributes:
        kv: ``kv[i]`` is the small KV head of KV head i.
        query: ``query[i]`` is the small query head of query head i.
        copies: the query heads whose output is zeroed, as another one has the same small head.
        head_dim, big_head_dim: of the small and the new model.
    """

    kv: list[int]
    query: list[int]
    copies: list[int]
    head_dim: int
    big_head_dim: int

    @classmethod
    def of(cls, small: Shape, big: Shape) -> "HeadPlaces":
        """Raises ValueError if the heads do not fit into the shape."""
        if big.head_dim % small.head_dim:
            raise ValueError(
                f"head_dim={big.head_dim} of the shape is no multiple of the model's {small.head_dim}, on "
                f"which its rotary frequencies depend; choose a shape of head_dim {small.head_dim}"
            )
        group, big_group = small.heads // small.kv_heads, big.heads // big.kv_heads
        # A group that is too large for one KV head is distributed over several copies of it.
        shares = -(-group // big_group)
        kv: list[int] = []
        query: list[int] = []
        copies: list[int] = []
        for head in range(small.kv_heads):
            members = range(head * group, (head + 1) * group)
            for first in range(0, shares * big_group, big_group):
                share = members[first : first + big_group]
                kv.append(head)
                copies += range(len(query) + len(share), len(query) + big_group)
                query += [*share, *[share[0]] * (big_group - len(share))]
        if len(kv) > big.kv_heads:
            raise ValueError(
                f"kv_heads={big.kv_heads} of the shape is too few: {small.heads}/{small.kv_heads} heads of "
                f"the model need {len(kv)} in groups of {big_group}; raise kv_heads or heads"
            )
        own, own_queries = len(kv), len(query)
        kv = [kv[head % own] for head in range(big.kv_heads)]
        query = [query[head % own_queries] for head in range(big.heads)]
        copies += range(own_queries, big.heads)
        return cls(kv, query, copies, small.head_dim, big.head_dim)

    @property
    def _times(self) -> int:
        return self.big_head_dim // self.head_dim

    @property
    def rotary(self) -> Tensor:
        """Returns the dimensions of a new head that hold those of a small head's queries and keys."""
        half = self._times * torch.arange(self.head_dim // 2)
        return torch.cat((half, half + self.big_head_dim // 2))

    def check_frequencies(self, small: LlamaForCausalLM, big: LlamaForCausalLM) -> None:
        """Raises ValueError where the new model does not have the small one's rotary frequencies."""
        own, new = small.model.rotary_emb, big.model.rotary_emb
        kind = (small.config.rope_parameters or {}).get("rope_type", "default")
        same = self._times == 1 or (
            kind in _FIXED_ROPES
            and torch.allclose(own.inv_freq.cpu(), new.inv_freq[:: self._times].cpu(), rtol=1e-6, atol=0.0)
            and own.attention_scaling == new.attention_scaling
        )
        if not same:
            remedy = "set truncate=False in its rope_parameters, or " if kind == "yarn" else ""
            raise ValueError(
                f"head_dim={self.big_head_dim} of the shape changes the rotary frequencies of rope_type "
                f"{kind!r}; {remedy}choose a shape of head_dim {self.head_dim}"
            )

    def copy(self, name: str, weight: Tensor, target: Tensor) -> None:
        """Writes a small model's projection ``name`` into the new model's.

        Args:
            weight: ``[rows, columns]`` of the small model.
            target: of the new model; columns of an output projection whose head is a copy stay as they are.
        """
        if name.endswith("o_proj.weight"):
            columns = weight.unflatten(1, (-1, self.head_dim))  # [d, heads, h]
            places = target.unflatten(1, (-1, self.big_head_dim))
            for place, head in enumerate(self.query):
                if place not in self.copies:
                    places[: len(weight), place, : self.head_dim].copy_(columns[:, head])
            return
        rows = weight.unflatten(0, (-1, self.head_dim))  # [heads, h, d]
        places = target.unflatten(0, (-1, self.big_head_dim))[..., : weight.shape[1]]
        dims = self.rotary.to(target.device)
        if name.endswith("v_proj.weight"):
            dims = torch.arange(self.head_dim, device=target.device)
        if queries := name.endswith("q_proj.weight"):
            places.zero_()
            # In double precision, so that the product is rounded once.
            rows = rows.double() * math.sqrt(self._times) if self._times > 1 else rows
        for place, head in enumerate(self.query if queries else self.kv):
            places[place].index_copy_(0, dims, rows[head].to(target))
