"""Level 0 on the device: the draft model grows a token tree for every sequence at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.config import StreamingConfig
from triforce_tree.cycle.laws import DeviceLaw, Noise
from triforce_tree.cycle.model import StepModel
from triforce_tree.cycle.rows import KVStore, TreeRows
from triforce_tree.cycle.shapes import DeviceShape
from triforce_tree.kernels.plan import Heads

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
        layers, heads: of its cache.
        shape: of the trees.
        config: sinks and window.
        batch: sequences.
        reach: most tokens that a text can grow by between two calls of ``renew``.
    """

    def __init__(
        self,
        model: StepModel,
        layers: int,
        heads: Heads,
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
        self.store = KVStore(layers, batch, heads, capacity, device, model.model.dtype)
        self.dropped = torch.zeros(batch, dtype=torch.int64, device=device)
        self._held = [0] * batch
        self._offsets = torch.arange(-self.again + 1, 1, device=device)
        self._starts = [0, 1]
        for width in shape.widths:
            self._starts.append(self._starts[-1] + width)
        depths = [0] + [d + 1 for d, width in enumerate(shape.widths) for _ in range(width)]
        self.depths = torch.tensor(depths, device=device)
        self._bits = torch.tensor([_signed(1 << i) for i in range(self.nodes)], device=device)
        self._root = torch.ones(batch, 1, dtype=torch.int64, device=device)
        tail = torch.ones(self.again, self.again, dtype=torch.bool).tril()
        self._rows = [TreeRows(self.store, self.again, mask=tail)]
        for d in range(1, self.depth):
            seen = self.again + self._starts[d + 1] - 1
            self._rows.append(TreeRows(self.store, shape.widths[d - 1], tail=seen))
        self.expanding = self._starts[self.depth]  # nodes that have children
        self.vocabulary: int = model.model.config.get_text_config(decoder=True).vocab_size

    def grow(self, tokens: Tensor, end: Tensor, law: DeviceLaw, noise: Noise) -> Tree:
        """A tree below each text's token at ``end``.

        Args:
            tokens: int64 ``[B, S]``.
            end: int64 ``[B]``.
            law: logits to laws.
            noise: a race for each of the ``expanding`` nodes that have children, unless greedy.
        """
        again = end[:, None] + self._offsets
        places = again - self.dropped[:, None]
        newest = tokens.gather(1, again)
        before = places[:, 0]
        self._rows[0].begin(before)
        logits = self.model(newest, places, self._rows[0], last=1)
        nodes, parents, words = newest[:, -1:], torch.full_like(self._root, -1), self._root
        values = torch.ones_like(nodes, dtype=torch.float32)
        laws = []
        below = (1 << (self.again - 1)) - 1  # the text's newest rows, which every node sees
        for d in range(self.depth):
            laws.append(law(logits))
            first, start, stop = self._starts[d], self._starts[d + 1], self._starts[d + 2]
            slots, ranks = self.shape.places(d, laws[-1], values)
            draws = self._draw(laws[-1], d, None if law.greedy else noise.race)
            drawn = draws.flatten(1).gather(1, slots * draws.shape[2] + ranks)
            chance = laws[-1].flatten(1).gather(1, slots * self.vocabulary + drawn.clamp_min(0))
            values = values.gather(1, slots) * torch.where(drawn >= 0, chance, 0.0)
            above = slots + first
            nodes, parents = torch.cat([nodes, drawn], 1), torch.cat([parents, above], 1)
            words = torch.cat([words, words.gather(1, above) | self._bits[start:stop]], 1)
            if d + 1 < self.depth:
                rows = self._rows[d + 1]
                rows.begin(before, (words[:, start:stop] << (self.again - 1)) | below)
                at = (places[:, -1:] + d + 1).expand_as(drawn)
                logits = self.model(drawn.clamp_min(0), at, rows)
        return Tree(nodes, parents, self.depths, words, torch.cat(laws, 1))

    def _draw(self, laws: Tensor, depth: int, race: Tensor | None) -> Tensor:
        """int64 ``[B, F, K]``: each node's draws without replacement, in order; -1 when there are no more."""
        most = min(self.shape.siblings(depth), self.vocabulary)
        if race is None:
            return laws.topk(most).indices
        times = (laws / race[:, self._starts[depth] : self._starts[depth + 1]]).topk(most)
        return torch.where(times.values > 0, times.indices, -1)

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

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sinks: Tensor | None
        ) -> Tensor:
            from triforce_tree.kernels.prefill import causal_attention

            for mine, new in zip(self.store.layer(layer), (k, v), strict=True):
                mine[b : b + 1, :, : len(tokens)] = new
            out = causal_attention(q, k, v, scale=scale, softcap=softcap or None, sinks=sinks)
            return out.transpose(1, 2).contiguous()

        self.model(ids, positions, attend, last=1)


def _signed(word: int) -> int:
    """An unsigned 64-bit word as torch's int64 holds it."""
    return word - (1 << 64) if word >= 1 << 63 else word
