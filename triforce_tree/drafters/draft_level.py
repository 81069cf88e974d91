"""Chooses the drafter (level 0) and the shapes of its trees by the settings."""

from dataclasses import replace

from torch import nn

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter, check_drafter, shapes_of
from triforce_tree.drafters.mask_token import mask_token
from triforce_tree.drafters.suffix_matching import LENGTH, SuffixMatching
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.drafters.with_lookup import WithLookup
from triforce_tree.models.fingerprint import Changes
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import matched_alone, parse_shape


class DraftLevel:
    """A draft model, a drafter that the user passed, or suffix matching.

    Args:
        target: a drafter that reads the target's weights is attached to it.
        draft: a draft model, a drafter, or None for suffix matching.
        tokens: maps between the token ids of target and draft model; None if these are equal.

    Attributes:
        model: the draft model; None for other drafters.
        own: the drafter that the user passed; None for a draft model and for suffix matching.
        changes: the changes of the draft model, or of the modules that the drafter holds.
        revision: a number that changes when the draft model, or a module that the drafter holds, has changed.

    Raises:
        ValueError: a drafter's tree is no tree shape, it was made for another target, or it reads features
            of layers that the target does not have; or the draft model has a mask token that cannot be used.
    """

    def __init__(self, target: HFModel, draft: HFModel | Drafter | None, tokens: TokenMap | None) -> None:
        self.model = draft if isinstance(draft, HFModel) else None
        self.own = None if isinstance(draft, HFModel) else draft
        self.tokens, self._target, self._attached_to = tokens, target, target.revision
        kept: list[object] = [] if self.own is None else [*getattr(self.own, "__dict__", {}).values()]
        self.changes = [Changes(module) for module in kept if isinstance(module, nn.Module)]
        if self.model is not None:
            self.changes.append(self.model.changes)
            mask_token(self.model, tokens)  # raises if the draft cannot be used
        if self.own is not None:
            check_drafter(self.own, target)
        if self.model is not None and self.model.indexed:
            raise UnsupportedModelError(
                f"{self.model.name} chooses what it attends to by an indexer, and a draft attends to a "
                "window; use another draft, or none (suffix matching)"
            )
        self.revision = sum(changes.revision for changes in self.changes)

    def refresh(self) -> None:
        """Updates ``revision`` after changes of the models, and attaches the drafter to a changed target.

        Raises:
            ValueError, RuntimeError: see ``HFModel.refresh``.
        """
        if self.model is not None:
            self.model.refresh()
        else:
            for changes in self.changes:
                changes.refresh(lambda: None)
        self.revision = sum(changes.revision for changes in self.changes)
        if self.own is not None and self._attached_to != self._target.revision:
            self.own.attach(self._target)
        self._attached_to = self._target.revision

    def settle(self) -> None:
        """Must be called after forwards, see ``Changes.settle``."""
        for changes in self.changes:
            changes.settle()

    def with_trees(self, config: HierarchyConfig) -> HierarchyConfig:
        """Returns ``config`` with the tree shapes that the drafter will propose.

        For suffix matching this is a chain, and for a draft model these are the shapes in ``config``. For the
        user's drafter they are its own. Chains of suffix-matched tokens in ``config`` follow.
        """
        if self.model is not None:
            return config
        own = self.own or SuffixMatching()
        first, *others = shapes_of(own)
        # A chain of matched tokens may be the first shape of suffix matching, but no user may name it first.
        matched = [each for each in matched_alone(config.other_trees or ()) if parse_shape(each) != first]
        trees = (own.tree, *others, *matched)
        if trees == config.trees:
            return config
        return replace(config, tree=trees[0], other_trees=trees[1:])

    def drafter(self, config: HierarchyConfig) -> Drafter:
        """Returns the drafter for these settings. For a draft model it is a new object without buffers."""
        grown = self.own
        if self.model is not None:
            grown = TreeDrafter(self.model, config, self.tokens)
        lengths = [device_tree_shape(parse_shape(chain)).depth for chain in matched_alone(config.shapes)]
        if grown is None:
            return SuffixMatching(LENGTH, *lengths)
        return WithLookup(grown, *lengths) if lengths else grown
