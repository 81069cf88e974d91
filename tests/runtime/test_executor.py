"""Captured steps on a GPU."""

import pytest
import torch

from triforce_tree.runtime.executor import Step, executor

SIZE = 2048


@pytest.mark.gpu
def test_graphs_outlive_cleared_cublas_workspaces() -> None:
    """torch.compile(mode="reduce-overhead") frees the workspaces that captured products write into."""
    device = torch.device("cuda")
    # Few outputs over a long sum: cuBLAS splits it, and keeps the parts in its workspace.
    left = torch.randn(8, 64 * SIZE, device=device, dtype=torch.bfloat16)
    right = torch.randn(64 * SIZE, SIZE // 16, device=device, dtype=torch.bfloat16)
    out = torch.empty(8, SIZE // 16, device=device, dtype=torch.bfloat16)
    run = executor([Step(lambda: torch.mm(left, right, out=out))], device)
    run()
    expected = out.clone()

    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((SIZE, SIZE), 7.0, device=device) for _ in range(64)]
    out.fill_(float("nan"))
    run()
    torch.cuda.synchronize()

    assert torch.equal(out, expected)
    assert all(bool((other == 7).all()) for other in others)
