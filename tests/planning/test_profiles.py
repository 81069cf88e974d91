"""Profiles: reading and writing, the entry chosen for a prompt, and precedence of given options."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_pair import TinyPair
from tests.support.models.tune_cases import CONTEXT, profile_of
from triforce_tree import Engine, load
from triforce_tree.config import HierarchyConfig
from triforce_tree.planning import profiles
from triforce_tree.planning.profiles import Entry, Profile


def entry(**values: Any) -> Entry:
    given = {
        "context": CONTEXT,
        "temperature": 0.0,
        "options": {"levels": 3, "gamma": 6, "tree": "chain:2", "budget": 64, "chunk": 8, "recent": 32},
        "ms_per_token": 1.0,
        "plain_ms_per_token": 3.0,
    }
    return Entry(**(given | values))


def test_a_written_profile_reads_the_same(engine: Engine, tmp_path: Path) -> None:
    made = profile_of(
        engine,
        tmp_path / "p.json",
        entry(),
        entry(temperature=0.6, draft_length={"tokens_per_round": 2.0, "acceptance": 0.5}),
    )
    assert profiles.read(tmp_path / "p.json") == made
    newer = made.with_entry(entry(ms_per_token=0.5))
    assert [e.ms_per_token for e in newer.entries] == [0.5, 1.0]


def test_the_nearest_entry_is_used_unless_its_context_is_too_different() -> None:
    entries = (entry(context=8000), entry(context=32_000), entry(context=32_000, temperature=1.0))
    made = Profile("", "", None, entries)
    assert made.nearest(9000, 1.0) == entries[0]
    assert made.nearest(20_000, 0.8) == entries[2]
    assert made.nearest(100_000, 0.2) == entries[1]
    assert made.nearest(1999, 0.0) is None
    assert made.nearest(130_000, 0.0) is None


def profile_json(**values: Any) -> str:
    """The JSON of a profile of one entry with the values given."""
    given = {"context": 9, "temperature": 0, "options": {}}
    given |= {"ms_per_token": 1, "plain_ms_per_token": 1} | values
    return json.dumps({"version": 2, "entries": [given], "hardware": "", "target": "", "draft": None})


BROKEN = {
    "no JSON": ("{", "corrupt"),
    "not a profile": ("[]", "is not a profile"),
    "version": ('{"version": 99}', "version 99"),
    "field": ('{"version": 2, "entries": [], "speed": 3}', "unknown field 'speed'"),
    "missing": ('{"version": 2, "entries": []}', "cannot be used"),
    "entries": ('{"version": 2, "entries": [3]}', "entry=3 must be an object"),
    "entry": ('{"version": 2, "entries": [{"temprature": 1}]}', "unknown field 'temprature'"),
    "no list": ('{"version": 2, "entries": 3}', "entries must be a list, not int"),
    "no object": ("3", "is not a profile"),
    "deep": ("[" * 100_000, "nested deeper than 32"),
    "deep object": ('{"version": 2, "a": ' + '{"a":' * 500 + "1" + "}" * 501, "nested deeper than 32"),
    "no UTF-8": ('"\udcff"', "corrupt"),
    "option": (profile_json(options={"gama": 1}), "unknown option 'gama'"),
    "huge option": (profile_json(options={"gamma": 10**9}), "gamma=1000000000 must be"),
    "tree": (profile_json(options={"tree": "static:99999"}), "a tree has at most 1024"),
    "tree of a number": (profile_json(options={"tree": 9}), "tree=9 is neither"),
    "nested option": (profile_json(options={"streaming": {"window": 3}}), "unknown option 'streaming'"),
    "options": (profile_json(options=[1]), "options=[1] must be an object"),
    "context": (profile_json(context=math.nan), "context=nan must be an integer"),
    "context of text": (profile_json(context="8192"), "context='8192' must be an integer"),
    "no context": (profile_json(context=0), "context=0 must be"),
    "temperature": (profile_json(temperature=-1), "temperature=-1 must be"),
    "infinite": (profile_json(temperature=math.inf), "temperature=inf must be"),
    "time": (profile_json(ms_per_token=-3.0), "ms_per_token=-3.0 must be"),
    "no time": (profile_json(plain_ms_per_token=0), "plain_ms_per_token=0 must be"),
    "acceptance": (profile_json(acceptance={"a": [0.5, "x"]}), "acceptance.a='x' must be"),
    "estimates": (
        profile_json(draft_length={"tokens_per_round": math.nan, "acceptance": 1}),
        "draft_length.tokens_per_round=nan must be",
    ),
    "half of the estimates": (
        profile_json(draft_length={"tokens_per_round": 1}),
        "draft_length has ['tokens_per_round']",
    ),
    "impossible estimates": (
        profile_json(draft_length={"tokens_per_round": 0.5, "acceptance": 1}),
        "must have an acceptance of at most 1 and tokens_per_round of at least 1",
    ),
    "step": (profile_json(step_ms=[1]), "step_ms=[1] must be an object"),
}


def test_what_is_no_path_of_a_profile_is_named(pair: TinyPair) -> None:
    with pytest.raises(ValueError, match="profile=5 must be the path of a file, False for none, or None"):
        pair.load(profile=5)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_profile_is_refused_with_a_remedy(pair: TinyPair, tmp_path: Path, case: str) -> None:
    content, expected = BROKEN[case]
    path = tmp_path / "broken.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match="delete it, measure again") as error:
        pair.load(profile=path)
    assert str(path) in str(error.value)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiles.folder() is None
    monkeypatch.delenv("TRIFORCE_TREE_PROFILES")
    monkeypatch.setenv("TRIFORCE_TREE_CACHE", "/mine")
    assert profiles.folder() == Path("/mine/profiles")
    monkeypatch.delenv("TRIFORCE_TREE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert profiles.folder() == Path("/cache/triforce-tree/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profiles.folder() == Path.home() / ".cache/triforce-tree/profiles"


def test_load_finds_the_profile_of_its_models(
    engine: Engine, pair: TinyPair, home: Path, ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert pair.load().profile is None
    target, draft = engine.hierarchy.target.model, engine.hierarchy.draft
    assert draft is not None
    path = profiles.default_path(target, draft.model)
    assert path is not None
    profile_of(engine, path, entry())
    with caplog.at_level("INFO"):
        tuned = pair.load(recent=32, window=64)
    assert str(path) in caplog.text
    assert tuned.profile is not None
    # `recent` was given, so the options that depend on it are ignored.
    out = tuned.generate(ids, max_new_tokens=5, do_sample=False)
    assert out.profile == str(path)
    config = tuned.hierarchy.config
    assert (config.gamma, config.tree, config.retrieval.budget) == (6, "chain:2", 1536)
    assert len(out.levels) == 2  # the prompt is shorter than twice that budget
    assert pair.load(profile=False).profile is None
    assert load(pair.target, device="cpu").profile is None  # no draft: another pair


def test_given_options_override_the_profile(
    engine: Engine, pair: TinyPair, tmp_path: Path, ids: list[int]
) -> None:
    path = tmp_path / "p.json"
    profile_of(engine, path, entry(), entry(temperature=0.8, options={"levels": 1}))
    expected = engine.generate(ids, max_new_tokens=12, do_sample=False).sequences
    tuned = pair.load(profile=path, gamma=3)
    greedy = tuned.generate(ids, max_new_tokens=12, do_sample=False)
    assert greedy.sequences.equal(expected)
    assert len(greedy.levels) == 3
    assert (tuned.hierarchy.config.gamma, tuned.hierarchy.config.tree) == (3, "chain:2")
    assert len(tuned.generate(ids, max_new_tokens=3, temperature=0.9, seed=1).levels) == 1
    assert len(tuned.with_options(levels=2).generate(ids, max_new_tokens=3, temperature=0.9).levels) == 2
    short = tuned.generate(ids[:20], max_new_tokens=3, do_sample=False)
    assert short.profile is None
    assert tuned.hierarchy.config.tree == HierarchyConfig().tree


def test_a_profile_with_initial_draft_lengths(
    engine: Engine, pair: TinyPair, tmp_path: Path, ids: list[int]
) -> None:
    fast = entry(draft_length={"acceptance": 0.5, "tokens_per_round": 1.5})
    fast.options["retrieval_weight_bits"] = 4
    path = tmp_path / "p.json"
    profile_of(engine, path, fast)
    tuned = pair.load(profile=path, window=64, rounds=1)
    out = tuned.generate(ids, max_new_tokens=12, do_sample=False)
    assert out.profile == str(path)
    assert tuned.hierarchy.config.retrieval_weight_bits == 4
    assert out.sequences.equal(engine.generate(ids, max_new_tokens=12, do_sample=False).sequences)


def test_a_profile_of_another_machine_is_used_with_a_warning(
    engine: Engine, pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = profile_of(engine, tmp_path / "p.json", entry())
    replace(made, hardware="abacus").write()
    assert pair.load(profile=tmp_path / "p.json").profile is not None
    assert "measured with hardware abacus" in caplog.text


def test_a_profile_never_changes_the_cache_that_texts_depend_on() -> None:
    with pytest.raises(ValueError, match=r"kv_bits=8 changes the text.*give it to load"):
        Entry(1000, 0.0, {"levels": 2, "kv_bits": 8}, 1.0, 2.0)
