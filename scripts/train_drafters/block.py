"""The network of a block drafter as it is trained (DFlash, arXiv 2602.06036).

It is that of ``triforce_tree/drafters/blocks/network.py``, over several blocks of each segment at once. All
layers have a window, so that the drafter reads no more than it was trained with, and has no sinks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from scripts.train_drafters.segments import Cache, Segments
from scripts.train_drafters.teacher import Teacher
from triforce_tree.drafters.blocks.format import BlockFormat
from triforce_tree.drafters.blocks.network import BlockNetwork
from triforce_tree.drafters.heads.attention import rotated_one

_THETA = 10_000.0


class BlockTraining(nn.Module):
    """Blocks of the token after a position and of mask tokens, which predict the tokens after it.

    Args:
        teacher: the target, of at least two layers.
        depths: how many tokens a block predicts.
        layers: decoder layers.
        mlp: neurons of a layer.
        window: newest positions that a layer attends to.

    Attributes:
        features: the hidden states of the target that it reads.
        cache: what the drafter keeps.
        every: the distance of the positions of a segment that have a block.
        head: the weight of the language model head, ``[V, H]``.
    """

    def __init__(self, teacher: Teacher, depths: int, layers: int, mlp: int, window: int) -> None:
        super().__init__()
        deepest = teacher.layers - 2
        self.features = tuple(dict.fromkeys((deepest // 3, 2 * deepest // 3, deepest)))
        self.depths, self.every, self.cache = depths, depths, Cache(0, window)
        self._teacher, self._layers = [teacher], layers
        kind: Any = CONFIG_MAPPING["qwen3"]
        config = kind(
            hidden_size=teacher.size, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=teacher.heads, num_key_value_heads=teacher.kv_heads,
            head_dim=teacher.head_dim, rms_norm_eps=teacher.eps, vocab_size=teacher.head.shape[0],
            rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        )  # fmt: skip
        windows: tuple[int | None, ...] = (window,) * layers
        self._format = BlockFormat(config, self.features, depths + 1, teacher.end, (False,) * layers, windows)
        self.network = BlockNetwork(self._format, teacher.size, len(teacher.head))
        for name, parameter in self.network.named_parameters():
            if name == "norm.weight":
                parameter.data.copy_(teacher.last_norm)
            elif parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.005 if last else 0.02)
        self.to(teacher.head.device)

    @property
    def head(self) -> Tensor:
        return self._teacher[0].head

    def forward(self, tokens: Tensor, hidden: dict[int, Tensor], segments: Segments) -> list[Tensor]:
        """Returns for each depth d the states ``[N, P, H]`` that the language model head reads for the token
        at i + 2 + d, where i is one of P positions.

        Args:
            tokens: int64 ``[R, T]``.
            hidden: ``[R, T, H]`` by element of ``features``.
        """
        network, block = self.network, self.depths + 1
        fused = network.fuse([segments.take(hidden[i]) for i in self.features])
        newest = segments.take_own(tokens, 1)
        slots = F.pad(newest[..., None], (0, block - 1), value=self._format.mask_token)
        own = segments.positions[..., None] + 1 + torch.arange(block, device=tokens.device)
        mask = self._mask(segments, own)
        before, kept = network.context(fused)
        before = rotated_one(before, *network.angles(segments.kept))

        def seen(i: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return torch.cat([before[i], keys.to(before)], 2), torch.cat([kept[i], values.to(kept)], 2), mask

        embedded = self._teacher[0].embedded(slots.flatten(1))
        made: Tensor = network(embedded.to(fused.dtype), own.flatten(1), seen)
        by_slot = made.unflatten(1, (-1, block))
        return [by_slot[:, :, self._format.first_slot + depth] for depth in range(self.depths)]

    def _mask(self, segments: Segments, own: Tensor) -> Tensor:
        """Returns bool ``[N, P T, K + P T]``: the pairs in a slot's window, and the slots of its block.

        Args:
            own: int64 ``[N, P, T]``, the positions of the slots.
        """
        count, block = own.shape[1:]
        slots, kept = own.flatten(1)[..., None], segments.kept[:, None]
        near = segments.visible.repeat_interleave(block, 1) & (slots - kept < self.cache.window)
        number = torch.arange(count, device=own.device).repeat_interleave(block)
        together = (number[:, None] == number).expand(len(own), -1, -1)
        return torch.cat([near, together], 2)

    def config(self) -> dict[str, Any]:
        """Returns ``config.json`` of the published layout."""
        layers, teacher = self._format.layers, self._teacher[0]
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": layers.hidden_size,
            "intermediate_size": layers.intermediate_size, "num_hidden_layers": self._layers,
            "num_attention_heads": layers.num_attention_heads,
            "num_key_value_heads": layers.num_key_value_heads, "head_dim": layers.head_dim,
            "vocab_size": layers.vocab_size, "rms_norm_eps": layers.rms_norm_eps, "hidden_act": "silu",
            "rope_theta": _THETA, "attention_bias": False, "block_size": self._format.block,
            "layer_types": ["sliding_attention"] * self._layers, "sliding_window": self.cache.window,
            "use_sliding_window": True, "is_causal": False, "num_target_layers": teacher.layers,
            "dflash_config": {"mask_token_id": teacher.end, "target_layer_ids": list(self.features)},
        }  # fmt: skip

    def published(self) -> dict[str, Tensor]:
        """Returns the tensors by their published names."""
        return dict(self.network.named_parameters())
