"""Drafters: who proposes token trees. The contract stands in ``base``."""

from triforce_tree.drafters.base import Autoregressive, Drafter
from triforce_tree.drafters.hierarchical import HierarchicalDrafter
from triforce_tree.drafters.model import ModelDrafter
from triforce_tree.drafters.prompt_lookup import PromptLookupDrafter

__all__ = [
    "Autoregressive",
    "Drafter",
    "HierarchicalDrafter",
    "ModelDrafter",
    "PromptLookupDrafter",
]
