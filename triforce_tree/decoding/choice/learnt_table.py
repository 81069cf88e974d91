"""What requests learnt about acceptance, for later ones: in the program, and in the user's cache folder.

``estimates.json`` holds, for a machine, a pair of models, their settings, a class of temperatures and of
context lengths, what the last request without a seed left. ``TRIFORCE_TREE_ESTIMATES`` names another file, or
none if it is empty. It changes the speed of a request, never the distribution of its output; a request with a
seed neither reads nor writes it.
"""

import os
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TemperatureLogitsWarper

from triforce_tree.decoding.choice.estimates import Learnt, LearntChoice
from triforce_tree.decoding.choice.stage_costs import settings_of
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.runtime import distributed
from triforce_tree.runtime.files.json_files import JsonTable
from triforce_tree.runtime.files.user_folders import user_cache
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits

MOST_ENTRIES = 300
# Temperatures up to this one are one class, higher ones another.
_LOW_TEMPERATURE = 0.7


def temperature_class(to_probs: ProbsFromLogits) -> str:
    """``greedy``, ``low`` or ``high``: requests of one class are accepted about as often."""
    if to_probs.greedy:
        return "greedy"
    found = [p.temperature for p in to_probs.processors if isinstance(p, TemperatureLogitsWarper)]
    return "low" if found and found[0] <= _LOW_TEMPERATURE else "high"


# Kinds of sampling of which a program keeps what was learnt.
_MOST_KINDS = 64


class LearntChoices:
    """What requests of one program and kind of sampling leave to each other.

    Args:
        program: prepared for ``to_probs``.
        to_probs: logits to probabilities.
        path: of the file; by default the user's.
    """

    def __init__(self, program: DecodingProgram, to_probs: ProbsFromLogits, path: Path | None = None) -> None:
        self._program = program
        # What costs or acceptance depend on, of all that may change while a program lives.
        self._kind: Hashable = (
            DeviceProbs.key(to_probs), temperature_class(to_probs), program.config.retrieval.refresh,
        )  # fmt: skip
        transferred = program.transferred_bytes if program.cache.backend.transfers else None
        settings = settings_of(program, DeviceProbs.kind(to_probs), transferred)
        self._settings = settings | {"temperature": temperature_class(to_probs)}
        path = path or _user_file()
        self._file = JsonTable(path, MOST_ENTRIES, "estimates start anew in each process")

    def last(self) -> LearntChoice | None:
        """What the last request left; the same on all ranks."""
        found = self._program.learnt.get(self._kind)
        if found is None:
            found = _learnt(self._file.entries().get(JsonTable.key(self._settings)))
        return distributed.broadcast_object(found)

    def keep(self, learnt: LearntChoice) -> None:
        """Leave this to the next request of this program, and, but for the seconds in it, of other ones."""
        kept = self._program.learnt
        kept.pop(self._kind, None)
        kept[self._kind] = learnt
        if len(kept) > _MOST_KINDS:
            # The one learnt longest ago.
            del kept[next(iter(kept))]
        if distributed.is_first_rank():
            named = {name: self._settings[name] for name in ("target", "drafter", "temperature", "context")}
            by_rank = [[round(a, 4) for a in row] for row in learnt.estimates.by_rank]
            entry = {**asdict(learnt.estimates), "by_rank": by_rank}
            entry |= {"budget": learnt.budget, "settings": named}
            self._file.put(JsonTable.key(self._settings), entry)


def _user_file() -> Path | None:
    setting = os.environ.get("TRIFORCE_TREE_ESTIMATES")
    if setting is not None:
        return Path(setting) if setting else None
    try:
        return user_cache("estimates.json")
    except RuntimeError:  # no home folder
        return None


def _learnt(entry: Any) -> LearntChoice | None:
    """An entry of the file; None if it is damaged."""
    try:
        tree = entry["tree_acceptance"]
        estimates = Learnt(
            float(entry["acceptance"]),
            float(entry["tokens_per_round"]),
            None if tree is None else float(tree),
            tuple(tuple(float(a) for a in row) for row in entry.get("by_rank", ())),
        )
        budget = float(entry["budget"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return LearntChoice(estimates, budget, {}) if budget == budget else None
