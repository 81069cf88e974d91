"""Pages of KV slots: which are free, and in which slots the tokens of a text are."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triforce_tree.kernels.attention.prefill import capacity
from triforce_tree.runtime.devices import sent


class FreePages:
    """Gives out pages, and takes them back. Each page has one owner: a chunk, a sequence, or a node.

    Args:
        count: number of pages.
    """

    def __init__(self, count: int) -> None:
        self._free = np.ones(count, dtype=bool)

    @property
    def free(self) -> int:
        """Returns the number of pages that nobody owns."""
        return int(self._free.sum())

    def begins(self, count: int, others: Sequence[int] = ()) -> list[int]:
        """Returns the first pages of all runs of ``count`` pages, each of which is free or in ``others``."""
        free = self._free.copy()
        free[list(others)] = True
        pages = np.flatnonzero(free)
        firsts = pages[: max(0, len(pages) - count + 1)]
        found: list[int] = firsts[pages[count - 1 :] - firsts == count - 1].tolist()
        return found

    def take(self, count: int, after: int = -1, last: bool = False) -> list[int]:
        """Returns pages for a new owner, consecutive ones if possible: a prefill reads them without a copy.

        Args:
            count: the number of pages, at most ``free``.
            after: a page; the ones directly after it are taken if they are free.
            last: whether to prefer the last free pages to the first ones.
        """
        free = np.flatnonzero(self._free)
        assert count <= len(free), f"{count} pages, {len(free)} are free"
        if not count:
            return []
        if begins := self.begins(count):
            first = after + 1 if after >= 0 and after + 1 in begins else begins[-1 if last else 0]
            pages = np.arange(first, first + count)
        else:
            pages = free[-count:] if last else free[:count]
        self._free[pages] = False
        return [int(page) for page in pages]

    def give_back(self, pages: Sequence[int]) -> None:
        """Makes pages free that an owner does not need any more."""
        self._free[list(pages)] = True


def slots_in(pages: Sequence[int], first: int, stop: int, page: int) -> np.ndarray:
    """Returns the KV slots, int64, of tokens ``first`` to ``stop`` of the owner of these pages.

    Args:
        page: KV slots of a page.
    """
    tokens = np.arange(first, stop)
    return np.asarray(pages, dtype=np.int64)[tokens // page] * page + tokens % page


def selection(slots: np.ndarray, device: torch.device, spare: bool = False) -> slice | Tensor:
    """Returns an index of the slots. For consecutive slots it is a slice, which selects without a copy.

    Args:
        spare: whether another index repeats the last slot, so that a copy on a GPU has :func:`capacity`.
    """
    if len(slots) and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    if spare and device.type == "cuda":
        slots = np.pad(slots, (0, capacity(len(slots)) - len(slots)), "edge")
    return sent(torch.from_numpy(slots), device)


def wide(*parts: Tensor) -> tuple[Tensor, ...]:
    """Returns the same memory as elements of 16 or 8 bytes, where the vectors of all parts consist of these.

    PyTorch's kernels for an index move one element per thread: with elements of 2 bytes, a GPU copies at an
    eighth of its memory bandwidth.
    """
    for dtype in (torch.complex128, torch.int64):
        if all(part.dtype == parts[0].dtype and _consists_of(part, dtype) for part in parts):
            return tuple(part.view(dtype) for part in parts)
    return parts


def _consists_of(part: Tensor, dtype: torch.dtype) -> bool:
    ratio = dtype.itemsize // part.dtype.itemsize
    *strides, last = part.stride()
    return last == 1 and not any(n % ratio for n in (part.shape[-1], part.storage_offset(), *strides))
