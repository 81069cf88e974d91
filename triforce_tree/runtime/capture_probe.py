"""Finds out by a trial whether a CUDA graph can capture code of other libraries."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.runtime.executor import Captured

# The largest relative difference between the results of a replayed graph and a direct call. 16-bit sums in
# another order differ by less; a graph that replays results of an earlier input differs by about 1.
_MOST_ERROR = 0.2


def why_not_capturable(run: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> str | None:
    """Returns the reason why a CUDA graph cannot capture ``run``; None if it can.

    ``run`` is called directly, then in a mode in which every wait for the device raises an error; then it is
    captured on ``first`` and replayed on ``second``.

    Args:
        run: computes a tensor from its argument, whose address does not change. It must have no side effects.
        first, second: inputs of one shape on the device, with different results.

    Raises:
        torch.OutOfMemoryError: memory ran out, so nothing is known about the code.
    """
    source, results = first.clone(), [torch.empty(0, device="cpu")]

    def once() -> None:
        results[0] = run(source)

    try:
        once()
        with _waits_are_errors(first.device):
            once()
        pool = torch.cuda.graph_pool_handle() if first.device.type == "cuda" else None
        captured = Captured(once, first.device, pool)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # third-party code may raise anything
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:160]}"
    source.copy_(second)
    captured()
    replayed = results[0].float()
    direct = run(second).float()
    difference = float((replayed - direct).norm() / direct.norm().clamp_min(1e-30))
    if not difference <= _MOST_ERROR:
        return f"a replayed graph differs from a direct call (relative difference {difference:.2g})"
    return None


@contextmanager
def _waits_are_errors(device: torch.device) -> Iterator[None]:
    """Makes torch raise an error inside the context if an operation makes the host wait for a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # torch warns that this mode is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
