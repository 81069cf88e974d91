"""Threads of the C kernels: results do not depend on who runs a task, also after a fork."""

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.cpu.fp32.linear import linear, matrix
from triforce_tree.kernels.cpu.fp32.noise import fill_exponential

pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels here")


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def results(seed: int, repeats: int = 50) -> list[Tensor]:
    """Returns calls of other sizes each, whose outputs are compared with those of one thread."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for repeat in range(repeats):
        x = torch.randn(1 + repeat % 7, 96, generator=generator)
        weight = torch.randn(24 + 31 * (repeat % 9), 96, generator=generator)
        noise = torch.empty(100 + 997 * (repeat % 20))
        fill_exponential(noise, generator)
        found += [linear(x, matrix(weight)), noise]
    return found


def expected(seed: int) -> list[Tensor]:
    torch.set_num_threads(1)
    found = results(seed)
    torch.set_num_threads(4)
    return found


def test_threads_of_python_may_call_at_once() -> None:
    wanted, found = [expected(seed) for seed in range(4)], dict[int, list[Tensor]]()
    threads = [threading.Thread(target=lambda n: found.update({n: results(n)}), args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, own in enumerate(wanted):
        assert all(map(torch.equal, own, found[seed]))


def _compare(there: Connection, wanted: list[Tensor]) -> None:
    there.send(all(map(torch.equal, wanted, results(0))))


def test_a_forked_process_has_helpers_of_its_own() -> None:
    wanted = expected(0)
    assert all(map(torch.equal, wanted, results(0)))
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_compare, args=(there, wanted))
    child.start()
    assert here.poll(60)
    assert here.recv()
    child.join(60)
    assert child.exitcode == 0
