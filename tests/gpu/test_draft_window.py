"""Windows of a draft on a GPU, where one graph processes the new tokens of all sequences."""

from typing import Any

import pytest
import torch

from tests.support.models.caught_up import TEXT, begun, check_windows
from triforce_tree.loading.checkpoints import PAIR, load_model

pytestmark = pytest.mark.gpu


def pair() -> list[Any]:
    return [load_model(PAIR / name, torch.device("cuda"), torch.float32) for name in ("target", "draft")]


def test_windows_are_those_of_the_text() -> None:
    check_windows(*pair(), atol=1e-3)


@pytest.mark.parametrize("count", [1, 40])
def test_new_tokens_are_processed_by_graphs_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = begun(*pair(), [40 + b for b in range(8)])
    replays, replay = list[int](), torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    seen: list[Any] = []
    program.drafter.model.model.register_forward_pre_hook(lambda *given: seen.append(given))
    program.drafter.prepare([TEXT[: 40 + b + count] for b in range(8)], True)
    assert not seen
    assert len(replays) == -(-count // 16)
