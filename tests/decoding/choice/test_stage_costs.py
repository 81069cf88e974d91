"""Tests what the stages cost: measured at two context lengths, and interpolated between them."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    draft_of,
    finished,
    model,
    program_of,
    references,
    sequences_of,
)
from tests.support.models.tiny_pair import TinyPair
from triforce_tree import Engine
from triforce_tree.decoding import stage_progress
from triforce_tree.decoding.choice import cost_table
from triforce_tree.decoding.choice import stage_costs as module
from triforce_tree.decoding.choice.cost_table import CostTable, user_table
from triforce_tree.decoding.choice.stage_costs import allowance_of, by_shape, guessed, measure, stage_costs
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.policy.costs import StageCosts
from triforce_tree.policy.passes import OF_SHAPE, StageSeconds


class SlowStages:
    """Stages that take known times on a simulated clock; the first run of each takes longer."""

    device, levels, batch = torch.device("cpu"), 3, 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: Callable[[int], float]) -> None:
        self._seconds, self.now, self.length, self.chains = seconds, 0.0, 0, False
        self.drafter = self
        self.prepared: list[int] = []
        self.runs: list[tuple[str, int]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    @property
    def stage_names(self) -> list[str]:
        return list(self._seconds)

    @contextmanager
    def trial(self, length: int) -> Iterator[Callable[[bool], None]]:
        def begin(chains: bool) -> None:
            self.length, self.chains = length, chains

        yield begin
        self.length = 0

    def start(self, sequences: list[list[int]]) -> None:
        self.started = len(sequences[0])

    def prepare(self, sequences: list[list[int]], resumed: bool) -> None:
        assert resumed
        assert self.started == max(1, len(sequences[0]) - 64)
        self.prepared.append(len(sequences[0]))
        self.now += 7e-3

    def run(self, name: str, generator: torch.Generator) -> None:
        if name == "target" and not self.chains:
            name = "root"
        first = (name, self.length) not in self.runs
        self.now += self._seconds[name](self.length) * (5 if first else 1)
        self.runs.append((name, self.length))
        self.length = -1  # passes lengthen the sequences: the next run must set them back


def test_stages_are_measured_at_two_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = SlowStages(
        monkeypatch, draft=lambda n: 1e-3, retrieval_refresh=lambda n: 4e-3, retrieval=lambda n: 2e-3,
        target=lambda n: 1e-3 + n * 1e-6, plain=lambda n: 1e-3 + n * 0.5e-6, root=lambda n: 1e-3,
        target_tree=lambda n: 3e-3,
    )  # fmt: skip
    found = measure(stages, 8000)
    assert found.lengths == (1024, 8000)
    low, high = found.seconds
    assert (low.draft, low.retrieval, low.prepare) == pytest.approx((1e-3, 4e-3, 7e-3))
    assert stages.prepared == [8001] * 6
    assert (low.chain, high.chain) == pytest.approx((2e-3, 9e-3), rel=0.02), "with chains of full length"
    assert (low.plain, high.plain) == pytest.approx((1.5e-3, 5e-3), rel=0.02)
    assert (low.root, low.tree) == (high.root, high.tree) == pytest.approx((1e-3, 3e-3))
    assert "retrieval" not in dict(stages.runs), "every round refreshes"
    assert len(stages.runs) <= 60
    assert all(float(f"{s:.1e}") == s for seconds in found.seconds for s in vars(seconds).values())
    # Every fourth round refreshes; only the first one does.
    assert measure(stages, 8000, refresh=4).at(1).retrieval == pytest.approx((4e-3 + 3 * 2e-3) / 4)
    assert measure(stages, 8000, refresh=0).at(1).retrieval == pytest.approx(2e-3)
    assert measure(stages, 3).lengths == (1, 3)
    assert measure(stages, 1).lengths == (1,)


def test_interruptions_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the cores, so all samples after the warm-up but one take forty times as long."""
    tree = iter([1, 40, 40, 1] * 10)
    stages = SlowStages(
        monkeypatch, draft=lambda n: 1e-3, target=lambda n: 6e-3 * next(tree), plain=lambda n: 3e-3,
        root=lambda n: 3e-3,
    )  # fmt: skip
    stages.levels = 2
    found = measure(stages, 1000)
    assert [seconds.tree for seconds in found.seconds] == pytest.approx([6e-3] * 2)


def test_slow_stages_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = SlowStages(
        monkeypatch, draft=lambda n: 0.1, target=lambda n: 1.0, plain=lambda n: 2.0 - n * 1e-4
    )
    stages.levels = 2
    found = measure(stages, 1000)
    assert [name for name, _ in stages.runs].count("plain") == 2, "one warm-up of ten seconds is enough"
    assert found.seconds[0].plain == found.seconds[1].plain, "a longer context costs no less"
    assert found.seconds[0].retrieval == found.seconds[0].chain == float("inf"), "there are no such stages"


def test_an_allowance_bounds_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage is run once where a request is short, and else as often as the allowance lasts."""
    times = {"draft": 1e-3, "retrieval_refresh": 4e-3, "target": 5e-3, "root": 4e-3, "target_tree": 6e-3}
    spent = []
    for passes in (8, 60, math.inf):
        stages = SlowStages(
            monkeypatch, plain=lambda n: 4e-3, **{name: (lambda n, t=t: t) for name, t in times.items()}
        )
        found = measure(stages, 8000, allowance=passes)
        assert found.seconds[0].chain > found.seconds[0].plain > found.seconds[0].draft
        spent.append(stages.now)
        assert passes > 8 or stages.runs.count(("target_tree", 8000)) == 1
        # The first run of each stage takes five times as long in this simulation.
        assert stages.now <= 5 * 4e-3 * max(passes, 16)
    assert spent == sorted(spent)
    short, long = (allowance_of(tokens, 128, torch.device("cpu")) for tokens in (20_000, 40_000))
    assert short < 26 < long


def test_an_offloaded_cache_costs_its_bytes_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial runs transfer next to nothing."""
    monkeypatch.setattr("triforce_tree.decoding.choice.stage_costs.bandwidths", lambda device: (1e9, 1e12))
    stages = SlowStages(
        monkeypatch, draft=lambda n: 1e-3, target=lambda n: 3e-3, plain=lambda n: 2e-3, root=lambda n: 1e-3
    )
    found = measure(stages, 1000, 1, lambda tokens, plain: tokens * (5000 if plain else 10_000))
    assert found.lengths == (250, 1000)
    assert [s.chain for s in found.seconds] == pytest.approx([3e-3, 10e-3])
    assert [s.plain for s in found.seconds] == pytest.approx([2e-3, 5e-3])


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("levels", [2, 3])
def test_measuring_leaves_the_cache_as_it_was(levels: int) -> None:
    """Prompts that are in the cache need only be rewound."""
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3, rounds=None)
    begun = DecodingLoop.over(program, GREEDY, 0)
    sequences = sequences_of(PROMPTS, NEW)
    begun.begin(sequences)
    before = [
        [part[:, b, :, : len(prompt) - 1].clone() for part in program.store.kv]
        for b, prompt in enumerate(PROMPTS)
    ]
    found = stage_costs(program, GREEDY, math.inf, CostTable(None))
    assert found.lengths == (37, 149)
    for b, parts in enumerate(before):
        for now, slots in zip(program.store.kv, parts, strict=True):
            assert torch.equal(now[:, b, :, : slots.shape[-2]], slots)
    assert finished(begun, PROMPTS, NEW, again=True) == references()


@pytest.mark.parametrize("levels", [2, 3])
def test_costs_of_further_shapes_are_predicted(levels: int) -> None:
    others = ("chain:2", "best-first:6,6,6")
    program = program_of(
        model("llama-gqa"), draft_of("llama-gqa"), levels, 1, rounds=None, other_trees=others
    )
    program.prepare(GREEDY)
    first = stage_costs(program, GREEDY, math.inf, CostTable(None))
    own, *found = by_shape(program, first)
    assert own == first
    assert len(found) == 2
    for costs in found:
        assert costs is not None
        assert costs.lengths == first.lengths
        for seconds, other in zip(costs.seconds, first.seconds, strict=True):
            shared = vars(seconds).keys() - set(OF_SHAPE)
            assert {n: getattr(seconds, n) for n in shared} == {n: getattr(other, n) for n in shared}
            assert 0 < seconds.draft < math.inf
            assert 0 < seconds.tree < math.inf
            assert (seconds.retrieval < math.inf) == (levels == 3)
    assert not [name for name in program.stage_names if "/" in name], "their stages are not needed yet"
    alone = program_of(model("llama-gqa"), None, 1)
    assert by_shape(alone, first) == [first]


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_costs_without_a_measurement_follow_the_sizes_of_the_models(levels: int) -> None:
    draft = draft_of("llama-gqa") if levels > 1 else None
    program = program_of(model("llama-gqa"), draft, levels, 2, rounds=None)
    program.prepare(GREEDY)
    found = guessed(program, program.max_seq_len - 1)
    measured = stage_costs(program, GREEDY, math.inf, CostTable(None))
    for own, known in zip(found.seconds, measured.seconds, strict=True):
        ratios = StageSeconds(**{name: value / own.plain for name, value in vars(own).items()})
        assert {n for n, s in vars(own).items() if 0 < s < math.inf} == {
            n for n, s in vars(known).items() if 0 < s < math.inf
        }, "the same stages"
        assert all(ratio > 0.01 for name, ratio in vars(ratios).items() if getattr(own, name))
        assert ratios.tree == math.inf or 1 <= ratios.tree < 3
    short, long = found.seconds
    assert long.plain > short.plain, "keys and values are read"
    assert long.draft == short.draft


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Grows by an element for each measurement of stages; the cache folder is empty."""
    done: list[Any] = []

    def counted(*args: Any) -> StageCosts:
        done.append(args)
        return measure(*args)

    monkeypatch.setattr(module, "measure", counted)
    monkeypatch.setenv("TRIFORCE_TREE_CACHE", str(tmp_path))
    cost_table._table_at.cache_clear()
    yield done
    cost_table._table_at.cache_clear()


def test_without_a_home_folder_costs_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TRIFORCE_TREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert user_table().path is None
    cost_table._table_at.cache_clear()


def test_short_requests_measure_nothing(
    pair: TinyPair, measurements: list[Any], ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring would take a good part of their time. A seed has one text while nothing is known."""
    engine = pair.load(levels=3, budget=64, recent=32, gamma=4, tree="best-first:3,2", window=64)
    more: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "eos_token_id": None, "seed": 5}
    first, again = (engine.generate(ids, **more) for _ in range(2))
    assert first.sequences.tolist() == again.sequences.tolist()
    assert not measurements
    assert not (tmp_path / "stage_costs.json").exists()
    monkeypatch.setattr(module, "_ALLOWED", 1.0)
    engine.generate(ids, max_new_tokens=800, do_sample=True, stopping_criteria=[lambda *_: True], seed=5)
    assert len(measurements) == 1


def test_engines_measure_once(
    pair: TinyPair, measurements: list[Any], ids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ALLOWED", 10.0)

    def generated(own: Engine, **options: Any) -> list[int]:
        out = own.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, **options)
        return out.sequences[0, len(ids) :].tolist()

    options = {"budget": 64, "recent": 32, "gamma": 4, "tree": "best-first:3,2", "window": 64}
    first = pair.load(levels=3, **options)
    expected = generated(first)
    assert len(measurements) == 1
    assert generated(first) == expected
    assert (tmp_path / "stage_costs.json").is_file()
    # As another process, which finds the file.
    cost_table._table_at.cache_clear()
    assert generated(pair.load(levels=3, **options), seed=3) == expected
    assert len(measurements) == 1
    # Other settings are measured for themselves; one level and fixed rounds need no costs.
    assert generated(pair.load(levels=2, **options)) == expected
    assert len(measurements) == 2
    for more in ({"levels": 1}, {"levels": 3, "rounds": 2}, {"levels": 2, "rounds": 1}):
        assert generated(pair.load(**options, **more)) == expected
    assert len(measurements) == 2
    (tmp_path / "stage_costs.json").unlink()
    cost_table._table_at.cache_clear()
    assert generated(pair.load(levels=3, **options)) == expected
    assert len(measurements) == 3


def test_no_log_without_a_reason(
    measurements: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_progress, "_PATIENCE", 60.0)
    caplog.set_level(logging.WARNING)
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1, rounds=None)
    DecodingLoop.over(program, SAMPLED, 0)
    DecodingLoop.over(program, GREEDY, 0)
    DecodingLoop.over(program, SAMPLED, 1)
    assert len(measurements) == 2, "sampling costs more than the largest score"
    assert not caplog.records
