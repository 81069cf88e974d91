"""EAGLE-3 heads, which draft with one decoder layer from the target's hidden states (arXiv 2503.01840)."""

from pathlib import Path
from typing import Any

from triforce_tree.drafters.heads.eagle_format import canonical, eagle_format
from triforce_tree.drafters.heads.eagle_layer import EagleLayer
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.heads.pairs import PairDrafter
from triforce_tree.drafters.registry import WEIGHTS
from triforce_tree.models.hf_model import HFModel


class Eagle3(PairDrafter):
    """Drafts with one decoder layer over pairs of a target's hidden state and the token after it.

    Pair i is the fused hidden state at position i and the token at i + 1. From the pairs up to i the layer
    predicts the token at i + 2.

    Args:
        folder: has ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin`` in a layout of
            ``heads/eagle_format.py``. If ``embed_tokens`` or ``lm_head`` is missing, the target's is used.
        options: ``tree``, ``other_trees``, ``sinks`` and ``window`` of :class:`PairDrafter`. The pairs in the
            cache are attended to by positions counted within it.

    Raises:
        OSError, ValueError: the folder has no such files, or a size is out of range.
    """

    kind = "eagle3"

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self.folder = Path(folder)
        self.format = eagle_format(self.folder)
        if self.format.mask_token is not None and self.kind == Eagle3.kind:
            raise ValueError(
                f"{str(self.folder)!r} holds a P-EAGLE head, which drafts all depths in one forward; give "
                "the folder itself, as in load(target, drafter=FOLDER)"
            )
        source = f"the head in {str(self.folder)!r}"
        super().__init__(self.kind, self._network, **options, deepest=self.format.depths, source=source)
        self._weights = HeadWeights(self.folder, WEIGHTS, canonical)
        if "fc.weight" not in self._weights or not any(n.startswith("midlayer.") for n in self._weights):
            raise ValueError(
                f"{str(self.folder)!r} holds no EAGLE-3 head: it has no fc and midlayer (heads of EAGLE 1 "
                "and 2 read other hidden states, and are not supported)"
            )
        trained, seen = self.format.sliding_window, self.sinks + self.window + self._depth
        if trained is not None and trained < seen:
            raise ValueError(
                f"the head in {str(folder)!r} attends to the newest {trained} tokens, fewer than "
                f"sinks={self.sinks}, window={self.window} and the tree's {self._depth} depths; set window "
                f"to at most {trained - self.sinks - self._depth}"
            )

    def _network(self, target: HFModel) -> EagleLayer:
        return EagleLayer(self._weights, self.format, self._feature_layers(target.layers), target)

    def _feature_layers(self, layers: int) -> tuple[int, ...]:
        """Returns the layers whose outputs are fused.

        ``config.json`` lists layers whose inputs are read, so each number there is one higher.
        """
        inputs = self.format.inputs or (2, layers // 2, layers - 3)
        if not all(isinstance(j, int) and 1 <= j <= layers for j in inputs):
            raise ValueError(
                f"the head in {str(self.folder)!r} reads the inputs of layers {list(inputs)}, and must read "
                f"some of 1 to {layers}, as many as the target has; give a head that was trained for it"
            )
        return tuple(j - 1 for j in inputs)
