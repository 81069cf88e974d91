"""A meter decodes the target's own tokens after any position of a text that is prefilled once."""

from collections import Counter
from typing import Any

import pytest

from tests.support.models.tune_cases import CONTEXT, FEW
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.passes import PassKind
from triforce_tree.decoding.loop import Decoder
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.tune.fitted import PROBES
from triforce_tree.tune.meters import Meter, Sample
from triforce_tree.tune.search import Space

PLACES = [CONTEXT, CONTEXT - 60, CONTEXT - 20, CONTEXT]
CHANGES: list[dict[str, Any]] = [
    {"levels": 3}, {"levels": 1}, {"levels": 2}, {"levels": 3, "chunk": 16, "refresh": 0},
]  # fmt: skip


def meter_of(engine: Engine, ids: list[int]) -> Meter:
    return Meter(engine.hierarchy, ids, 9, PassLimits.of(engine.hierarchy.config, 3))


def config_of(engine: Engine, **changes: Any) -> HierarchyConfig:
    return engine.with_options(**changes).hierarchy.config


def test_a_meter_decodes_after_any_position_of_one_text(engine: Engine, ids: list[int]) -> None:
    meter = meter_of(engine, ids)
    slots = [part[..., : CONTEXT - 1, :].clone() for part in meter._store.kv]
    for place, change in zip(PLACES, CHANGES, strict=True):
        sample = meter.run(config_of(engine, **change), place, 0.0, 9, 0)
        assert isinstance(sample, Sample)
        assert sample.ms_per_token > 0
        assert sample.alone_ms is not None
        assert sample.alone_ms > 0
        expected = engine.generate(ids[:place], max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert sample.tokens[:9] == expected.sequences[0, place:].tolist()
        for part, before in zip(meter._store.kv, slots, strict=True):
            assert part[..., : CONTEXT - 1, :].equal(before)
    sampled = meter.run(config_of(engine, levels=3), CONTEXT - 60, 0.7, 9, 1)
    assert len(sampled.tokens) >= 9
    assert sampled.draft_length.keys() == {"acceptance", "tokens_per_round"}
    meter.close()


def test_prompt_lookup_is_timed_too(engine: Engine, ids: list[int]) -> None:
    alone = Engine(engine.hierarchy.target.model, config=engine.hierarchy.config)
    space = Space(alone.hierarchy.config, CONTEXT, gpu=False, draft=False)
    meter = Meter(alone.hierarchy, ids, 9, space.extent())
    for lookup in (4, 16):
        sample = meter.run(config_of(alone, levels=2, lookup=lookup), CONTEXT - 5, 0.0, 9, 0)
        expected = engine.generate(ids[: CONTEXT - 5], max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert sample.tokens[:9] == expected.sequences[0, CONTEXT - 5 :].tolist()


def test_the_largest_shapes_of_a_search_fit(engine: Engine) -> None:
    space = Space(engine.hierarchy.config, CONTEXT, gpu=False, draft=True, grid=FEW)
    most = space.extent()
    assert most == PassLimits(depth=8, nodes=64, max_draft_tokens=20)
    for tree in (*FEW[0].values, "sequoia:63x8", *PROBES):
        for levels in (2, 3):
            own = PassLimits.of(config_of(engine, tree=tree, gamma=6), levels)
            assert own.depth <= most.depth
            assert own.nodes <= most.nodes
            assert own.max_draft_tokens <= most.max_draft_tokens
    small, larger = (
        meter_of(engine, list(range(CONTEXT))),
        config_of(engine, levels=2, tree="best-first:9,9,9,9"),
    )
    with pytest.raises(ValueError, match="cannot hold"):
        small.run(larger, CONTEXT, 0.0, 9, 0)


def test_other_shapes_and_matched_tokens_are_timed_too(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a profile's settings are run: three levels, which passes of two may replace."""
    # A text that repeats itself: what the target writes after it stands in it.
    written = engine.generate(ids[:90], max_new_tokens=20, do_sample=False, eos_token_id=None).sequences[0]
    text = [*written.tolist(), *ids[:90]]
    config = config_of(engine, levels="auto", other_trees="chain:2 lookup:5")
    meter = Meter(engine.hierarchy, text, 15, Space(config, len(text), gpu=False, draft=True).extent())
    passes: Counter[PassKind] = Counter()
    made = Decoder._count

    def counted(self: Decoder, kind: PassKind, *rest: Any) -> None:
        if self.controller.matched(kind):
            passes[kind] += 1
        made(self, kind, *rest)

    monkeypatch.setattr(Decoder, "_count", counted)
    # Where tokens cost nothing to verify.
    monkeypatch.setattr(PassController, "matched_pass", lambda self, tokens: PassKind(2, 1, self.lookup))
    sample = meter.run(config, len(text), 0.0, 15, 0)
    expected = engine.generate(text, max_new_tokens=15, do_sample=False, eos_token_id=None)
    assert sample.tokens[:15] == expected.sequences[0, len(text) :].tolist()
    assert passes.keys() == {PassKind(2, 1, 2)}
    assert sample.levels[-1].accepted > 0
    assert len(sample.levels) == 3
