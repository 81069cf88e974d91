"""Piecewise captured steps: the order of calls, and on a GPU the same results as direct calls."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triforce_tree
from triforce_tree.runtime import executor as module
from triforce_tree.runtime.executor import CapturedInPieces, Cuts, Step, executor


class _FakeGraphs:
    """Emulates CUDA graphs on a CPU: captured calls are stored and run by a replay, others run at once."""

    def __init__(self) -> None:
        self.capturing: list[Callable[[], None]] | None = None
        self.done: list[str] = []

    def kernel(self, name: str) -> None:
        def run() -> None:
            self.done.append(name)

        if self.capturing is None:
            run()
        else:
            self.capturing.append(run)

    def graph(self) -> Any:
        kernels: list[Callable[[], None]] = []

        def begin(**_: Any) -> None:
            assert self.capturing is None
            self.capturing = kernels

        def end() -> None:
            assert self.capturing is kernels
            self.capturing = None

        def replay() -> None:
            assert self.capturing is None
            for kernel in kernels:
                kernel()

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=replay)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _FakeGraphs:
    graphs = _FakeGraphs()
    side = SimpleNamespace(wait_stream=lambda _: None)
    cuda = SimpleNamespace(
        CUDAGraph=graphs.graph,
        graph_pool_handle=lambda: None,
        current_stream=lambda _: side,
        stream=lambda _: torch.no_grad(),
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, no_grad=torch.no_grad))
    monkeypatch.setattr(module, "_side_stream", lambda _: side)
    monkeypatch.setattr(module, "_hold_workspace", lambda *_: None)
    return graphs


def test_pieces_are_called_recorded_then_replayed(fake: _FakeGraphs) -> None:
    key, calls, pieces = [1], [0], [2]
    cuts = Cuts(lambda: key[0])

    def run() -> None:
        calls[0] += 1
        fake.kernel("before")
        for layer in range(2):
            # The streamed data are looked up in each call.
            cuts.outside(lambda layer=layer: [fake.kernel(f"{layer}.{n}") for n in range(pieces[0])])  # type: ignore[misc]
            fake.kernel(f"after {layer}")

    step = CapturedInPieces(run, cuts, torch.device("cuda"))
    expected = ["before", "0.0", "0.1", "after 0", "1.0", "1.1", "after 1"]
    for called in (1, 2, 2, 2):
        fake.done.clear()
        step()
        assert (fake.done, calls[0]) == (expected, called)

    pieces[0] = 1
    fake.done.clear()
    step()
    assert (fake.done, calls[0]) == (["before", "0.0", "after 0", "1.0", "after 1"], 2)

    key[0] = 2
    for called in (3, 4, 4):
        step()
        assert calls[0] == called
    # The pieces of the first key were removed by the first call with the other key.
    key[0] = 1
    step()
    assert calls[0] == 5


def test_an_error_ends_the_capture(fake: _FakeGraphs) -> None:
    cuts = Cuts(lambda: 0)
    fails = [False]

    def run() -> None:
        fake.kernel("a")
        if fails[0]:
            raise torch.OutOfMemoryError("no memory")
        cuts.outside(lambda: fake.kernel("b"))

    step = CapturedInPieces(run, cuts, torch.device("cuda"))
    step()
    fails[0] = True
    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert fake.capturing is None
    fails[0] = False
    fake.done.clear()
    step()
    step()
    assert fake.done == ["a", "b", "a", "b"]


@pytest.mark.gpu
def test_pieces_compute_what_calls_do() -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randn(4, 256, 256, device=device, generator=generator)
    x, out, added = (torch.full((8, 256), float("nan"), device=device) for _ in range(3))
    cuts = Cuts(lambda: 0)

    def run() -> None:
        hidden = x
        for weight in weights:
            hidden = torch.tanh(hidden @ weight)
            given = torch.empty_like(hidden)
            # The size changes in each call, which a graph could not capture.
            cuts.outside(lambda hidden=hidden, given=given: given.copy_(hidden + added[: rows[0]].sum(0)))  # type: ignore[misc]
            hidden = given
        out.copy_(hidden)

    rows = [0]
    run_step = executor([Step(run, cuts)], device)
    for rows[0] in (1, 2, 3, 8, 5):
        x.normal_(generator=generator)
        added.normal_(generator=generator)
        run()
        expected = out.clone()
        out.fill_(float("nan"))
        run_step()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_offloaded_passes_in_pieces_emit_the_same_tokens(levels: int) -> None:
    topic = "\n".join(f"Line {i} of a text about caches and trees." for i in range(2000))
    prompts = [topic[:length] for length in (9_000, 40_000, 9_000)]
    on_card = triforce_tree.load(device="cuda", dtype="float32", levels=levels)
    expected = [on_card.generate(prompt, max_new_tokens=64).sequences for prompt in prompts]
    offloaded = triforce_tree.load(device="cuda", dtype="float32", levels=levels, offload=True)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert torch.equal(offloaded.generate(prompt, max_new_tokens=64).sequences, tokens)
