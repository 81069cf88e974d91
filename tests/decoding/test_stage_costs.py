"""What the stages cost: measured once, kept on disk, and the same for seeded and unseeded decoding."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from program_cases import GREEDY, NEW, PROMPTS, SAMPLED, draft_of, model, program_of, references
from tiny_pair import TinyPair

from triforce_tree import Engine
from triforce_tree.decoding import cost_table, loop
from triforce_tree.decoding.cost_table import CostTable, stage_costs
from triforce_tree.decoding.draft_length import StageSeconds
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_costs import StageCosts, measure
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.runtime.stage_clock import StageClock

COSTS = StageCosts((100, 500), 0.002, (0.01, 0.03), (0.008, 0.02))
SETTINGS = {"machine": "abacus", "levels": 3}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "stage_costs.json"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """One more element for each set of stages that is measured; an empty cache folder."""
    done: list[Any] = []

    def counted(*args: Any) -> StageCosts:
        done.append(args)
        return measure(*args)

    monkeypatch.setattr(cost_table, "measure", counted)
    monkeypatch.setenv("TRIFORCE_TREE_CACHE", str(tmp_path))
    cost_table._table_at.cache_clear()
    yield done
    cost_table._table_at.cache_clear()


def test_costs_lie_on_a_line_between_lengths() -> None:
    assert COSTS.at(100) == StageSeconds(0.002, 0.01, 0.008)
    assert vars(COSTS.at(300)) == pytest.approx({"draft_round": 0.002, "verification": 0.02, "plain": 0.014})
    assert COSTS.at(1) == COSTS.at(100), "a pass costs its weights, however short the context"
    assert vars(COSTS.at(900)) == pytest.approx({"draft_round": 0.002, "verification": 0.05, "plain": 0.032})
    alone = StageCosts((64,), 1.0, (2.0,), (1.5,))
    assert alone.at(1) == alone.at(1000) == StageSeconds(1.0, 2.0, 1.5)
    bent = StageCosts((10, 20, 40), 1.0, (1.0, 1.0, 3.0), (1.0, 1.0, 1.0))
    assert [bent.at(n).verification for n in (15, 20, 30, 50)] == pytest.approx([1.0, 1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": ()},
        {"lengths": (500, 100)},
        {"verification": (0.01,)},
        {"plain": (0.02, 0.01)},
        {"plain": (0.0, 0.01)},
        {"draft_round": float("nan")},
    ],
    ids=str,
)
def test_impossible_costs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lengths|costs less|seconds"):
        StageCosts(**(vars(COSTS) | wrong))


class Slow:
    """Stages that take known times, by a clock of their own; the first run of each takes longer."""

    device = torch.device("cpu")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: Callable[[int], float]) -> None:
        self._seconds, self.now, self.length = seconds, 0.0, 0
        self.runs: list[tuple[str, int]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    @property
    def stage_names(self) -> list[str]:
        return list(self._seconds)

    @contextmanager
    def trial(self, length: int) -> Iterator[Callable[[], None]]:
        yield lambda: setattr(self, "length", length)
        self.length = 0

    def run(self, name: str, generator: torch.Generator) -> None:
        first = (name, self.length) not in self.runs
        self.now += self._seconds[name](self.length) * (5 if first else 1)
        self.runs.append((name, self.length))
        self.length = -1  # passes move texts on: the next run must begin anew


def test_stages_are_measured_at_two_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Slow(
        monkeypatch, draft=lambda n: 1e-3, retrieval_refresh=lambda n: 4e-3, retrieval=lambda n: 2e-3,
        target=lambda n: 1e-3 + n * 1e-6, plain=lambda n: 1e-3 + n * 0.5e-6,
    )  # fmt: skip
    found = measure(stages, 8000)
    assert found.lengths == (1024, 8000)
    assert found.draft_round == pytest.approx(5e-3)
    assert found.verification == pytest.approx((2e-3, 9e-3), rel=0.02)
    assert found.plain == pytest.approx((1.5e-3, 5e-3), rel=0.02)
    assert "retrieval" not in dict(stages.runs), "every round chooses"
    assert len(stages.runs) <= 36
    assert all(float(f"{s:.1e}") == s for s in (found.draft_round, *found.verification, *found.plain))
    # Every fourth round chooses; only the first one does.
    assert measure(stages, 8000, refresh=4).draft_round == pytest.approx(1e-3 + (4e-3 + 3 * 2e-3) / 4)
    assert measure(stages, 8000, refresh=0).draft_round == pytest.approx(3e-3)
    assert measure(stages, 3).lengths == (1, 3)
    assert measure(stages, 1).lengths == (1,)


def test_slow_stages_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Slow(monkeypatch, draft=lambda n: 0.1, target=lambda n: 1.0, plain=lambda n: 2.0 - n * 1e-4)
    found = measure(stages, 1000)
    assert len(stages.runs) == 5
    assert found.plain[0] == found.plain[1], "a longer context costs no less, whatever was measured"


def test_an_offloaded_cache_costs_its_bytes_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial runs transfer next to nothing."""
    monkeypatch.setattr("triforce_tree.decoding.stage_costs.bandwidths", lambda device: (1e9, 1e12))
    stages = Slow(monkeypatch, draft=lambda n: 1e-3, target=lambda n: 3e-3, plain=lambda n: 2e-3)
    found = measure(stages, 1000, 1, lambda tokens, plain: tokens * (5000 if plain else 10_000))
    assert found.lengths == (200, 400, 600, 800, 1000)
    assert found.verification == pytest.approx((3e-3, 4e-3, 6e-3, 8e-3, 10e-3))
    assert found.plain == pytest.approx((2e-3, 2e-3, 3e-3, 4e-3, 5e-3))


def test_the_file_keeps_costs_by_their_settings(place: Path) -> None:
    table = CostTable(place)
    assert table.find(SETTINGS) is None
    assert table.add(SETTINGS, COSTS) == COSTS
    assert CostTable(place).find(dict(reversed(SETTINGS.items()))) == COSTS
    assert CostTable(place).find(SETTINGS | {"levels": 2}) is None
    [entry] = json.loads(place.read_text())["entries"].values()
    assert entry["settings"] == SETTINGS
    assert list(place.parent.iterdir()) == [place], "no temporary file is left"


def test_writers_at_the_same_time_agree(place: Path) -> None:
    """Each keeps what others have written, and goes by the first one's costs."""
    other = StageCosts((7,), 1.0, (1.0,), (1.0,))
    tables = [CostTable(place), CostTable(place), CostTable(place)]
    assert all(table.find(SETTINGS) is None for table in tables)
    assert tables[0].add(SETTINGS, COSTS) == COSTS
    assert tables[1].add(SETTINGS | {"levels": 2}, other) == other
    assert tables[2].add(SETTINGS, other) == COSTS
    fresh = CostTable(place)
    assert (fresh.find(SETTINGS), fresh.find(SETTINGS | {"levels": 2})) == (COSTS, other)


def test_the_oldest_entries_leave(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_table, "MOST_ENTRIES", 3)
    table = CostTable(place)
    for levels in range(5):
        table.add({"levels": levels}, COSTS)
    assert [CostTable(place).find({"levels": n}) is None for n in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "content, needed",
    {
        "no JSON": ("{", "cannot be read"),
        "no UTF-8": (b"\xff\xfe\x00", "cannot be read"),
        "a list": ("[]", "is no table of version 1"),
        "another version": ('{"version": 99, "entries": {}}', "is no table of version 1"),
        "deep": ("[" * 900 + "]" * 900, "cannot be read"),
    }.values(),
)
def test_a_damaged_file_is_replaced(
    place: Path, content: str | bytes, needed: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.parent.mkdir()
    place.write_bytes(content if isinstance(content, bytes) else content.encode())
    table = CostTable(place)
    assert table.find(SETTINGS) is None
    assert table.find({}) is None
    [record] = caplog.records
    assert needed in record.getMessage()
    assert str(place) in record.getMessage()
    table.add(SETTINGS, COSTS)
    assert CostTable(place).find(SETTINGS) == COSTS
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": "x"},
        {"plain": [0.1]},
        {"draft_round": None},
        {"draft_round": -1},
        {"lengths": [float("inf")]},
    ],
    ids=str,
)
def test_a_damaged_entry_is_measured_anew(place: Path, change: dict[str, Any]) -> None:
    CostTable(place).add(SETTINGS, COSTS)
    held = json.loads(place.read_text())
    [key] = held["entries"]
    for entry in (held["entries"][key] | change, 3, {}):
        place.write_text(json.dumps({"version": 1, "entries": {key: entry}}))
        assert CostTable(place).find(SETTINGS) is None
        CostTable(place).add(SETTINGS, COSTS)
        assert CostTable(place).find(SETTINGS) == COSTS
    place.write_text('{"version": 1, "entries": 5}')
    assert CostTable(place).find(SETTINGS) is None


def test_without_a_folder_costs_are_kept_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    table = CostTable(tmp_path / "file" / "stage_costs.json")
    for levels in (2, 3):
        assert table.find({"levels": levels}) is None
        table.add({"levels": levels}, COSTS)
        assert table.find({"levels": levels}) == COSTS
    [record] = caplog.records
    assert "measured by this process; TRIFORCE_TREE_CACHE names another folder" in record.getMessage()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TRIFORCE_TREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cost_table.user_table().path is None
    assert cost_table.user_table().add(SETTINGS, COSTS) == COSTS
    cost_table._table_at.cache_clear()


def test_engines_measure_once(
    pair: TinyPair, measurements: list[Any], ids: list[int], tmp_path: Path
) -> None:
    def written(own: Engine, **options: Any) -> list[int]:
        out = own.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, **options)
        return out.sequences[0, len(ids) :].tolist()

    options = {"budget": 64, "recent": 32, "gamma": 4, "tree": "best-first:3,2", "window": 64}
    first = pair.load(levels=3, **options)
    text = written(first)
    assert len(measurements) == 1
    assert written(first) == text
    assert (tmp_path / "stage_costs.json").is_file()
    # Another process finds the file.
    cost_table._table_at.cache_clear()
    assert written(pair.load(levels=3, **options), seed=3) == text
    assert len(measurements) == 1
    # Other settings cost something else; one level and fixed rounds choose nothing.
    assert written(pair.load(levels=2, **options)) == text
    assert len(measurements) == 2
    for more in ({"levels": 1}, {"levels": 3, "rounds": 2}, {"levels": 2, "rounds": 1}):
        assert written(pair.load(**options, **more)) == text
    assert len(measurements) == 2
    (tmp_path / "stage_costs.json").unlink()
    cost_table._table_at.cache_clear()
    assert written(pair.load(levels=3, **options)) == text
    assert len(measurements) == 3


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("levels", [2, 3])
def test_measuring_leaves_the_cache_as_it_was(levels: int) -> None:
    """Prompts that are in the cache need only be rewound."""
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3, rounds=None)
    begun = Decoder(program, GREEDY, 0)
    begun.prefill(PROMPTS)
    rows = [program.store.kv[:, :, b, :, : len(prompt) - 1].clone() for b, prompt in enumerate(PROMPTS)]
    found = stage_costs(program, GREEDY, CostTable(None))
    assert found.lengths == (37, 149)
    for b, before in enumerate(rows):
        assert torch.equal(program.store.kv[:, :, b, :, : before.shape[-2]], before)
    program.rewind(PROMPTS)
    new: list[list[int]] = [[] for _ in PROMPTS]
    for blocks in begun.decode(PROMPTS, [Ending(count) for count in NEW]):
        for text, block in zip(new, blocks, strict=True):
            text += block
    assert new == references()


def rounds_of(program: DecodingProgram, seed: int, repeatable: bool) -> tuple[list[int], list[int]]:
    """The rounds of each pass, and the text."""
    own = Decoder(program, SAMPLED, seed, repeatable)
    own.prefill(PROMPTS[:1])
    asked, chosen = own.controller.rounds, []

    def noted() -> int:
        chosen.append(asked())
        return chosen[-1]

    own.controller.rounds = noted
    blocks = own.decode(PROMPTS[:1], [Ending(60)])
    return chosen, [token for [block] in blocks for token in block]


@pytest.mark.parametrize("levels", [2, 3])
def test_a_seed_chooses_by_the_table_alone(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 1, gamma=8, rounds=None)
    # Costs at which the two levels draft at first and then pause.
    a_round = 0.2 if levels == 3 else 1.4
    monkeypatch.setattr(loop, "stage_costs", lambda *_: StageCosts((100,), a_round, (1.2,), (1.0,)))
    as_in_the_table = {
        "draft": a_round,
        "retrieval_refresh": 0.0,
        "retrieval": 0.0,
        "target": 1.2,
        "plain": 1.0,
    }
    dear_on_the_clock = as_in_the_table | {"draft": 20.0}

    def clocked(stages: dict[str, float]) -> None:
        def seconds(self: StageClock) -> dict[str, float]:
            names = [name for name, _ in self._times[1:]]
            return {name: stages[name] * names.count(name) for name in names}

        monkeypatch.setattr(StageClock, "seconds", seconds)

    seen = []
    for stages, repeatable in (
        (as_in_the_table, True),
        (as_in_the_table, False),
        (dear_on_the_clock, True),
        (dear_on_the_clock, False),
    ):
        clocked(stages)
        seen.append(rounds_of(program, 5, repeatable))
    assert len(set(seen[0][0])) > 1
    assert seen[0] == seen[1], "with and without a seed, from equal costs and observations"
    assert seen[0] == seen[2], "a seed goes by no clock"
    assert sum(seen[3][0]) < sum(seen[2][0]), "without one, measured times count"


def test_two_levels_fall_back_to_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random draft whose trees cost as much as many passes."""
    monkeypatch.setattr(loop, "stage_costs", lambda *_: StageCosts((100,), 1.5, (1.5,), (1.0,)))
    program = program_of(model("llama-gqa"), model("llama"), 2, 3, rounds=None)
    new: list[list[int]] = [[] for _ in PROMPTS]
    own = Decoder(program, GREEDY, 0, repeatable=True)
    own.prefill(PROMPTS)
    for blocks in own.decode(PROMPTS, [Ending(count) for count in NEW]):
        for text, block in zip(new, blocks, strict=True):
            text += block
    assert new == references()
    draft, target = own.levels
    assert 0 < draft.forwards / program.drafter.depth < 0.5 * target.forwards


def test_no_log_without_a_reason(measurements: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1, rounds=None)
    Decoder(program, SAMPLED, 0)
    Decoder(program, GREEDY, 0)
    Decoder(program, SAMPLED, 1)
    assert len(measurements) == 2, "sampling costs more than the largest score"
    assert not caplog.records
