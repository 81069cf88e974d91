"""Keeps level 1's copy of the target's weights in fewer bits from one program to the next."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.drafters.base import Drafter
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel, low_bit_model
from triforce_tree.planning import batch_size
from triforce_tree.planning.device_defaults import level_one_bits
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import Sizes
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory


class LevelOneCopy:
    """Holds at most one copy of the target's weights, which is made when a program first needs it.

    Args:
        target: the model whose weights are copied.

    Attributes:
        seconds: the seconds spent on copies since :meth:`taken_seconds` was called.
    """

    def __init__(self, target: HFModel) -> None:
        self._target = target
        self._model: StepModel | None = None
        self._made_of: object = None
        self._given_up = False
        self.seconds = 0.0

    def model(self, target: HFModel, bits: int, compiled: bool, features: Sequence[int]) -> StepModel:
        """Returns the model of ``low_bit_model``; the last one is reused if it was made from the same
        arguments.
        """
        made_of = bits, compiled, tuple(features), target.revision, target.weights_revision
        if self._model is None or self._made_of != made_of:
            self.drop()
            start, self._made_of = time.perf_counter(), made_of
            self._model = low_bit_model(target, bits, compiled, features)
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            self.seconds += time.perf_counter() - start
        return self._model

    def taken_seconds(self) -> float:
        """Returns the seconds spent on copies since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the copy, without tensors that it shares with the target; 0 without a copy."""
        if self._model is None:
            return 0
        own, copied = self._target.model, self._model.model
        shared = {id(tensor) for tensor in [*own.parameters(), *own.buffers()]}
        tensors = {id(tensor): tensor for tensor in [*copied.parameters(), *copied.buffers()]}
        return sum(tensor.nbytes for name, tensor in tensors.items() if name not in shared)

    @property
    def choosable(self) -> bool:
        """Returns whether a copy may be made that the user has not asked for.

        It may not after memory ran out with a copy, nor for a target that has changed, as in training: the
        copy would soon differ from the target's weights.
        """
        return not (self._target.revision or self._target.weights_revision or self._given_up)

    def with_bits(
        self,
        config: HierarchyConfig,
        workload: Workload,
        draft: HFModel | None,
        drafter: Drafter | None,
        kept: Sequence[FullCache],
    ) -> HierarchyConfig:
        """Returns the settings with the bits of level 1 that fit into memory now, the same on all ranks.

        Args:
            config, workload: the settings and the sequences of the next program, which has three levels and
                everything on the device.
            draft, drafter: the draft model or the drafter that the user gave; both may be None.
            kept: the cache of the last program, if it is taken over. The rest of that program was freed.
        """
        device = self._target.device
        free, total = batch_size.free_bytes(device), batch_size.total_bytes(device)
        for cache in kept:
            # It is taken over in its own memory; a copy would need memory beside it.
            if cache.fits(workload.max_seq_len):
                free += cache.backend.bytes
        sizes = Sizes.of(self._target, draft, config, drafter)
        bits = level_one_bits(sizes, config, workload, free, total, self.nbytes)
        # Each rank has its own memory. All take the most bits that any of them needs.
        return replace(config, retrieval_weight_bits=-int(distributed.all_reduce_min([-bits])[0]))

    def drop(self) -> None:
        """Frees the copy. No program may use it any more."""
        if self._made_of is not None:
            self._model = self._made_of = None
            free_memory()

    def give_up(self) -> bool:
        """Frees the copy, after which :attr:`choosable` is False; returns False if there was no copy."""
        used = self._made_of is not None
        self._given_up = self._given_up or used
        self.drop()
        return used
