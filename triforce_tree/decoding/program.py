"""Runs the stages of decoding for one batch size, context length and configuration on fixed buffers."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.buffers import Buffers
from triforce_tree.decoding.prepared_stages import prepare_shape, prepared
from triforce_tree.decoding.stage_set import stage_name
from triforce_tree.decoding.stages import (
    ChainVerifyStage,
    PlainStage,
    RetrievalVerifyStage,
    Stage,
    TreeVerifyStage,
)
from triforce_tree.drafters.base import start_one
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.verifier import Acceptance, Verifier

# Kinds of sampling whose stages are kept. On a GPU it takes seconds to capture those of another one.
_MOST_PREPARED = 16


class DecodingProgram(Buffers):
    """The buffers of one batch size, context length and configuration, with the stages that run on them."""

    def prepare(self, to_probs: ProbsFromLogits) -> None:
        """Select the stages for this kind of sampling, after making and capturing them where there are none.

        Sequences must be fed or rewound after this: the trial runs of a capture use their buffers.
        """
        key = DeviceProbs.key(to_probs)
        found = self.prepared.pop(key, None)
        if found is None:
            if len(self.prepared) >= _MOST_PREPARED:
                # The one selected longest ago: clients ask for ever new settings, and each kind has buffers.
                del self.prepared[next(iter(self.prepared))]
                if self.device.type == "cuda":
                    free_memory()
            found = prepared(self, DeviceProbs(to_probs, self.device, self.noise))
            self.capture_seconds += found.seconds
        self.selected = self.prepared[key] = found
        self.selected.to_probs.set(to_probs)
        if self.seeded is not None:
            self.seeded.clear()

    def prepare_shape(self, number: int) -> None:
        """Make and capture the stages for trees of one shape, unless they are there.

        Between two passes, or inside :meth:`trial`: the state of the sequences is as before afterwards, and
        KV slots after their ends are overwritten, as by any pass.

        Raises:
            torch.OutOfMemoryError: device memory is short; the stages are not there then.
        """
        self.capture_seconds += prepare_shape(self, self.selected, number)

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None, reuse: Reuse = "none"
    ) -> list[int]:
        """Prefills every level with all but each prompt's last token, which is the first root.

        If the prefill of an offloaded cache is interrupted, its memory is released and the program closed.

        Raises:
            ValueError: a prompt is too short for the levels, or too long for the buffers.
        """
        self._check(prompts)
        try:
            reused = self.cache.prefill(prompts, progress, reuse, self.state.features)
            self._start(prompts)
            if self.drafter is not None:
                self.drafter.start(prompts)
        except BaseException:
            self.close()
            raise
        return reused

    @property
    def replaces(self) -> bool:
        """Returns whether :meth:`replace` works, see :class:`KVBackend`."""
        return self.cache.backend.replaces

    def replace(
        self,
        row: int,
        sequences: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
    ) -> int:
        """Replaces a sequence that has ended while the others go on; returns how many tokens were reused.

        Args:
            sequences: all committed tokens of each sequence; of ``row`` the new prompt.
        """
        prompt, state = sequences[row], self.state
        self._check([prompt])
        [reused] = self.cache.prefill([prompt], progress, reuse, state.features, row)
        state.tokens[row, : len(prompt)] = id_tensor(prompt, self.device)
        state.length[row], state.active[row] = len(prompt) - 1, 1
        state.chain[row] = state.retrieval_emitted[row] = 0
        if self.drafter is not None:
            start_one(self.drafter, row, sequences)
        self.cache.begin([prompt], row)
        return reused

    def rewind(self, prompts: Sequence[Sequence[int]]) -> None:
        """Continue from these prompts, whose keys and values the cache holds: beginnings of its sequences.

        Where layers with a window have overwritten what is needed there, the prompts are fed again.
        """
        self._check(prompts)
        if self.cache.holds([len(p) - 1 for p in prompts]):
            if self.state.features is not None:
                self.state.features.rewind(torch.tensor([len(p) - 1 for p in prompts], device=self.device))
            self._start(prompts)
            if self.drafter is not None:
                self.drafter.start(prompts)
        else:
            self.prefill(prompts)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        least = self.cache.backend.least_prompt
        for prompt in prompts:
            if not least <= len(prompt) <= self.max_seq_len:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens does not fit buffers for {self.levels} levels "
                    f"and {least} to {self.max_seq_len} tokens; use fewer levels or a smaller budget"
                )
        if (rope := self.target.length_rope) is not None:
            rope.choose_for_texts([len(p) for p in prompts])

    def _start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Set the target's state to the end of prompts whose keys and values are in the cache."""
        state, lengths = self.state, [len(p) - 1 for p in prompts]
        for b, prompt in enumerate(prompts):
            state.tokens[b, : len(prompt)] = id_tensor(prompt, self.device)
        state.length.copy_(torch.tensor(lengths, device=self.device))
        state.active.fill_(1)
        for counts in (state.has_nan, state.chain, state.retrieval_emitted, state.rank_counts):
            if counts is not None:
                counts.zero_()
        self.cache.begin(prompts)

    def committed(
        self, counts: Sequence[int], tokens: Sequence[Sequence[int]] | None = None, stage: str = "target"
    ) -> None:
        """Records how many tokens the last pass of level 2, which ended with this stage, added to each
        sequence.

        Args:
            tokens: these, if they are known.
        """
        self.cache.committed(counts, tokens, with_means=self.levels == 3 and stage == "target")

    def resume_retrieval(self) -> None:
        """Updates the chunk means before a pass of three levels; the other passes do not update them."""
        self.cache.means.catch_up()

    def update_chunk_means(self) -> None:
        self.cache.means.update_all()

    def transferred_bytes(self, tokens: int, plain: bool = False) -> int:
        """Returns the bytes of keys, values and weights that a pass of level 2 copies to the device.

        Args:
            plain: whether the pass is the autoregressive one.
        """
        queries = 1 if plain or self.levels == 1 else self.max_draft_tokens + 1
        streamed = self.target.streamed
        weights = streamed.pass_bytes(self.batch * queries) if streamed is not None else 0
        return weights + self.cache.backend.transferred_bytes(tokens, queries)

    def serves(self, config: HierarchyConfig) -> bool:
        """Returns whether setting ``self.config = config`` is enough for these settings.

        They may differ in what every pass reads again; everything else is built into buffers and graphs.
        """

        def built_in(settings: HierarchyConfig) -> HierarchyConfig:
            return replace(settings, rounds=None, retrieval=replace(settings.retrieval, refresh=0))

        return built_in(self.config) == built_in(config) and self.two_levels >= self._may_choose_levels(
            config
        )

    def close(self) -> None:
        """Releases an offloaded cache's host memory; the program cannot be used afterwards."""
        self.cache.close()

    @property
    def closed(self) -> bool:
        """Returns whether memory that its stages use was released."""
        return self.cache.closed

    def last_stage(self, levels: int, shape: int = 0) -> str:
        """Returns the target's stage in passes with this number of levels and shape of trees."""
        if levels == 1:
            return "plain"
        if levels == 3:
            return "target"
        return stage_name("target_tree" if levels < self.levels else "target", shape)

    @property
    def stage_names(self) -> Collection[str]:
        """Returns the names of the prepared stages."""
        return self.selected.stages.keys()

    def stage(self, name: str) -> Stage:
        return self.selected.stages[name]

    def acceptance(self, name: str) -> Acceptance:
        """Returns the last acceptance of a verifying stage."""
        return self.verifier(name).acceptance

    def verifier(self, name: str) -> Verifier:
        """Returns the object with which a verifying stage verifies."""
        stage = self.stage(name)
        assert isinstance(stage, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage | PlainStage)
        return stage.verifier

    def run(self, name: str, *generators: torch.Generator) -> None:
        """Runs one stage with fresh random numbers, from one generator or one for each sequence."""
        for noise in self.selected.stages[name].noise:
            if len(generators) == 1:
                noise.draw(*generators)
            else:
                noise.draw_rows(generators)
        self.selected.runs[name]()
