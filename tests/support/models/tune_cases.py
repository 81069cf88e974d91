"""A small tuning plan: one context, two trees, three gammas; profiles of given entries."""

from pathlib import Path
from typing import Any

from triforce_tree import Engine
from triforce_tree.planning.profiles import Entry, Profile
from triforce_tree.runtime import fingerprint
from triforce_tree.tune.plan import Plan
from triforce_tree.tune.search import Coordinate

CONTEXT = 200
FEW = (
    Coordinate("tree", ("chain:2", "best-first:3,2"), ordered=False, levels=(2, 3)),
    Coordinate("gamma", (2, 4, 6)),
)


def plan(**values: Any) -> Plan:
    """A few new tokens at two places of one prompt, greedy and sampled."""
    given: dict[str, Any] = {
        "contexts": [CONTEXT], "temperatures": [0.0, 0.6], "new_tokens": 6, "places": 2, "grid": FEW,
    }  # fmt: skip
    return Plan(**(given | values))


def profile_of(engine: Engine, path: Path, *entries: Entry) -> Profile:
    """A profile of these entries for the engine's models, written to ``path``."""
    target, draft = engine.hierarchy.target, engine.hierarchy.draft
    assert draft is not None
    shapes = fingerprint.shape_of(target.model), fingerprint.shape_of(draft.model)
    made = Profile(fingerprint.hardware(target.device), *shapes, entries, {"date": "today"}, path)
    made.write()
    return made
