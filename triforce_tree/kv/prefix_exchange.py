"""Moves texts between a KV cache and the prefixes that are kept in host memory."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from triforce_tree.kv.backend import KVBackend
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.kept_prefixes import Found, KeptPrefixes, digests_of, end_of
from triforce_tree.kv.marks import Marks
from triforce_tree.runtime.features import Features

_BLOCK = 256
"""Most tokens of a block, unless texts are kept in whole chunks of a prefill."""


class PrefixExchange:
    """Keeps copies of the texts of one cache, and brings back what prompts begin with.

    Args:
        prefixes: texts of all caches of the same models.
        backend: the KV slots.
        marks: where sequences can be continued; None if they can be everywhere.
    """

    def __init__(self, prefixes: KeptPrefixes, backend: KVBackend, marks: Marks | None) -> None:
        self._prefixes, self._backend, self._marks = prefixes, backend, marks
        size = backend.chunk if backend.spec.config.exact else min(backend.chunk, _BLOCK)
        self.block = -(-size // backend.unit) * backend.unit

    def keep(self, b: int, length: int, reuse: Reuse, function: object, features: Features | None) -> None:
        """Copies what is not kept yet of a sequence's text.

        Args:
            length: tokens of the text, with which the sequence can be continued now.
            reuse: with ``chunks`` only whole chunks of a prefill are kept, else all tokens.
            function: ``HFModel.function_key`` of the model that computed the text.
            features: hidden states that are kept for a drafter.
        """
        backend, prefixes, size = self._backend, self._prefixes, self.block
        cached = backend.cached
        chunks = reuse == "chunks"
        if chunks:
            length = min(length, cached.whole[b])
        tokens = cached.held[b][:length]
        digests = digests_of(tokens, size, self._layout(function))
        prefixes.use(digests)
        for at, (base, digest) in enumerate(pairwise(digests)):
            if digest in prefixes:
                continue
            own = tokens[at * size : (at + 1) * size]
            slots = backend.read(b, at * size, (at + 1) * size)
            if not prefixes.put(digest, base, own, slots, staying=digests):
                length = at * size
                break
            prefixes.drop_within(base, own)
        ends: list[tuple[int, list[Tensor]]] = []
        if self._marks is not None:
            ends = [mark for mark in self._marks.copies(b) if not mark[0] % self._unit(reuse)]
        if not chunks:
            ends = [end for end in ends if end[0] != len(tokens)]
            states = [] if self._marks is None else self._marks.copy(b, len(tokens))
            ends.append((len(tokens), states))
        for at, states in ends:
            base, own = digests[at // size] if at <= length else b"", tokens[at // size * size : at]
            kept = features.parts(b) if features is not None and at == len(tokens) else []
            if at <= length and (own or states or kept):
                slots = backend.read(b, at - len(own), at)
                prefixes.put(end_of(base, own), base, own, slots, states, kept, digests)
                prefixes.drop_within(base, own)
        prefixes.use(digests)
        self._settle()

    def bring(
        self,
        b: int,
        prompt: Sequence[int],
        held: int,
        reuse: Reuse,
        function: object,
        features: Features | None,
    ) -> int:
        """Copies to a sequence what is kept of the beginning of a prompt, if it has less.

        Args:
            held: tokens of the prompt that the sequence has, and can be continued after.
            reuse, function, features: see :meth:`keep`.

        Returns:
            the number of tokens that the prompt shares with a kept text. If it cannot be continued there, a
            later prompt may share them, too.
        """
        backend = self._backend
        digests = digests_of(prompt[:-1], self.block, self._layout(function))
        how = "anywhere" if self._marks is None else "ends"
        if reuse == "chunks" and self._marks is None:
            how = "blocks"
        found = self._prefixes.find(digests, prompt[:-1], self.block, how)
        if found.length > held:
            # Layers that keep all positions have the same keys and values as long as the tokens are equal.
            start = backend.cached.common(b, prompt[: found.length + 1], "all")
            first = start // backend.unit * backend.unit
            backend.fill(b, prompt, start, found.length, _runs(found, first))
            if self._marks is not None:
                assert found.end is not None
                self._marks.put_back(b, found.length, found.end.states or [])
            if features is not None:
                features.put_back(b, found.end.features if found.end is not None else [])
        return found.alike // self._unit(reuse) * self._unit(reuse)

    def _unit(self, reuse: Reuse) -> int:
        return self._backend.chunk if reuse == "chunks" else 1

    def _layout(self, function: object) -> object:
        return function, self._backend.layout, self._backend.spec.config.exact

    def _settle(self) -> None:
        """Waits for copies, because other streams may overwrite the slots."""
        if (device := self._backend.target.device).type == "cuda":
            torch.cuda.synchronize(device)


def _runs(found: Found, first: int) -> list[tuple[int, int, list[Tensor]]]:
    """Returns the runs of slots of what was found, from position ``first`` on (``KVBackend.fill``)."""
    start, runs = 0, list[tuple[int, int, list[Tensor]]]()
    for entry in found.entries:
        stop = min(start + len(entry.tokens), found.length)
        skipped = max(0, first - start)
        if start + skipped < stop:
            slots = [part[:, skipped : stop - start] for part in entry.slots]
            runs.append((start + skipped, stop, slots))
        start = stop
    return runs
