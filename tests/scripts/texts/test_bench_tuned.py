"""The benchmark `tuned`: default settings beside those of a search."""

import dataclasses
from typing import Any

import pytest

from tests.support.models.tiny_pair import SMALL, TinyPair


def test_defaults_and_tuned_settings_decode_from_positions_that_the_search_did_not_see(
    script: Any, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, grids = script("benchmarks.texts.tuned"), script("benchmarks.texts.grid")
    engine = pair.load(profile=False, **SMALL)
    tokens = list(range(2, 258))
    places: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    searching = True

    class Counted(tuned.Meter):
        def run(self, config: Any, position: int, temperature: float, new: int, seed: int) -> Any:
            places[searching].append((position, seed))
            return super().run(config, position, temperature, new, seed)

    class Searched(tuned.Tuner):
        def entries(self, found: Any) -> Any:
            nonlocal searching
            entries = super().entries(found)
            searching = False
            return [dataclasses.replace(entries[0], options=entries[0].options | {"gamma": 3})]

    monkeypatch.setattr("triforce_tree.tune.tuner.Meter", Counted)
    monkeypatch.setattr(tuned, "Meter", Counted)
    monkeypatch.setattr(tuned, "Tuner", Searched)
    sample = tuned.Search(0.0, 6, 4, 0, grids.TimeLimit(None)).measured(engine, tokens, 0.0)
    assert sample["changed"]["gamma"] == 3
    before, after = ([place for place, _ in places[now]] for now in (True, False))
    assert before
    assert not set(before) & set(after)
    assert places[False][:4] == places[False][4:], "both from the same positions, with the same seeds"
    assert len(sample["default_time"]) == len(sample["tuned_time"]) == 4
    cell = {"text": "t", "kind": "prose", "context": 256, "temperature": 0.0}
    header = {"hardware": "here", "settings": {"model": "tiny"}}
    given = sample | {"default_time": [2.0, 4.0, 5.0, 8.0], "tuned_time": [1.0, 2.0, 4.0, 8.0]}
    [row] = tuned.rows("pair", header, [cell | given])
    assert row["share"] == 0.65
    assert (row["default_time"], row["tuned_time"], row["runs"]) == (4.5, 3.0, 4)
