"""Medusa heads, which predict several tokens from one hidden state (Cai et al., arXiv 2401.10774)."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.heads.growth import GrowingDrafter
from triforce_tree.drafters.heads.published import check_fields
from triforce_tree.drafters.registry import MEDUSA, settings
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.shapes import Shape
from triforce_tree.verify.probs import Sampler

# Sizes are those of the tensors; ``version`` is that of the program that wrote the folder.
_READ = frozenset([
    "base_model_name_or_path", "hidden_size", "medusa_num_heads", "medusa_num_layers", "version",
])  # fmt: skip


class Medusa(GrowingDrafter):
    """Heads that predict tokens after the next one from the target's last hidden state after the final norm.

    Head k predicts the tokens at depth k of the tree, whose root is the token that the target has drawn from
    that hidden state. The distribution of a head does not depend on the tokens in between, so all nodes of a
    depth share it. Children are drawn from it without replacement, so the output is exact at any temperature.
    The paper's "typical acceptance" is lossy and not implemented.

    Args:
        folder: has ``medusa_lm_head.safetensors`` or ``.pt``, and ``config.json`` as published by
            github.com/FasterDecoding/Medusa (``medusa_num_heads``, ``medusa_num_layers``). A head without its
            last matrix uses the target's language model head.
        tree, other_trees: shapes, see :class:`GrowingDrafter`, at most as deep as the number of heads.

    Raises:
        OSError, ValueError: the folder has no such files, or they cannot be used with the tree.
    """

    capturable = True

    def __init__(
        self,
        folder: str | Path,
        tree: str | Shape | None = None,
        other_trees: str | Sequence[str | Shape] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._weights = HeadWeights(self.folder, MEDUSA, lambda name: name.removeprefix("medusa_head."))
        found = {int(name.split(".")[0]) for name in self._weights if name.split(".")[0].isdigit()}
        config = settings(self.folder)
        check_fields(self.folder, config, _READ, {})
        self.heads = config.get("medusa_num_heads", len(found))
        self.layers = config.get("medusa_num_layers", 1)
        for name, value, most in (("heads", self.heads, len(found)), ("layers", self.layers, 64)):
            if type(value) is not int or not 0 < value <= most:
                raise ValueError(
                    f"medusa_num_{name}={value!r} in {str(self.folder)!r} must be 1 to {most}, as its "
                    "weights are; copy or download them again"
                )
        source = f"{str(self.folder)!r} with {self.heads} Medusa heads"
        super().__init__("medusa", tree, other_trees, self.heads, source)

    def attach(self, target: HFModel) -> None:
        super().attach(target)
        size = target.model.config.get_text_config(decoder=True).hidden_size
        self.features = (target.layers,)
        blocks: list[tuple[Tensor, Tensor]] = []

        def stacked(name: str, *shape: int) -> Tensor:
            parts = [self._weights.take(f"{k}.{name}", *shape) for k in range(self._depth)]
            return torch.stack([part.to(target.device, target.dtype) for part in parts])

        for layer in range(self.layers):
            weight = stacked(f"{layer}.linear.weight", size, size)
            blocks.append((weight.mT.contiguous(), stacked(f"{layer}.linear.bias", size)[:, None]))
        self._blocks = blocks
        self._last: Tensor | None = None
        if f"0.{self.layers}.weight" in self._weights:
            self._last = stacked(f"{self.layers}.weight", target.vocab_size, size).mT.contiguous()
        deeper = [
            name for name in self._weights if name.split(".")[0] in map(str, range(self._depth, self.heads))
        ]
        self._weights.refuse_unused(deeper)
        own = [t for block in blocks for t in block] + ([] if self._last is None else [self._last])
        self.weight_bytes = sum(t.nbytes for t in own)
        self._own_head = target.source.get_output_embeddings()

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits ``[K, N, V]`` of the first K heads, where K is the depth of the deepest tree.

        Args:
            hidden: ``[N, hidden_size]``, hidden states after the target's final norm.
        """
        x = hidden.expand(self._depth, *hidden.shape)
        for weight, bias in self._blocks:
            x = x + F.silu(torch.baddbmm(bias, x, weight))
        logits: Tensor = self._own_head(x) if self._last is None else torch.bmm(x, self._last)
        return logits

    @torch.no_grad()
    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        hidden = state.newest_features(self.features[0], 1)[:, 0]
        logits = broadcast_tensor(self.logits(hidden).contiguous())
        growth = self._growths[tree.shape]
        tree.tokens[:, 0] = state.newest
        growth.place_all(logits.transpose(0, 1), state, tree, sampler)
