"""The stages of a cycle, each a function of nothing over fixed buffers: what a CUDA graph captures.

* :class:`Grow`, :class:`MiddlePass`: level 0 grows trees, level 1 verifies them, the chains grow. Repeated.
* :class:`ChainPass`: level 2 verifies chain and runner-ups, and settles them.
* :class:`TreePass`: level 2 verifies level 0's tree, without a level between (``levels=2``).
* :class:`PlainPass`: level 2 alone: ordinary decoding (``levels=1``).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from triforce_tree.cycle.copied import CopiedRows
from triforce_tree.cycle.growth import Growth, Tree
from triforce_tree.cycle.laws import DeviceLaw, Noise
from triforce_tree.cycle.model import StepModel
from triforce_tree.cycle.rows import RetrievalRows, TreeRows
from triforce_tree.cycle.texts import Texts
from triforce_tree.kernels import step
from triforce_tree.token_tree import ancestor_mask

FullRows = Callable[[int, Tensor | None, Sequence[int] | None], TreeRows]
"""Makes what T new rows of level 2 do in the full cache, of T, a mask that never changes, and depths."""


class Stage(Protocol):
    """One part of a cycle; ``noise`` holds the random numbers it reads."""

    noise: list[Noise]

    def __call__(self) -> None: ...


class Verdict(NamedTuple):
    """On the trees of a batch.

    Attributes:
        path: int64 ``[B, D + 1]``, accepted nodes from the root on, -1 after the last.
        counts: int64 ``[B]``, how many these are, and how many tokens are emitted.
        emitted: int64 ``[B, D + 1]``: tokens of the accepted nodes but the root, and the one after them.
        scores: fp32 ``[B, N, V]`` of all nodes, laws where tokens are sampled.
    """

    path: Tensor
    counts: Tensor
    emitted: Tensor
    scores: Tensor


class Verifier:
    """A model that judges trees on some rows."""

    def __init__(self, model: StepModel, law: DeviceLaw, texts: Texts, nodes: int, vocabulary: int) -> None:
        self.model, self.law, self.texts = model, law, texts
        sampled = 0 if law.greedy else 1
        self.noise = Noise(texts.batch, sampled, vocabulary, sampled * nodes, model.device)

    def judge(self, tree: Tree, depth: int, root: Tensor, rows: TreeRows, words: Tensor | None) -> Verdict:
        """Which nodes are accepted, and what follows them.

        Args:
            tree: to verify; its root stands at ``root`` in each text.
            depth: D, its longest path.
            words: masks where they change.
        """
        rows.begin(root, words)
        logits = self.model(tree.tokens.clamp_min(0), root[:, None] + tree.depths, rows)
        if self.law.greedy:
            p = self.law.scores(logits)
            top, best = p.max(-1)
            # NaN counts as the largest of all, and spreads over a whole law.
            self.texts.check(top)
            path, count, last = step.accept_greedy(tree.tokens, tree.parents, best, depth)
        else:
            p = self.law(logits)
            self.texts.check(p[..., 0])
            own = torch.arange(tree.tokens.shape[1], device=p.device).expand_as(tree.tokens)
            path, count, last = step.accept_tree(
                tree.tokens, tree.parents, p, tree.laws, own, self.noise.uniform, self.noise.race[:, 0], depth
            )
        accepted = tree.tokens.gather(1, path[:, 1:].clamp_min(0))
        emitted = torch.cat([accepted, last[:, None]], 1).scatter(1, count[:, None] - 1, last[:, None])
        return Verdict(path, count, emitted, p)


class Grow:
    """Level 0 grows a tree behind every text; ``tree`` is the last one."""

    tree: Tree

    def __init__(self, growth: Growth, law: DeviceLaw, texts: Texts) -> None:
        self.growth, self.law, self.texts = growth, law, texts
        drawn = 0 if law.greedy else growth.expanding
        self.noise = [Noise(texts.batch, drawn, growth.vocabulary, 0, growth.model.device)]

    def __call__(self) -> None:
        self.tree = self.growth.grow(self.texts.tokens, self.texts.end, self.law, self.noise[0])


class MiddlePass:
    """Level 1 verifies the grown trees: the chains grow by 1 to depth + 1 tokens.

    Args:
        grow: made the trees.
        verifier: level 1's weights.
        rows: its retrieval view of the full cache, or copies from it.
        leaves: keep the runner-up of every token that joins the chain.
        choosing: whether this pass chooses its chunks anew.
    """

    def __init__(
        self,
        grow: Grow,
        verifier: Verifier,
        rows: RetrievalRows | CopiedRows,
        leaves: bool,
        choosing: bool,
    ) -> None:
        self.grow, self.verifier, self.rows, self.leaves = grow, verifier, rows, leaves
        self.choosing = choosing
        vocabulary = verifier.noise.race.shape[2]
        drawn = grow.growth.depth + 1 if leaves and not verifier.law.greedy else 0
        self._beside = Noise(grow.texts.batch, drawn, vocabulary, 0, verifier.model.device)
        self.noise = [verifier.noise, self._beside]

    def __call__(self) -> None:
        tree, texts, depth = self.grow.tree, self.grow.texts, self.grow.growth.depth
        root = texts.end
        self.rows.choosing = self.choosing
        if self.choosing:
            self.rows.choose(root, texts.length)
        path, count, emitted, p = self.verifier.judge(tree, depth, root, self.rows, tree.words)
        self.rows.move(path)
        laws = p.gather(1, path.clamp_min(0)[..., None].expand(-1, -1, p.shape[2]))
        greedy = self.verifier.law.greedy
        if self.leaves:
            texts.add_leaves(step.second_choice(laws, emitted, None if greedy else self._beside.race))
        texts.lengthen(emitted, count, None if greedy else laws)


class ChainPass:
    """Level 2 verifies what level 1 gathered, and the text grows.

    Args:
        model: the target.
        full: makes rows of the full cache.
        means: whose chunk means follow the text; None where the cache keeps them itself.
        leaves: verify the runner-ups too.
    """

    def __init__(
        self,
        model: StepModel,
        full: FullRows,
        means: RetrievalRows | None,
        law: DeviceLaw,
        texts: Texts,
        vocabulary: int,
        leaves: bool,
    ) -> None:
        self.texts, self.means, self.leaves = texts, means, leaves
        reach, device = texts.reach, model.device
        parents = list(range(-1, reach)) + (list(range(reach)) if leaves else [])
        depths = list(range(reach + 1)) + (list(range(1, reach + 1)) if leaves else [])
        self.parents = torch.tensor(parents, device=device).expand(texts.batch, -1)
        self.depths = torch.tensor(depths, device=device)
        self.rows = full(len(parents), ancestor_mask(parents), depths)
        self.verifier = Verifier(model, law, texts, len(parents), vocabulary)
        self.noise = [self.verifier.noise]
        self._places = torch.arange(reach + 1, device=device)

    def __call__(self) -> None:
        texts, reach = self.texts, self.texts.reach
        root = texts.length.clone()
        line = texts.tokens.gather(1, root[:, None] + self._places)
        chain = texts.chain[:, None]
        nodes = torch.where(self._places <= chain, line, -1)
        if self.leaves:
            runner_ups = texts.leaves[:, :reach]
            nodes = torch.cat([nodes, torch.where(self._places[:-1] < chain, runner_ups, -1)], 1)
        # Shapes do not change, so words are those of the plan: only laws and tokens vary.
        tree = Tree(nodes, self.parents, self.depths, nodes, texts.chain_laws)
        _settle(texts, self.rows, self.verifier.judge(tree, reach, root, self.rows, None))
        if self.means is not None:
            chunk = self.means.store.page
            self.means.renew_means(root // chunk, (reach + 1) // chunk + 2)


class TreePass:
    """Level 2 verifies level 0's trees."""

    def __init__(self, grow: Grow, verifier: Verifier, full: FullRows) -> None:
        self.grow, self.verifier = grow, verifier
        self.rows = full(grow.growth.nodes, None, grow.growth.tree.depths.tolist())
        self.noise = [verifier.noise]

    def __call__(self) -> None:
        tree, texts, depth = self.grow.tree, self.grow.texts, self.grow.growth.depth
        root = texts.length.clone()
        _settle(texts, self.rows, self.verifier.judge(tree, depth, root, self.rows, tree.words))
        texts.proposed.fill_(depth)


def _settle(texts: Texts, rows: TreeRows, verdict: Verdict) -> None:
    """What level 2 accepted becomes text, and its rows those of the full cache."""
    rows.move(torch.where(texts.active[:, None] > 0, verdict.path, -1))
    texts.settle(verdict.emitted, verdict.counts)


class PlainPass:
    """Level 2 alone, one token a pass.

    Args:
        full: makes rows of the full cache.
        means: whose chunk means follow the text; None where nobody asks, or the cache keeps them itself.
    """

    def __init__(
        self,
        model: StepModel,
        full: FullRows,
        means: RetrievalRows | None,
        law: DeviceLaw,
        texts: Texts,
        vocabulary: int,
    ) -> None:
        self.texts, self.means = texts, means
        self.rows = full(1, None, None)
        self.verifier = Verifier(model, law, texts, 1, vocabulary)
        self.noise = [self.verifier.noise]
        device = model.device
        self._parents = torch.full((texts.batch, 1), -1, device=device)
        self._depths = torch.zeros(1, dtype=torch.int64, device=device)
        self._laws = torch.zeros(texts.batch, 1, 0 if law.greedy else vocabulary, device=device)

    def __call__(self) -> None:
        root = self.texts.length.clone()
        nodes = self.texts.tokens.gather(1, root[:, None])
        tree = Tree(nodes, self._parents, self._depths, nodes, self._laws)
        verdict = self.verifier.judge(tree, 0, root, self.rows, None)
        # The root stays where it is: no row moves.
        self.texts.settle(verdict.emitted, verdict.counts)
        if self.means is not None:
            self.means.renew_means(root // self.means.store.page, 2)
