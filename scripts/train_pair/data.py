"""Token streams and batches: packed text with planted facts and questions.

``Stream`` holds a corpus's tokens on the device and draws batches: random slices in which facts and questions
overwrite some of the text, so that a batch costs one gather and one scatter.
"""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from triforce_tree.pair import needle

SLOT = 64  # tokens reserved for one fact or question
GROUP_WEIGHTS = {"docs": 1.0, "docstrings": 1.0, "api": 0.7, "code": 0.8}


class Facts:
    """Token ids of every fact and question, tokenised once.

    Digits are single tokens, so a sentence is its head, six digit ids and its tail.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text).ids

        self.digits = [ids(str(d))[0] for d in range(10)]
        mark = "000000"
        self.heads, self.questions = [], []
        for name in needle.names():
            head, tail = needle.fact(name, mark).split(mark)
            self.heads.append(ids(head))
            self.questions.append(ids(needle.question(name) + " "))
        self.tail_ids = ids(tail)
        longest = max(map(len, self.questions)) + needle.DIGITS + len(self.tail_ids)
        if longest > SLOT:
            raise ValueError(f"a question takes {longest} tokens, over SLOT={SLOT}; raise SLOT")

    def number(self, rng: np.random.Generator) -> list[int]:
        return [self.digits[d] for d in rng.integers(0, 10, needle.DIGITS)]

    def plant(self, length: int, rng: np.random.Generator) -> list[tuple[int, list[int], str]]:
        """Pieces (position, ids, kind) for one sequence of ``length`` tokens.

        Facts lie early and questions late more often than chance, because long distances are what
        has to be learnt; some questions follow closely.
        """
        slots = length // SLOT
        low, high = (1, 2) if slots <= 16 else (2, 8) if slots <= 64 else (8, 48)
        asked = 1 if slots <= 16 else 2 if slots <= 64 else 3
        pieces: list[tuple[int, list[int], str]] = []
        used: set[int] = set()

        def place(slot: int, ids: list[int], kind: str) -> bool:
            if slot in used or slot >= slots:
                return False
            used.add(slot)
            at = slot * SLOT + int(rng.integers(0, SLOT - len(ids) + 1))
            pieces.append((at, ids, kind))
            return True

        for name in rng.choice(len(self.heads), int(rng.integers(low, high + 1)), replace=False):
            number = self.number(rng)
            reach = 0.35 if rng.random() < 0.5 else 0.95
            home = int(rng.integers(0, max(1, int(slots * reach))))
            if not place(home, self.heads[name] + number + self.tail_ids, "fact"):
                continue
            for _ in range(asked):
                first = home + 1 if rng.random() < 0.5 else max(home + 1, int(slots * 0.8))
                if first < slots:
                    place(
                        int(rng.integers(first, slots)),
                        self.questions[name] + number + self.tail_ids,
                        "question",
                    )
        return pieces


class Stream:
    """Batches from the groups' tokens on ``device``; ``python`` weighs that group, per token."""

    def __init__(
        self, folder: Path, facts: Facts, device: torch.device, seed: int, python: float = 1.6
    ) -> None:
        arrays = {f.stem: np.load(f) for f in sorted(folder.glob("*.npy"))}
        if not arrays:
            raise FileNotFoundError(f"no .npy token files in {folder}; run tokenizer.py first")
        self.tokens = torch.from_numpy(np.concatenate(list(arrays.values())).astype(np.int16))
        self.tokens = self.tokens.to(device)
        sizes = np.array([len(a) for a in arrays.values()])
        self.starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        self.sizes = sizes
        per_token = {"python": python, **GROUP_WEIGHTS}
        weights = sizes * np.array([per_token.get(g, 1.0) for g in arrays])
        self.weights = weights / weights.sum()
        self.facts = facts
        self.rng = np.random.default_rng(seed)

    def batch(self, rows: int, length: int, planted: float, weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens, labels [rows, length] int64 and label weights [rows, length] fp32.

        Args:
            planted: share of rows that carry facts.
            weight: loss weight of an answer's digits; a fact's own digits weigh nothing.
        """
        groups = self.rng.choice(len(self.sizes), rows, p=self.weights)
        space = np.maximum(1, self.sizes[groups] - length - 1)
        offsets = self.starts[groups] + (self.rng.random(rows) * space).astype(np.int64)
        index: list[np.ndarray] = []
        values: list[int] = []
        weights: list[float] = []
        for row in range(rows):
            if self.rng.random() >= planted:
                continue
            for at, ids, kind in self.facts.plant(length, self.rng):
                index.append(np.arange(at, at + len(ids)) + row * (length + 1))
                values += ids
                digits = len(ids) - len(self.facts.tail_ids)
                some = 0.0 if kind == "fact" else weight
                for i in range(len(ids)):
                    weights.append(some if digits - needle.DIGITS <= i < digits else 1.0)
        device = self.tokens.device
        places = torch.from_numpy(offsets).to(device)[:, None]
        places = places + torch.arange(length + 1, device=device)
        out = self.tokens[places].long()
        scale = torch.ones(out.shape, device=device)
        if index:
            at = torch.from_numpy(np.concatenate(index)).to(device)
            out.view(-1)[at] = torch.tensor(values, device=device)
            scale.view(-1)[at] = torch.tensor(weights, device=device)
        return out[:, :-1].contiguous(), out[:, 1:].contiguous(), scale[:, 1:].contiguous()
