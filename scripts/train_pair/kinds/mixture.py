"""Training slices of several kinds of text in given shares, of real texts and of those the target wrote."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scripts.benchmarks.sources.registry import CODE, DIALOGUE, DOCUMENTATION, PROSE, VERSE

# Manuals as plain text: the first that a draft forgets when it learns other kinds.
MANUALS = "manuals"
# Of the training slices; kinds that a file lacks are left out.
SHARES = {MANUALS: 0.36, DOCUMENTATION: 0.1, PROSE: 0.22, CODE: 0.14, VERSE: 0.09, DIALOGUE: 0.09}


def slices(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Returns int64 ``[rows, length]``: random slices of ``tokens``, read as a ring."""
    starts = torch.randint(len(tokens), (rows, 1), generator=generator)
    at = (starts + torch.arange(length)) % len(tokens)
    return tokens[at.to(tokens.device)].long()


class Mixture:
    """Draws slices from files of tokens by kind.

    Args:
        files: of real texts and, where there is one, of what the target wrote (``samples``).
        written: share of the slices of the last file, where there are two.
        device: where tokens are kept.
        seed: of the draws.
        shares: of the kinds.

    Raises:
        ValueError: no file has any of these kinds.
    """

    def __init__(
        self, files: Sequence[Path], written: float, device: torch.device, seed: int,
        shares: Mapping[str, float] = SHARES,
    ) -> None:  # fmt: skip
        self._arrays: list[Tensor] = []
        weights: list[float] = []
        for number, path in enumerate(files):
            part = 1.0 if len(files) == 1 else (1 - written, written)[number]
            with np.load(path) as file:
                kinds = [kind for kind in shares if kind in file]
                self._arrays += [torch.from_numpy(file[kind].astype(np.int32)).to(device) for kind in kinds]
            weights += [part * shares[kind] for kind in kinds]
        if not weights:
            raise ValueError(
                f"{', '.join(map(str, files))}: none of {', '.join(shares)}; see scripts.train_pair.text"
            )
        self._weights = torch.tensor(weights)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of all files together."""
        return sum(map(len, self._arrays))

    def __call__(self, rows: int, length: int) -> Tensor:
        """Returns int64 ``[rows, length]``, each row of one kind."""
        chosen = torch.multinomial(self._weights, rows, replacement=True, generator=self._generator)
        return torch.cat([slices(self._arrays[i], 1, length, self._generator) for i in chosen.tolist()])
