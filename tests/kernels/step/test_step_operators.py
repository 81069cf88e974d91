"""The step operators as torch sees them: fakes, signatures, and the implementation for each device."""

import inspect
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch

from tests.support.kernels import acceptance_cases, grow_cases, step_cases
from tests.support.kernels.triton_ops import DEVICE, runs_kernels
from triforce_tree.kernels import step

SINGLE = torch.float32


@runs_kernels
def test_fakes_agree_with_the_operators(ops) -> None:
    """torch.compile needs it to keep the operators in its graph."""
    for problem in (
        step_cases.append(1, 2, 20, 3, 16, SINGLE, DEVICE),
        step_cases.move(2, 1, 2, 20, 3, 16, SINGLE, DEVICE),
        step_cases.append_to_ring(1, 2, 20, 3, 16, SINGLE, DEVICE, ring=20),
        step_cases.move_in_ring(2, 1, 2, 20, 3, 16, SINGLE, DEVICE, ring=20),
        step_cases.means(1, 2, 1, 16, 1, 16, 8, SINGLE, DEVICE),
        step_cases.selection(1, 2, 2, 20, 16, 5, SINGLE, DEVICE),
        acceptance_cases.traversal(2, 5, 7, DEVICE),
        acceptance_cases.greedy(2, 5, 7, DEVICE),
        acceptance_cases.runner_up(1, 2, 5, True, DEVICE),
        grow_cases.beginning(2, 4, (3, 2), 20, DEVICE),
        grow_cases.expansion(2, 2, 7, 3, SINGLE, True, DEVICE, 0.5),
        grow_cases.expansion(1, 2, 7, 3, SINGLE, False, DEVICE),
        grow_cases.placement(2, 3, 2, 2, DEVICE),
        grow_cases.placement(2, 3, 2, 2, DEVICE, fixed=True, last=True),
    ):
        checks = ("test_schema", "test_faketensor")
        overload = getattr(step, problem.op).overload
        torch.library.opcheck(overload, problem.copied(), test_utils=checks)


def test_triton_is_imported_for_cuda_tensors_only() -> None:
    root = Path(__file__).parents[3]
    check = (
        "import sys; sys.modules['triton'] = None; import torch;"
        "from triforce_tree.kernels import exchange, step;"
        "x = torch.ones(1, 1, 4, 2); step.append_kv(x, x.clone(), x, x, torch.zeros(1, dtype=torch.int64));"
        "exchange.fetch_words(torch.zeros(3).int(), torch.ones(3).int())"
    )
    subprocess.run([sys.executable, "-c", check], cwd=root, check=True)


@runs_kernels
def test_kernels_have_the_signatures_of_their_operators(ops) -> None:
    assert len(step.__all__) == 10
    for name in step.__all__:
        operator = getattr(step, name)
        assert signature(operator) == signature(operator.definition) == signature(getattr(ops, name))
        assert inspect.getdoc(operator) == inspect.getdoc(operator.definition)
        arguments = [argument.name for argument in operator.overload._schema.arguments]
        assert list(signature(operator).parameters) == arguments


@pytest.mark.gpu
def test_operators_dispatch_by_device() -> None:
    problem = acceptance_cases.greedy(3, 16, 9, "cpu")
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in problem.args]
    for made, exact in zip(step.accept_greedy(*on_gpu), step.accept_greedy(*problem.args), strict=True):
        assert made.is_cuda
        assert torch.equal(made.cpu(), exact)
