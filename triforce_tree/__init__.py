"""Lossless speculative decoding with hierarchical drafting, for long contexts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triforce_tree import grammar
    from triforce_tree.api import custom_generate, generate, load
    from triforce_tree.branching.pages import TreeFullError
    from triforce_tree.branching.tree import TextTree
    from triforce_tree.drafters.base import Drafter
    from triforce_tree.drafters.heads.eagle import Eagle3
    from triforce_tree.drafters.heads.medusa import Medusa
    from triforce_tree.engine import Engine
    from triforce_tree.models.supported import UnsupportedModelError
    from triforce_tree.requests.output import GenerateOutput
    from triforce_tree.runtime.stats import LevelStats
    from triforce_tree.sessions.session import Session
else:

    def __getattr__(name: str) -> Any:
        # Lazily: torch and transformers take seconds to import, and ``--help`` needs neither.
        if name == "grammar":
            return import_module("triforce_tree.grammar")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


__version__ = "0.1.0"

__all__ = [
    "Drafter",
    "Eagle3",
    "Engine",
    "GenerateOutput",
    "LevelStats",
    "Medusa",
    "Session",
    "TextTree",
    "TreeFullError",
    "UnsupportedModelError",
    "custom_generate",
    "generate",
    "grammar",
    "load",
]

_HOMES = {
    **dict.fromkeys(__all__, "triforce_tree.api"),
    "Drafter": "triforce_tree.drafters.base",
    "Eagle3": "triforce_tree.drafters.heads.eagle",
    "Engine": "triforce_tree.engine",
    "GenerateOutput": "triforce_tree.requests.output",
    "LevelStats": "triforce_tree.runtime.stats",
    "Medusa": "triforce_tree.drafters.heads.medusa",
    "Session": "triforce_tree.sessions.session",
    "TextTree": "triforce_tree.branching.tree",
    "TreeFullError": "triforce_tree.branching.pages",
    "UnsupportedModelError": "triforce_tree.models.supported",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
