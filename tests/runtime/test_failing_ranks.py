"""Ranks of which one dies, raises an error, is slow, has less memory, or is called with other arguments.

CPU and gloo; with ``-m gpu`` and two GPUs also NCCL and kernels that wait for the other GPU.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import greedy, tiny
from tests.support.processes.failing_ranks import NEW, PROMPT
from tests.support.processes.processes import ROOT, Ended, ranks_of

SCRIPT = ROOT / "tests" / "support" / "processes" / "failing_ranks.py"
ENDED = "has ended without a message; its process was killed, or its machine failed"
# Numbers of ranks, and of those that split the text by position.
SPLITS = pytest.mark.parametrize("size, positions", [(2, 1), (2, 2), (4, 2)])


def run(
    job: str, folder: Path, size: int = 2, positions: int = 1, seed: int = 0, fails: int | None = None
) -> tuple[list[Ended], list[Any]]:
    """Returns how each rank has ended, and what it has seen, None if it wrote nothing.

    It fails if the ranks do not end in a few minutes; collectives alone would wait for ten.
    """
    words = [str(folder), str(positions), str(size - 1 if fails is None else fails), str(seed)]
    ranks = ranks_of([str(SCRIPT), job, *words], size)
    files = [folder / f"{rank}.json" for rank in range(size)]
    return ranks, [json.loads(file.read_text()) if file.exists() else None for file in files]


def expected() -> list[int]:
    return greedy(tiny("llama-gqa"), PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))


@pytest.mark.slow
class TestOneRankFails:
    @SPLITS
    def test_killed_while_decoding(self, tmp_path: Path, size: int, positions: int) -> None:
        ranks, seen = run("in_decoding", tmp_path, size, positions)
        assert [rank.code for rank in ranks] == [0] * (size - 1) + [-9], ranks
        error = f"LostRankError: rank {size - 1} {ENDED}"
        assert seen[:-1] == [[expected(), error, error]] * (size - 1)

    @SPLITS
    def test_killed_during_the_prefill(self, tmp_path: Path, size: int, positions: int) -> None:
        ranks, seen = run("in_prefill", tmp_path, size, positions)
        assert [rank.code for rank in ranks] == [0] * (size - 1) + [-9], ranks
        assert seen[:-1] == [f"LostRankError: rank {size - 1} {ENDED}"] * (size - 1)

    @SPLITS
    def test_killed_while_loading(self, tmp_path: Path, size: int, positions: int) -> None:
        seed = random.randrange(1000)
        ranks, seen = run("in_load", tmp_path, size, positions, seed)
        assert [rank.code for rank in ranks] == [0] * (size - 1) + [-14], (seed, ranks)
        assert seen[:-1] == [f"LostRankError: rank {size - 1} {ENDED}"] * (size - 1), seed

    @pytest.mark.parametrize("fails", [0, 2])
    def test_killed_while_the_others_wait_for_ever(self, tmp_path: Path, fails: int) -> None:
        ranks, _ = run("stuck", tmp_path, 3, 3, fails=fails)
        assert [rank.code for rank in ranks] == [-9 if rank == fails else 1 for rank in range(3)], ranks
        first = 0 if fails else 1
        said = [rank.err.count(f"triforce-tree, rank {first}: rank {fails} {ENDED}\n") for rank in ranks]
        assert said == [int(rank == first) for rank in range(3)]

    def test_the_command_says_it_once(self, tmp_path: Path) -> None:
        ranks, _ = run("command", tmp_path, 3)
        assert [rank.code for rank in ranks] == [1, 1, -9], ranks
        assert f"triforce-tree, rank 0: rank 2 {ENDED}\n" in ranks[0].err
        assert "rank" not in ranks[1].err

    def test_an_error_that_its_program_catches_ends_the_others(self, tmp_path: Path) -> None:
        ranks, seen = run("raises", tmp_path, 4, 2)
        assert [rank.code for rank in ranks] == [1, 1, 1, 0], ranks
        [first, later] = seen[3]
        assert first.startswith("OutOfMemoryError: memory ran out on rank 3 of 4 (")
        # The error reaches one other rank's stderr, and that rank says it in one line.
        why = first.removeprefix("OutOfMemoryError: ")
        said = [rank.err.count(f"triforce-tree, rank 0: rank 3 failed: {why}\n") for rank in ranks]
        assert said == [1, 0, 0, 0]
        assert later.startswith("LostRankError: rank ")

    def test_an_error_that_ends_its_process_ends_the_others(self, tmp_path: Path) -> None:
        ranks, seen = run("ends", tmp_path, 4, 2)
        assert [rank.code for rank in ranks] == [0, 0, 0, 1], ranks
        assert seen == [*["LostRankError: rank 3 failed: this rank has too little memory"] * 3, None]

    def test_an_error_of_all_ranks_leaves_them_together(self, tmp_path: Path) -> None:
        ranks, seen = run("alike", tmp_path)
        assert seen == [["RuntimeError: the criterion is broken", expected()]] * 2, ranks

    def test_a_call_after_a_rank_has_left_is_refused(self, tmp_path: Path) -> None:
        _, seen = run("leaves", tmp_path)
        error = "LostRankError: rank 1 left after 2 calls, and this is call 3; all ranks must make the same"
        assert seen == [[expected(), error], [expected()]]


@pytest.mark.slow
@SPLITS
def test_ranks_wait_for_one_that_is_slow(tmp_path: Path, size: int, positions: int) -> None:
    seed = random.randrange(1000)
    ranks, seen = run("delayed", tmp_path, size, positions, seed)
    assert [rank.code for rank in ranks] == [0] * size, (seed, ranks)
    assert all(tokens == [expected()] * len(tokens) for tokens in seen), seed
    assert len({len(tokens) for tokens in seen}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size, positions", [(2, 1), (4, 2)])
def test_different_arguments_are_refused_on_every_rank(tmp_path: Path, size: int, positions: int) -> None:
    ranks, seen = run("arguments", tmp_path, size, positions)
    names = {"splits": "options of load", "lengths": "generation options", "criteria": "generation options"}
    names["temperatures"] = "generation options"
    for found in seen:
        assert found is not None, ranks
        assert found.pop("tokens") == expected()
        for what, error in found.items():
            differ = f"{names.get(what, what)} of rank {size - 1} differ from rank 0's; under torchrun"
            assert error.startswith(f"ValueError: {differ}"), what


@pytest.mark.slow
def test_the_rank_with_least_memory_decides(tmp_path: Path) -> None:
    ranks, seen = run("memory", tmp_path, 2, 2)
    assert seen[0] is not None, ranks
    assert seen[0] == seen[1]
    # Half of the 64 GiB of rank 1, less what is left to the system; rank 0 has 128 GiB.
    assert 16 < sum(seen[0]["plan"]["device_gib"].values()) < 32
    assert seen[0]["enough"] == ""
    assert seen[0]["little"].startswith("DoesNotFitError: a prompt of 150 tokens needs at least ")
    assert ", but the host of rank 1 has 0.3 GiB; use a smaller model" in seen[0]["little"]
    refused = (
        "DoesNotFitError: keys and values of 1,024 tokens need 0.0 GiB on every rank, and rank 1 has 0.0"
    )
    assert seen[0]["device"].startswith(refused)
    assert seen[0]["tokens"] == expected()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("job", ["in_decoding", "raises"])
def test_a_rank_that_fails_on_a_gpu_ends_the_other(tmp_path: Path, job: str, positions: int) -> None:
    # The other rank waits in NCCL, or in a kernel that nothing else would end.
    ranks, seen = run(job, tmp_path, 2, positions)
    assert ranks[1].code == (-9 if job == "in_decoding" else 0), ranks
    why = ENDED if job == "in_decoding" else "failed: memory ran out"
    assert f"rank 1 {why}" in ranks[0].err + json.dumps(seen[0])
