"""The contract of a KV backend: where the target's keys and values are kept, and all that depends on it.

The engine, generations, sessions and plans use backends through :class:`KVBackend` alone. A further kind of
KV cache is a subclass, and one line in ``kv/choose.py`` (CONTRIBUTING.md, "Add a KV cache").
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.attention.backend import AttentionBackend, chosen
from triforce_tree.kv.cached_tokens import CachedTokens, Reuse
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.kv.prefill import PromptCache, chunk_tokens, prefill
from triforce_tree.kv.recurrent_states import RecurrentStates
from triforce_tree.kv.store import KVGroup, KVStore
from triforce_tree.kv.view import KVView, RetrievalView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.stats import Progress
from triforce_tree.trees.device_shapes import PassLimits, pass_limits, tree_shapes

View = TypeVar("View")

PARTS = ("k", "v", "k_scale", "v_scale")
"""Names of the tensors that a layer's keys and values are saved in; the scales are those of 8 bits."""


@dataclass(frozen=True)
class CacheSpec:
    """Describes the KV slots that a program needs.

    Attributes:
        target: the model whose keys and values are kept.
        config: the retrieval settings, the shapes of the draft's trees, and the chunks of a prefill.
        batch: the number of sequences, B.
        max_seq_len: the most tokens of a sequence, new ones included.
        levels: 1, 2 or 3; with 3 there is a retrieval view.
    """

    target: HFModel
    config: HierarchyConfig
    batch: int
    max_seq_len: int
    levels: int

    @cached_property
    def limits(self) -> PassLimits:
        return pass_limits(self.config, self.levels)

    @property
    def attention(self) -> AttentionBackend:
        """Returns the backend of the attention over these slots."""
        return chosen(self.config.attention_backend, self.target.device)

    @property
    def scratch(self) -> int:
        """Returns how many KV slots after the committed ones forwards may write."""
        return self.limits.scratch_slots

    @property
    def slots(self) -> int:
        """Returns the KV slots of a sequence: tokens and scratch slots, and at least the budget."""
        return max(self.max_seq_len + self.scratch, self.config.retrieval.budget if self.levels == 3 else 0)

    def retrieval(self, make: Callable[..., View], slots: object) -> View | None:
        """Returns level 1's view of some slots, made by ``make``; None with fewer than three levels."""
        if self.levels < 3:
            return None
        shape = tree_shapes(self.config)[0]
        growth = self.limits.max_draft_tokens + 1 + self.limits.nodes - shape.nodes
        return make(slots, shape.nodes, self.config.retrieval, growth, shape.depths)


@dataclass(frozen=True)
class PromptRun:
    """Holds the options of a prefill.

    Attributes:
        progress: called with numbers of tokens as they are prefilled.
        states: the states of recurrent layers, if there are any.
        features: where hidden states are kept for the drafter, if it reads any.
    """

    progress: Progress | None = None
    states: RecurrentStates | None = None
    features: Features | None = None


class KVBackend:
    """Stores the keys and values of B sequences of the target in one kind of memory.

    A forward writes after the committed slots, and only :meth:`KVView.move` and :meth:`committed` make
    anything permanent.

    Args:
        spec: describes the KV slots that are needed.

    Attributes:
        store: the KV slots on the device; they hold whole sequences, or only those layers of them that have a
            sliding window.
        retrieval: level 1's view; None with fewer than three levels.
        cached: which tokens of each sequence are in the cache.
        replaces: whether a sequence can be prefilled while the others go on.
        resizes: whether a backend for more or fewer sequences can continue in the same memory.
        reclaims: whether the slots of a sequence that has ended are given to others, so that a placeholder
            takes its place in the batch.
        fixed_passes: whether all passes are alike: trees of one shape, and one number of levels.
        transfers: whether passes copy keys and values to the device, which takes longer for longer texts.
        least_prompt: the fewest tokens that a prompt may have.
        readable: whether ``store`` holds every layer of each sequence, in slots of its own.
        pool_slots: number of KV slots per head in the pool that all sequences share; 0 if each sequence has
            slots of its own.
        unit: number of tokens; :meth:`fill` begins at multiples of it.
        closed: whether memory was given back, so that the backend cannot be used any more.
    """

    store: KVStore
    retrieval: RetrievalView | None = None
    replaces = True
    reclaims = resizes = fixed_passes = transfers = closed = readable = False
    pool_slots = 0
    unit = least_prompt = 1

    def __init__(self, spec: CacheSpec) -> None:
        self.spec, self.target, self.batch = spec, spec.target, spec.batch
        self.chunk = chunk_tokens(spec.config.prefill_chunk, spec.target.device)
        self.cached = CachedTokens(spec.batch, self.chunk)

    def view(self, queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> KVView:
        """Returns the target's view for T new tokens of each sequence.

        Args:
            queries: the number T.
            mask: bool ``[T, T]``: which new tokens each of them sees, if this is the same in all forwards.
            depths: the depth of each new token in its tree; None for a single token.
        """
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Returns the bytes of keys and values on the device; shared slots count once."""
        return self.store.nbytes

    def tokens(self) -> tuple[int, int]:
        """Returns the tokens that the device stores, and how many more the sequences have because they share
        slots.
        """
        return self.store.tokens()

    def transferred_bytes(self, tokens: int, queries: int) -> int:
        """Returns the bytes of keys and values that a pass copies to the device.

        Args:
            tokens: number of committed tokens of each sequence.
            queries: number of new tokens of each sequence.
        """
        return 0

    # Prompts

    def place(
        self, prompts: Sequence[Sequence[int]], index: int | None, features: Features | None
    ) -> list[int]:
        """Gives slots to prompts that are prefilled next.

        Args:
            index: the batch index of the sequence that the only prompt replaces; None for prompts of all
                sequences.
            features: where hidden states are kept for the drafter, if it reads any.

        Returns:
            the batch indices of sequences that got other slots, for which results computed from the former
            keys are not valid any more.
        """
        return []

    def prompt_cache(self, b: int, states: RecurrentStates | None, length: int) -> PromptCache:
        """Returns the cache that a prefill of sequence b continues after ``length`` tokens."""
        return PromptCache(self.store, b, states, length)

    def prefill(
        self, prompts: Sequence[Sequence[int]], first: int, starts: Sequence[int], run: PromptRun
    ) -> list[int]:
        """Computes keys and values of all but the last token of prompts, inside ``target.active()``.

        Args:
            first: the batch index of the first prompt; the others follow it.
            starts: how many tokens of each prompt the cache holds already.

        Returns:
            ``starts``, or more where a prompt begins like one that was prefilled before it.
        """
        for b, (prompt, start) in enumerate(zip(prompts, starts, strict=True), first):
            cache = self.prompt_cache(b, run.states, start)
            prefill(self.target, cache, list(prompt[:-1]), self.chunk, run.progress, start, run.features)
            self.store.fed(b, len(prompt) - 1, start)
            if run.states is not None:
                run.states.lengths[b] = len(prompt) - 1
            self.cached.fed(b, prompt, start)
        return list(starts)

    def rest(self, b: int, held: int) -> int:
        """Lets the other sequences run between two calls of :meth:`prefill` for sequence b.

        Args:
            held: how many tokens of its prompt are prefilled.

        Returns:
            how many of these tokens sequence b has in passes of the others, which write after them.
        """
        return held

    def ready(self) -> None:
        """Makes what has changed since the last pass known on the device; called before each stage."""

    def begin(self, lengths: Sequence[int]) -> None:
        """Continues all sequences after their first tokens, which the cache holds."""

    def committed(self, counts: Sequence[int]) -> None:
        """Records how many tokens the last pass of the target added to each sequence."""
        self.store.grown(counts)

    # Sequences that come and go

    def expect(self, new_tokens: Sequence[int]) -> None:
        """Sets how many tokens may follow the prompt in each sequence that is prefilled next, if the backend
        ``reclaims``.
        """

    def release(self, sequences: Sequence[int]) -> None:
        """Records that these sequences have ended."""

    def has_slots(
        self,
        running: Mapping[int | None, Sequence[int]],
        coming: Sequence[tuple[Sequence[int], int]],
        most: int,
        tokens: int | None,
    ) -> bool:
        """Returns whether there are KV slots for further prompts beside the running sequences.

        Args:
            running: the prompts of the running sequences, by batch index.
            coming: the further prompts, and the most new tokens of each.
            most: the most sequences that the batch may have; 0 for as many as it has now.
            tokens: the most tokens of all prompts together; None for no limit.
        """
        prompts = [*running.values(), *(prompt for prompt, _ in coming)]
        return tokens is None or len(prompts) < 2 or sum(map(len, prompts)) <= tokens

    def forget(self) -> None:
        """Makes the backend forget which tokens its slots hold, so that no later prompt reuses them."""

    # Replacing one cache by another

    def serves(self, pool: PoolSize | None) -> bool:
        """Returns whether this backend serves prompts that use ``pool``, or their own slots if it is None."""
        return pool is None

    def share(self, pool: PoolSize | None) -> None:
        """Records that prompts for this pool, which :meth:`serves` allows, are prefilled next."""

    def gives(self, bits: int, prompts: Sequence[Sequence[int]], reuse: Reuse, pool: PoolSize | None) -> bool:
        """Returns whether another backend for these prompts can take over what this one holds.

        Args:
            bits: the bits of each element of keys and values in the other backend.
            reuse: which tokens the other backend would keep.
            pool: the pool of the other backend; None if its sequences have slots of their own.
        """
        return False

    # Texts that are kept in host memory

    @property
    def layout(self) -> list[object]:
        """Returns the format of :meth:`read`, by which backends of the same target are compared."""
        store = self.store
        return [
            (group.layers, group.shape, store.bits, store.dtype) for group in store.groups if not group.ring
        ]

    def read(self, b: int, start: int, stop: int) -> list[Tensor]:
        """Returns the KV slots of positions ``start`` to ``stop`` of sequence b, as ``KVStore.positions``."""
        return self.store.positions(b, start, stop)

    def fill(
        self,
        b: int,
        prompt: Sequence[int],
        start: int,
        length: int,
        runs: Iterable[tuple[int, int, list[Tensor]]],
    ) -> None:
        """Stores what :meth:`read` gave of the first ``length`` tokens of a prompt, and records that sequence
        b has them.

        Args:
            start: how many tokens the sequence has already.
            runs: for consecutive ranges of positions, the first position, the position after the last one,
                and the KV slots. The first range begins at ``start``, rounded down to a multiple of ``unit``.
        """
        for first, _, parts in runs:
            self.store.set_positions(b, first, parts)
        self._filled(b, prompt, start, length)

    def _filled(self, b: int, prompt: Sequence[int], start: int, length: int) -> None:
        self.cached.copied(b, prompt, length, length if self.spec.config.exact else 0)
        self.store.fed(b, length, start)

    def take_over(self, kept: "KVBackend") -> bool:
        """Takes over what another backend of the same target holds, which is not used any more, or not until
        it takes over in turn.

        Returns:
            whether this backend has the sequences of the other one now.
        """
        return False

    def renumber(self, order: Sequence[int]) -> None:
        """Lets sequence ``order[i]`` be sequence i, and drops those that are not in ``order``, if the backend
        ``resizes``. A backend for another number of sequences takes over next.
        """
        raise NotImplementedError

    def layer(self, layer: int, count: int) -> dict[str, Tensor]:
        """Returns the first ``count`` tokens of the only sequence in one layer, by name of ``PARTS``.

        The tensors ``[H_kv, n, D]`` are in host memory. A layer with a window has the last n tokens.
        """
        group, place = self._layer_of(layer)
        window = group.shape.window or count
        positions = range(max(0, count - window) if group.ring else 0, count)
        parts = [part[place, 0][:, group.slots_of(positions)].cpu().contiguous() for part in group.parts]
        return dict(zip(PARTS, parts, strict=False))

    def layer_slots(self, layer: int, count: int) -> tuple[dict[str, Tensor], int]:
        """Returns the slots ``[..., H_kv, S, D]`` that :meth:`set_layer` fills, by name of ``PARTS``, and the
        fewest tokens that it needs for them.
        """
        group, _ = self._layer_of(layer)
        return dict(zip(PARTS, group.parts, strict=False)), min(count, group.shape.window or count)

    def set_layer(self, layer: int, count: int, parts: Sequence[Tensor]) -> None:
        """Stores the result of :meth:`layer`."""
        group, place = self._layer_of(layer)
        # A layer with a window gets only the last positions; sender and receiver know at least a window of
        # them.
        kept = min(parts[0].shape[1], group.slots)
        positions = range(count - kept, count)
        for slots, part in zip(group.parts, parts, strict=True):
            slots[place, 0][:, group.slots_of(positions)] = part[:, part.shape[1] - kept :].to(slots.device)

    def _layer_of(self, layer: int) -> tuple[KVGroup, int]:
        slots = self.store.layers[layer]
        return slots.group, slots.place

    def restored(self, length: int) -> None:
        """Records that :meth:`set_layer` has stored all layers of the only sequence."""
        self.store.restored(0, length)

    # Trials and the end

    @contextmanager
    def trial(self, length: int, count: int) -> Iterator[None]:
        """Undoes, at the end, what passes wrote after made-up sequences of ``length`` tokens.

        Args:
            count: number of slots after these tokens that passes write.
        """
        self.store.initialise(self.cached.lengths)
        with self.store.saved(length, count):
            yield

    def close(self) -> None:
        """Releases host memory; the backend cannot be used afterwards."""
