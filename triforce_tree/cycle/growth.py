"""Level 0 on the device: the draft model grows a token tree for every sequence at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_tree.attention import AttentionParams, KVShape
from triforce_tree.config import StreamingConfig
from triforce_tree.cycle.laws import DeviceLaw, Noise
from triforce_tree.cycle.model import StepModel
from triforce_tree.cycle.rows import TreeRows
from triforce_tree.cycle.shapes import DeviceShape
from triforce_tree.cycle.store import KVStore
from triforce_tree.kernels import step

MOST_TAIL = 64
"""Bits of the word that says which tail rows a row sees."""


@dataclass(frozen=True)
class Tree:
    """A token tree a sequence; node 0 is the root, parents come before children.

    Attributes:
        tokens, parents: int64 ``[B, N]``; token -1 marks a place that nobody took, parents[:, 0] = -1.
        depths: int64 ``[N]``.
        words: int64 ``[B, N]``; bit j of a node's word says that node j is itself or its ancestor.
        laws: fp32 ``[B, M, V]``, the draft's laws at the first M nodes, all those that have children.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor
    laws: Tensor


class Growth:
    """A draft model on a window of each text, and the trees it grows.

    Its rows hold the ``sinks`` first tokens and the newest ones, at positions counted inside the window
    (StreamingLLM). When a window is full it is computed anew from its newer half, which Xiao et al.
    (arXiv 2309.17453, table 1) found to be the best of the windowed caches: no key is ever rotated twice.
    The newest tokens are fed again with each tree, so that nothing has to be rolled back or caught up with.

    Args:
        model: the draft.
        layers: what each of its layers keeps.
        shape: of the trees.
        config: sinks and window.
        batch: sequences.
        reach: most tokens that a text can grow by between two calls of ``renew``.
    """

    def __init__(
        self,
        model: StepModel,
        layers: Sequence[KVShape],
        shape: DeviceShape,
        config: StreamingConfig,
        batch: int,
        reach: int,
    ) -> None:
        self.model, self.shape, self.config = model, shape, config
        self.depth = len(shape.widths)
        self.nodes = 1 + sum(shape.widths)
        # What one verification and the one above it can bring is fed again each time.
        self.again = self.depth + 2
        device = model.device
        if self.again + self.nodes > MOST_TAIL:
            raise ValueError(
                f"a tree of {self.nodes - 1} tokens and depth {self.depth} is too large for the captured "
                f"cycle; nodes + depth must be at most {MOST_TAIL - 3}"
            )
        self._reach = reach + self.again + self.nodes
        capacity = config.sinks + 2 * config.window + self._reach
        self.store = KVStore(layers, batch, capacity, device, model.model.dtype)
        self.dropped = torch.zeros(batch, dtype=torch.int64, device=device)
        self._held = [0] * batch
        starts = [0, *accumulate(shape.widths, initial=1)]
        self._frontiers = [slice(a, b) for a, b in pairwise(starts[:-1])]  # the nodes that get children
        self.expanding = starts[self.depth]
        self.vocabulary: int = model.model.config.get_text_config(decoder=True).vocab_size
        depths = [0] + [d + 1 for d, width in enumerate(shape.widths) for _ in range(width)]

        def buffer(*size: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        self.tree = Tree(
            tokens=buffer(batch, self.nodes),
            parents=buffer(batch, self.nodes, fill=-1),
            depths=torch.tensor(depths, device=device),
            words=buffer(batch, self.nodes, fill=1),
            laws=buffer(batch, self.expanding, self.vocabulary, dtype=torch.float32),
        )
        self._values = buffer(batch, self.nodes, fill=1, dtype=torch.float32)
        self._pairs = [
            None if shape.places is None else torch.tensor(shape.places[d], device=device).T.contiguous()
            for d in range(self.depth)
        ]
        # Inputs of the forwards: the text's newest tokens, then each depth's nodes.
        self._ids = [buffer(batch, width) for width in (self.again, *shape.widths)]
        self._positions = buffer(batch, self.again - 1 + self.nodes)
        self._offsets = torch.tensor([*range(1 - self.again, 0), *depths], device=device)
        self._ahead = torch.tensor([1 - self.again, *starts[1 : self.depth]], device=device)
        self._at = buffer(self.depth, batch)
        self._lengths = buffer(batch, dtype=torch.int32)
        tail = torch.ones(self.again, self.again, dtype=torch.bool).tril()
        self._rows = [TreeRows(self.store, self.again, mask=tail)]
        for width, nodes in zip(shape.widths, self._frontiers[1:], strict=False):
            places = [*range(self.again - 1), *(self.again - 1 + d for d in depths[: nodes.stop])]
            self._rows.append(TreeRows(self.store, width, tail=len(places), depths=places))
        for rows, at in zip(self._rows, self._at, strict=True):
            rows.follow(at, self._lengths)

    def grow(self, tokens: Tensor, end: Tensor, law: DeviceLaw, noise: Noise) -> Tree:
        """A tree below each text's token at ``end``, in the buffers of ``self.tree``.

        Args:
            tokens: int64 ``[B, S]``.
            end: int64 ``[B]``.
            law: logits to laws.
            noise: a race for each of the ``expanding`` nodes that have children, unless greedy.
        """
        tree, before = self.tree, self.again - 1
        step.begin_tree(
            self._ids[0], self._positions, tree.tokens, self._at, self._lengths,
            tokens, end, self.dropped, self._offsets, self._ahead,
        )  # fmt: skip
        for d, nodes in enumerate(self._frontiers):
            columns = slice(before + nodes.start if d else 0, before + nodes.stop)
            logits = self.model(
                self._ids[d], self._positions[:, columns], self._rows[d], last=nodes.stop - nodes.start
            )
            laws, race = tree.laws[:, nodes], None if law.greedy else noise.race[:, nodes]
            draws, by_rank = step.expand_nodes(*law.unscaled(logits), race, laws, self.shape.siblings(d))
            mask = self._rows[d + 1].mask if d + 1 < self.depth else None
            step.place_nodes(
                tree.tokens, tree.parents, tree.words, self._values, self._ids[d + 1], mask,
                draws, by_rank, laws, self._pairs[d], nodes.start, before,
            )  # fmt: skip
        return tree

    def renew(self, texts: list[list[int] | None]) -> None:
        """Make room for the next trees.

        Args:
            texts: all settled tokens of each sequence; None leaves one as it is.
        """
        for b, text in enumerate(texts):
            if text is None:
                continue
            # All but the newest tokens, which every tree feeds again.
            final = len(text) - self.again
            sinks, window = self.config.sinks, self.config.window
            newest = min(window, max(0, final - sinks))
            held = [*text[: min(sinks, final)], *text[final - newest : final]]
            self.dropped[b] = final - len(held)
            self._held[b] = final - len(held)
            if held:
                self._feed(b, held)

    def full(self, b: int, length: int) -> bool:
        """Whether the window of sequence ``b``, of ``length`` settled tokens, has no room for a cycle."""
        return length - self._held[b] + self._reach > self.store.rows

    def _feed(self, b: int, tokens: list[int]) -> None:
        ids = torch.tensor([tokens], device=self.model.device)
        positions = torch.arange(len(tokens), device=ids.device)[None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
            from triforce_tree.kernels.prefill import causal_attention

            for mine, new in zip(self.store.layer(layer), (k, v), strict=True):
                mine[b : b + 1, :, : len(tokens)] = new
            out = causal_attention(
                q, k, v, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks
            )
            return out.transpose(1, 2).contiguous()

        self.model(ids, positions, attend, last=1)
