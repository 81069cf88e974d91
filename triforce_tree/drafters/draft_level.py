"""Level 0: what proposes token trees, and which trees, under changing settings."""

from dataclasses import replace

from torch import nn

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter, ReadsTarget, check_drafter, shapes_of
from triforce_tree.drafters.merged import Merged
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.drafters.with_lookup import WithLookup
from triforce_tree.models.fingerprint import Changes
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.recurrent.limits import refuse_draft
from triforce_tree.trees.shapes import Lookup, chain_shape, parse_shape, with_chain


class DraftLevel:
    """A draft model, a drafter of the user's own, or suffix matching.

    Args:
        target: level 2; a drafter that reads its weights is attached to it.
        draft: a model, a drafter, or None for suffix matching.
        tokens: the draft model's token ids for the target's; None where these are the same.

    Attributes:
        model: the draft model; None for other drafters.
        own: the drafter that was given; None for a draft model and for suffix matching.

    Raises:
        ValueError: a drafter's tree is no tree shape, it was made for another target, or it reads features
            of layers that the target does not have.
        UnsupportedModelError: the draft is recurrent.
    """

    def __init__(self, target: HFModel, draft: HFModel | Drafter | None, tokens: TokenMap | None) -> None:
        self.model = draft if isinstance(draft, HFModel) else None
        self.own = None if isinstance(draft, HFModel) else draft
        self.tokens, self._target, self._attached_to = tokens, target, target.revision
        kept: list[object] = [] if self.own is None else [*getattr(self.own, "__dict__", {}).values()]
        self._modules = [Changes(module) for module in kept if isinstance(module, nn.Module)]
        if self.own is not None:
            self._attach()
            check_drafter(self.own, target.layers)
        if self.model is not None and self.model.states is not None:
            refuse_draft(self.model.name)

    @property
    def revision(self) -> int:
        """Another number after each change of the draft model, or of modules that a drafter keeps."""
        models = [self.model.revision] if self.model is not None else []
        return sum([*models, *(changes.revision for changes in self._modules)])

    @property
    def changed(self) -> bool:
        """Whether any of them has changed since :meth:`refresh`."""
        return (self.model is not None and self.model.changed) or any(c.differs() for c in self._modules)

    def refresh(self) -> None:
        """Notice what has changed in the draft model, in modules that a drafter keeps, or in the target.

        Raises:
            ValueError, RuntimeError: see ``HFModel.refresh``.
        """
        if self.model is not None:
            self.model.refresh()
        for changes in self._modules:
            changes.refresh(lambda: None)
        if self._attached_to != self._target.revision:
            self._attach()

    def settle(self) -> None:
        """Called after forwards, see ``HFModel.settle``."""
        if self.model is not None:
            self.model.settle()
        for changes in self._modules:
            changes.settle()

    def _attach(self) -> None:
        drafter: object = self.own
        if isinstance(drafter, ReadsTarget):
            drafter.attach(self._target)
        self._attached_to = self._target.revision

    def with_trees(self, config: HierarchyConfig) -> HierarchyConfig:
        """The settings with the trees that are proposed under them.

        They are the drafter's, a chain of suffix matching, or the given ones with that chain beside them.
        """
        if self.own is not None:
            trees = shapes_of(self.own)
        elif self.model is None:
            trees = (chain_shape(config.matched_tokens(False)),)
        else:
            trees = tuple(with_chain(shape, config.matched_tokens(True)) for shape in config.trees)
        if trees == config.trees:
            return config
        return replace(config, tree=trees[0], other_trees=trees[1:])

    def drafter(self, config: HierarchyConfig) -> Drafter:
        """The drafter under these settings; a draft model's has new buffers."""
        if self.own is not None:
            return self.own
        if self.model is None:
            return SuffixMatching(config.matched_tokens(False))
        grown, matched = TreeDrafter(self.model, config, self.tokens), config.matched_tokens(True)
        chains = [shape for shape in map(parse_shape, config.shapes) if isinstance(shape, Lookup)]
        if chains:
            return WithLookup(grown, *(chain.length for chain in chains))
        return Merged(grown, SuffixMatching(matched)) if matched else grown
