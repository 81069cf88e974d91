"""Captured steps on a GPU."""

import gc

import pytest
import torch

from triforce_tree.runtime.executor import Step, executor

SIZE = 2048


class Product:
    """A matrix product with few outputs and long sums, whose partial sums cuBLAS keeps in its workspace."""

    def __init__(self) -> None:
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.left = torch.randn(8, 64 * SIZE, **kind)
        self.right = torch.randn(64 * SIZE, SIZE // 16, **kind)
        self.out = torch.empty(8, SIZE // 16, **kind)
        self.run = executor([Step(self.multiply)], torch.device("cuda"))
        self.run()
        self.expected = self.out.clone()

    def multiply(self) -> None:
        torch.mm(self.left, self.right, out=self.out)

    def check(self) -> None:
        """Replays the graph while new tensors occupy free memory, and checks that they are unchanged."""
        torch.cuda.empty_cache()
        others = [torch.full((SIZE, SIZE), 7.0, device="cuda") for _ in range(64)]
        self.out.fill_(float("nan"))
        self.run()
        torch.cuda.synchronize()
        assert torch.equal(self.out, self.expected)
        assert all(bool((other == 7).all()) for other in others)


@pytest.mark.gpu
def test_graphs_outlive_cleared_cublas_workspaces() -> None:
    """torch.compile(mode="reduce-overhead") frees the workspaces that captured products write into."""
    product = Product()
    torch._C._cuda_clearCublasWorkspaces()
    product.check()


@pytest.mark.gpu
def test_graphs_outlive_those_of_the_same_stream() -> None:
    """From torch 2.12 on, a graph that is destroyed frees the workspaces of the stream it was captured on."""
    products = [Product() for _ in range(4)]
    for ended in (2, 0):
        del products[ended]
        gc.collect()
        for product in products:
            product.check()
    # This graph is captured after others were destroyed, by a step without workspace.
    out = torch.zeros(1, device="cuda")
    executor([Step(lambda: out.add_(1))], torch.device("cuda"))
    for product in products:
        product.check()


@pytest.mark.gpu
def test_the_garbage_collector_waits_for_the_end_of_a_capture() -> None:
    collecting: list[bool] = []
    out = torch.zeros(1, device="cuda")

    def step() -> None:
        collecting.append(gc.isenabled())
        out.add_(1)

    executor([Step(step)], torch.device("cuda"))
    assert collecting
    assert not any(collecting)
    assert gc.isenabled()
