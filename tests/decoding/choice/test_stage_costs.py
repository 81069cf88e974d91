"""What the stages cost: measured at two context lengths, and interpolated between them."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    draft_of,
    finished,
    model,
    program_of,
    references,
    sequences_of,
)
from triforce_tree.decoding.choice.cost_table import CostTable, stage_costs
from triforce_tree.decoding.choice.passes import StageSeconds
from triforce_tree.decoding.choice.stage_costs import Allowance, StageCosts, measure
from triforce_tree.decoding.loop import DecodingLoop

COSTS = StageCosts(
    (100, 500),
    (
        StageSeconds(0.008, 0.001, 0.001, chain=0.01, root=0.008),
        StageSeconds(0.02, 0.001, 0.001, chain=0.03, root=0.02),
    ),
)


def test_costs_are_interpolated_between_lengths() -> None:
    assert COSTS.at(100) == COSTS.seconds[0]
    level_0 = {"draft": 0.001, "retrieval": 0.001, "prepare": 0.0, "tree": float("inf")}
    between = level_0 | {"plain": 0.014, "chain": 0.02, "root": 0.014}
    assert vars(COSTS.at(300)) == pytest.approx(between)
    assert COSTS.at(1) == COSTS.at(100), "a pass costs its weights, however short the context"
    beyond = level_0 | {"plain": 0.032, "chain": 0.05, "root": 0.032}
    assert vars(COSTS.at(900)) == pytest.approx(beyond)
    alone = StageCosts((64,), (StageSeconds(1.5, 1.0, tree=2.0),))
    assert alone.at(1) == alone.at(1000) == StageSeconds(1.5, 1.0, tree=2.0)
    bent = StageCosts((10, 20, 40), tuple(StageSeconds(1.0, 1.0, tree=tree) for tree in (1.0, 1.0, 3.0)))
    assert [bent.at(n).tree for n in (15, 20, 30, 50)] == pytest.approx([1.0, 1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": ()},
        {"lengths": (500, 100)},
        {"seconds": COSTS.seconds[:1]},
        {"seconds": COSTS.seconds[::-1]},
    ],
    ids=str,
)
def test_impossible_costs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lengths|costs less"):
        StageCosts(**(vars(COSTS) | wrong))
    for seconds in ({"plain": 0.0}, {"plain": 1.0, "draft": float("nan")}, {"plain": 1.0, "prepare": -1.0}):
        with pytest.raises(ValueError, match=r"seconds must be above 0"):
            StageSeconds(**seconds)


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
    """All samples after the warm-up but one take forty times as long: another process has the cores."""
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
        found = measure(stages, 8000, allowance=Allowance(passes))
        assert found.seconds[0].chain > found.seconds[0].plain > found.seconds[0].draft
        spent.append(stages.now)
        assert passes > 8 or stages.runs.count(("target_tree", 8000)) == 1
        # The first run of each stage takes five times as long in this simulation.
        assert stages.now <= 5 * 4e-3 * max(passes, 16)
    assert spent == sorted(spent)
    short, long = (Allowance.of(tokens, 128, torch.device("cpu")) for tokens in (20_000, 40_000))
    assert not short.suffices
    assert long.suffices


def test_an_offloaded_cache_costs_its_bytes_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial runs transfer next to nothing."""
    monkeypatch.setattr("triforce_tree.decoding.choice.stage_costs.bandwidths", lambda device: (1e9, 1e12))
    stages = SlowStages(
        monkeypatch, draft=lambda n: 1e-3, target=lambda n: 3e-3, plain=lambda n: 2e-3, root=lambda n: 1e-3
    )
    found = measure(stages, 1000, 1, lambda tokens, plain: tokens * (5000 if plain else 10_000))
    assert found.lengths == (200, 400, 600, 800, 1000)
    assert [s.chain for s in found.seconds] == pytest.approx([3e-3, 4e-3, 6e-3, 8e-3, 10e-3])
    assert [s.plain for s in found.seconds] == pytest.approx([2e-3, 2e-3, 3e-3, 4e-3, 5e-3])


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
    found = stage_costs(program, GREEDY, CostTable(None))
    assert found.lengths == (37, 149)
    for b, parts in enumerate(before):
        for now, slots in zip(program.store.kv, parts, strict=True):
            assert torch.equal(now[:, b, :, : slots.shape[-2]], slots)
    assert finished(begun, PROMPTS, NEW, again=True) == references()
