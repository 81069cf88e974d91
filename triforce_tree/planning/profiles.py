"""Measured settings on disk: the best that ``triforce-tree tune`` found for a machine and pair of models.

A profile is a JSON file of entries, one for each context length and temperature that was measured. It changes
the speed, never the distribution of the output. The files are in ``profiles`` in the user's cache folder
(``user_folders.user_cache``); ``TRIFORCE_TREE_PROFILES`` names another folder, or none if it is empty.
"""

import json
import logging
import math
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from triforce_tree.config import HierarchyConfig
from triforce_tree.runtime.files.json_files import read_json
from triforce_tree.runtime.files.replacing import replace_file
from triforce_tree.runtime.files.user_folders import user_cache
from triforce_tree.runtime.fingerprint import hardware, shape_of

VERSION = 2
# An entry is used for prompts of at most this many times its context, and at least that fraction of it.
_MOST_RATIO = 4.0
# Settings that depend on each other: if one of them is given, the profile's others are ignored.
_DEPENDENT = frozenset({"budget", "chunk", "recent"})
_ESTIMATES = {"acceptance", "tokens_per_round"}
_LOG = logging.getLogger(__name__)
Source = str | Path | bool | None


@dataclass(frozen=True)
class Entry:
    """The best settings for one context length and temperature.

    Attributes:
        options: as :func:`triforce_tree.load` takes them; ``levels`` is 1 if drafting gains too little, by
            matched tokens too, which were measured with it. A ``tree`` without ``other_trees``, as earlier
            releases wrote it, was measured alone.
        ms_per_token, plain_ms_per_token: decode time with these options, and of the target alone.
        step_ms: time of one forward of each level with these options.
        tokens_per_pass: mean tokens gained by one pass of each verifying level.
        acceptance: probability by sibling rank that a proposed token is accepted, for each pair of levels.
        draft_length: acceptance and tokens_per_round, with which the draft-length controller starts.
        repeated_8grams: share in the outputs that were timed; repetitive text favours every drafter.
    """

    context: int
    temperature: float
    options: dict[str, Any]
    ms_per_token: float
    plain_ms_per_token: float
    step_ms: dict[str, float] = field(default_factory=dict)
    tokens_per_pass: dict[str, float] = field(default_factory=dict)
    acceptance: dict[str, list[float]] = field(default_factory=dict)
    draft_length: dict[str, float] = field(default_factory=dict)
    repeated_8grams: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.context, bool) or not isinstance(self.context, int) or self.context < 1:
            raise ValueError(f"context={self.context!r} must be an integer of at least 1")
        _check_number("temperature", self.temperature)
        _check_number("repeated_8grams", self.repeated_8grams)
        for name in ("ms_per_token", "plain_ms_per_token"):
            _check_number(name, getattr(self, name))
            if not getattr(self, name):
                raise ValueError(f"{name}=0 must be above 0")
        for name in ("options", "step_ms", "tokens_per_pass", "acceptance", "draft_length"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name}={getattr(self, name)!r} must be an object")
        for name in ("step_ms", "tokens_per_pass", "draft_length"):
            for key, value in getattr(self, name).items():
                _check_number(f"{name}.{key}", value)
        for key, chances in self.acceptance.items():
            for chance in chances if isinstance(chances, list) else [chances]:
                _check_number(f"acceptance.{key}", chance)
        if (estimates := self.draft_length) and estimates.keys() != _ESTIMATES:
            raise ValueError(f"draft_length has {sorted(estimates)}, not {sorted(_ESTIMATES)}")
        if estimates and (estimates["acceptance"] > 1 or estimates["tokens_per_round"] < 1):
            raise ValueError(
                f"draft_length={estimates} must have an acceptance of at most 1 and tokens_per_round of at "
                "least 1"
            )
        if "kv_bits" in self.options:
            raise ValueError(
                f"kv_bits={self.options['kv_bits']!r} changes the text, and a profile only its speed; leave "
                "it out of the profile and give it to load"
            )
        HierarchyConfig.from_options(**self.options)

    def estimates(self, levels: int, given: Collection[str]) -> dict[str, float]:
        """``draft_length``, where it is of as many levels and of the tree that is used; else empty."""
        return self.draft_length if self.options["levels"] == levels and "tree" not in given else {}

    @property
    def speedup(self) -> float:
        return self.plain_ms_per_token / self.ms_per_token

    def options_for(self, given: Collection[str]) -> dict[str, Any]:
        """The options without those that were ``given``, and those that depend on them."""
        ignored = {*given, *(_DEPENDENT if _DEPENDENT & set(given) else ())}
        if "tree" in given:
            # They were measured beside another one.
            ignored.add("other_trees")
        options = {name: value for name, value in self.options.items() if name not in ignored}
        if options.get("levels") == 3:
            # A prompt that is not much longer than the budget gains nothing from three levels.
            options["levels"] = "auto"
        return options


@dataclass(frozen=True)
class Profile:
    """Entries for one machine and one pair of models.

    Attributes:
        hardware, target, draft: as :func:`hardware` and :func:`shape_of` name them.
        made: command, versions and date of the last measurement.
        path: the file it was read from; not stored.
    """

    hardware: str
    target: str
    draft: str | None
    entries: tuple[Entry, ...]
    made: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def nearest(self, context: int, temperature: float) -> Entry | None:
        """The entry of the nearest context length, then temperature; None if no context is near enough."""

        def ratio(entry: Entry) -> float:
            return max(entry.context / context, context / entry.context)

        candidates = [entry for entry in self.entries if ratio(entry) <= _MOST_RATIO]
        return min(candidates, key=lambda e: (ratio(e), abs(e.temperature - temperature)), default=None)

    def with_entry(self, entry: Entry) -> "Profile":
        """This profile with one more entry, which replaces an entry of the same context and temperature."""
        others = [e for e in self.entries if (e.context, e.temperature) != (entry.context, entry.temperature)]
        entries = tuple(sorted([*others, entry], key=lambda e: (e.context, e.temperature)))
        return Profile(self.hardware, self.target, self.draft, entries, self.made, self.path)

    def write(self) -> None:
        """Write the file at ``path`` in a single step, so that a reader never sees a part of it."""
        path = self.path
        assert path is not None, "a profile that is written has a path"
        content = asdict(self)
        del content["path"]
        text = json.dumps({"version": VERSION, **content}, indent=2, ensure_ascii=False)
        replace_file(path, text + "\n")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a number of at least 0")


def read(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a profile, or has another version.
    """
    path = Path(path)
    remedy = (
        "delete it, measure again with triforce-tree tune, or go without it (profile=False, --profile none)"
    )
    try:
        held = read_json(path)
    except ValueError as error:
        raise ValueError(f"profile {str(path)!r} is corrupt ({error}); {remedy}") from error
    if not isinstance(held, dict) or "version" not in held:
        raise ValueError(f"{str(path)!r} is not a profile; {remedy}")
    version = held.pop("version")
    if version != VERSION:
        raise ValueError(
            f"profile {str(path)!r} has version {version!r}, this release reads {VERSION}; {remedy}"
        )
    try:
        entries = held.pop("entries")
        if not isinstance(entries, list):
            raise ValueError(f"entries must be a list, not {type(entries).__name__}")
        read_entries = tuple(Entry(**_known(Entry, entry)) for entry in entries)
        return Profile(**_known(Profile, held), entries=read_entries, path=path)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = repr(error) if isinstance(error, KeyError) else str(error)
        raise ValueError(f"profile {str(path)!r} cannot be used ({why[:300]}); {remedy}") from error


def _known(kind: type[Entry] | type[Profile], values: Any) -> dict[str, Any]:
    """``values``, after checking that it is an object with no other keys than the fields of ``kind``."""
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__.lower()}={values!r} must be an object")
    names = {f.name for f in fields(kind)} - {"path"}
    if unknown := sorted(values.keys() - names):
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(names))}")
    return values


def find(source: Source, target: PreTrainedModel, draft: PreTrainedModel | None) -> Profile | None:
    """The profile to use, or None.

    Args:
        source: a path; False for none; None or True for the file of this machine and these models, if any.
        target, draft: the models.

    Raises:
        OSError, ValueError: see :func:`read`.
    """
    if source is False:
        return None
    if source is None or source is True:
        path = default_path(target, draft)
        if path is None or not path.is_file():
            return None
        if source is None:
            # Nobody has asked for this file.
            try:
                read(path)
            except (OSError, ValueError) as error:
                _LOG.warning("%s", error)
                return None
        source = path
    profile = given(source)
    assert profile is not None
    current = Profile(hardware(target.device), shape_of(target), shape_of(draft) if draft else None, ())
    for name in ("hardware", "target", "draft"):
        measured, actual = getattr(profile, name), getattr(current, name)
        if measured != actual:
            _LOG.warning("profile %s was measured with %s %s, this is %s", source, name, measured, actual)
    _LOG.info("settings of profile %s: %d measured", source, len(profile.entries))
    return profile


def given(source: Source) -> Profile | None:
    """The profile whose path was given; None where none was, or none is wanted.

    Raises:
        OSError, ValueError: see :func:`read`; it is no path.
    """
    if source is None or isinstance(source, bool):
        return None
    if not isinstance(source, str | Path):
        raise ValueError(f"profile={source!r} must be the path of a file, False for none, or None")
    return read(source)


def default_path(target: PreTrainedModel, draft: PreTrainedModel | None) -> Path | None:
    """The path of the profile of this machine and these models; None if profiles are switched off."""
    profiles = folder()
    if profiles is None:
        return None
    parts = [hardware(target.device), shape_of(target), shape_of(draft) if draft is not None else "no-draft"]
    return profiles / ("_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts) + ".json")


def folder() -> Path | None:
    """The folder of profiles; None if the environment switches them off."""
    setting = os.environ.get("TRIFORCE_TREE_PROFILES")
    if setting is not None:
        return Path(setting) if setting else None
    return user_cache("profiles")
