"""The draft model as a drafter: it grows a token tree for every sequence at once."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels import step
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.attention import AttentionParams
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import step_model
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import Shape, parse_shape
from triforce_tree.verify.probs import Sampler

# Positions of a draft behind its window that learned positions must cover; deep trees take more.
_BEYOND_WINDOW = 128


class TreeDrafter:
    """A draft model on a window of each text, and the trees it grows.

    Its rows hold the ``sinks`` first tokens and the newest ones, at positions counted inside the window
    (StreamingLLM). When a window is full it is computed anew from its newer half, which Xiao et al.
    (arXiv 2309.17453, table 1) found to be the best of the windowed caches: no key is ever rotated twice.
    The newest tokens are fed again with each tree, so that nothing has to be rolled back or caught up with.

    Args:
        draft: the checked model.
        config: shape of the trees, sinks and window.
    """

    name = "draft"
    deterministic = False
    features: tuple[int, ...] = ()

    def __init__(self, draft: HFModel, config: HierarchyConfig) -> None:
        self.draft, self.config = draft, config.streaming
        self.tree: str | Shape = config.tree
        self.model = step_model(draft, compiled=draft.device.type == "cuda")
        self.shape = shape = device_tree_shape(parse_shape(config.tree))
        self.capturable = self.model.capturable
        # The chain of level 1 and a tree behind it.
        beyond = max(_BEYOND_WINDOW, config.gamma + len(shape.widths))
        most = self.config.sinks + 2 * self.config.window + beyond
        limit = draft.learned_positions
        if limit is not None and most > limit:
            window = max(1, (limit - self.config.sinks - beyond) // 2)
            raise ValueError(
                f"{draft.name} has {limit} learned positions, and its window needs {most}; set "
                f"window<={window}, or choose another draft"
            )
        self.depth = len(shape.widths)
        self.nodes = 1 + sum(shape.widths)
        # What one verification and the one above it can bring is fed again each time.
        self.again = self.depth + 2

    def bind(self, state: SequenceState) -> None:
        batch, shape, device = state.batch, self.shape, self.model.device
        self._reach = state.max_draft_tokens + self.depth + 2 + self.again + self.nodes
        capacity = self.config.sinks + 2 * self.config.window + self._reach
        self.store = KVStore(self.draft.kv_shapes, batch, capacity, device, self.draft.dtype)
        self.dropped = torch.zeros(batch, dtype=torch.int64, device=device)
        self._held = [0] * batch
        starts = [0, *accumulate(shape.widths, initial=1)]
        self._frontiers = [slice(a, b) for a, b in pairwise(starts[:-1])]  # the nodes that get children
        self.expanding = starts[self.depth]

        def buffer(*size: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        self._values = buffer(batch, self.nodes, fill=1, dtype=torch.float32)
        self._pairs = [
            None if shape.places is None else torch.tensor(shape.places[d], device=device).T.contiguous()
            for d in range(self.depth)
        ]
        # Inputs of the forwards: the text's newest tokens, then each depth's nodes.
        self._ids = [buffer(batch, width) for width in (self.again, *shape.widths)]
        self._positions = buffer(batch, self.again - 1 + self.nodes)
        depths = [0] + [d + 1 for d, width in enumerate(shape.widths) for _ in range(width)]
        self._offsets = torch.tensor([*range(1 - self.again, 0), *depths], device=device)
        self._ahead = torch.tensor([1 - self.again, *starts[1 : self.depth]], device=device)
        self._at = buffer(self.depth, batch)
        self._lengths = buffer(batch, dtype=torch.int32)
        tail = torch.ones(self.again, self.again, dtype=torch.bool).tril()
        self._rows = [TreeAttentionView(self.store, self.again, mask=tail)]
        for width, nodes in zip(shape.widths, self._frontiers[1:], strict=False):
            places = [*range(self.again - 1), *(self.again - 1 + d for d in depths[: nodes.stop])]
            self._rows.append(TreeAttentionView(self.store, width, tail=len(places), depths=places))
        for rows, at in zip(self._rows, self._at, strict=True):
            rows.follow(at, self._lengths)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        end, before = state.end, self.again - 1
        step.begin_tree(
            self._ids[0], self._positions, tree.tokens, self._at, self._lengths,
            state.tokens, end, self.dropped, self._offsets, self._ahead,
        )  # fmt: skip
        for d, nodes in enumerate(self._frontiers):
            columns = slice(before + nodes.start if d else 0, before + nodes.stop)
            logits = self.model(
                self._ids[d], self._positions[:, columns], self._rows[d], last=nodes.stop - nodes.start
            )
            probs = tree.probs[:, nodes]
            paths = partial(tree.paths, state, end, nodes)
            draws, by_rank = sampler.children(logits, probs, self.shape.siblings(d), nodes, paths)
            mask = self._rows[d + 1].mask if d + 1 < self.depth else None
            step.place_nodes(
                tree.tokens, tree.parents, tree.words, self._values, self._ids[d + 1], mask,
                draws, by_rank, probs, self._pairs[d], nodes.start, before,
            )  # fmt: skip

    def start(self, texts: Sequence[Sequence[int]]) -> None:
        if (rope := self.draft.length_rope) is not None:
            rope.choose_for_window(self.store.rows)
        self.prepare(texts, resumed=True)

    def prepare(self, texts: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Compute windows anew that have no slots left for another pass, or that miss tokens."""
        for b, text in enumerate(texts):
            if text is not None and (resumed or len(text) - self._held[b] + self._reach > self.store.rows):
                self._renew(b, text)

    def _renew(self, b: int, text: Sequence[int]) -> None:
        # All but the newest tokens, which every tree feeds again. A text shorter than these counts as
        # extended to the left by copies of its first token.
        final = len(text) - self.again
        sinks, window = self.config.sinks, self.config.window
        newest = min(window, max(0, final - sinks))
        held = [*text[: max(0, min(sinks, final))], *text[max(0, final - newest) : max(0, final)]]
        self.dropped[b] = self._held[b] = final - len(held)
        if held:
            self._feed(b, held)

    def _feed(self, b: int, tokens: list[int]) -> None:
        ids = torch.tensor([tokens], device=self.model.device)
        positions = torch.arange(len(tokens), device=ids.device)[None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
            from triforce_tree.kernels.attention.prefill import causal_attention

            for mine, new in zip(self.store.layer(layer), (k, v), strict=True):
                mine[b : b + 1, :, : len(tokens)] = new
            out = causal_attention(
                q, k, v, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks
            )
            return out.transpose(1, 2).contiguous()

        self.model(ids, positions, attend, last=1)
