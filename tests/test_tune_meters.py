"""Both meters decode the target's text behind any place of a prompt that is fed once."""

import pytest
from tune_cases import CONTEXT

from triforce_tree import Engine
from triforce_tree.tune.meters import CapturedMeter, EagerMeter, Sample


def texts_of(meter: EagerMeter | CapturedMeter, engine: Engine, places: list[int]) -> list[list[int]]:
    """Greedy texts behind each place, under settings that differ in all that is built in."""
    changes = [{"levels": 3}, {"levels": 1}, {"levels": 2}, {"levels": 3, "chunk": 16, "refresh": 0}]
    found = []
    for place, change in zip(places, changes, strict=True):
        sample = meter.run(engine.with_options(**change).hierarchy.config, place, 0.0, 9, 0)
        assert isinstance(sample, Sample)
        assert sample.ms_per_token > 0
        assert len(sample.tokens) >= 9
        found.append(sample.tokens[:9])
    return found


@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_meters_decode_behind_any_place_of_one_text(engine: Engine, ids: list[int], kind: str) -> None:
    places = [CONTEXT, CONTEXT - 60, CONTEXT - 20, CONTEXT]
    meter: EagerMeter | CapturedMeter
    if kind == "eager":
        meter = EagerMeter(engine.hierarchy, ids, 9)
    else:
        meter = CapturedMeter(engine.hierarchy, ids, 9, 4)
    expected = [
        engine.generate(ids[:place], max_new_tokens=9, do_sample=False, eos_token_id=None)
        .sequences[0, place:]
        .tolist()
        for place in places
    ]
    assert texts_of(meter, engine, places) == expected
    sampled = meter.run(engine.with_options(levels=3).hierarchy.config, CONTEXT - 60, 0.7, 9, 1)
    assert len(sampled.tokens) >= 9
    assert bool(sampled.draft_length) is (kind == "captured")
    meter.close()
