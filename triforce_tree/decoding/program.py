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
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.policy.passes import PassKind
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.verifier import Verifier

# Kinds of sampling whose stages are kept. On a GPU it takes seconds to capture those of another one.
_MOST_PREPARED = 16


class DecodingProgram(Buffers):
    """The buffers of one batch size, context length and configuration, with the stages that run on them."""

    def prepare(self, to_probs: ProbsFromLogits) -> None:
        """Selects the stages for this kind of sampling, and makes and captures them if there are none.

        Sequences must be prefilled or rewound afterwards, because the trial runs of a capture use their
        buffers.
        """
        key = to_probs.key
        found = self.prepared.pop(key, None)
        if found is None:
            if len(self.prepared) >= _MOST_PREPARED:
                # The stages that were selected longest ago go, as each kind of sampling has buffers.
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
        """Makes and captures the stages for trees of one shape, unless they exist.

        It may be called between two passes, or inside :meth:`trial`. The state of the sequences is as before
        afterwards, and KV slots after their ends are overwritten, as by any pass.

        Raises:
            torch.OutOfMemoryError: device memory is short; the stages then do not exist.
        """
        self.capture_seconds += prepare_shape(self, self.selected, number)

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None, reuse: Reuse = "none"
    ) -> list[int]:
        """Prefills every level with all but each prompt's last token, which is the first root.

        If the prefill of an offloaded cache is interrupted, its memory is released, and the program cannot be
        used any more.

        Returns:
            how many tokens of each prompt were reused.

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
            self.cache.close()
            raise
        return reused

    def replace(
        self,
        index: int,
        sequences: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
    ) -> int:
        """Replaces a sequence that has ended while the others go on, if the backend ``replaces``.

        Args:
            index: the batch index of the sequence.
            sequences: all committed tokens of each sequence, and at ``index`` the new prompt.

        Returns:
            how many tokens of the prompt were reused.
        """
        prompt, state = sequences[index], self.state
        self._check([prompt])
        [reused] = self.cache.prefill([prompt], progress, reuse, state.features, index)
        state.tokens[index, : len(prompt)] = id_tensor(prompt, self.device)
        state.length[index], state.active[index] = len(prompt) - 1, 1
        state.chain[index] = state.retrieval_emitted[index] = 0
        if self.drafter is not None:
            self.drafter.start_one(index, sequences)
        self.cache.begin([prompt], index)
        return reused

    def rewind(self, prompts: Sequence[Sequence[int]]) -> None:
        """Continues from these prompts, which are prefixes of the sequences in the cache.

        If layers with a window have overwritten what is needed there, the prompts are prefilled again.
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
        """Sets the state of the sequences to the ends of prompts whose keys and values are in the cache."""
        state, lengths = self.state, [len(p) - 1 for p in prompts]
        for b, prompt in enumerate(prompts):
            state.tokens[b, : len(prompt)] = id_tensor(prompt, self.device)
        state.length.copy_(torch.tensor(lengths, device=self.device))
        state.active.fill_(1)
        for counts in (state.has_nan, state.chain, state.retrieval_emitted):
            counts.zero_()
        self.cache.begin(prompts)

    def transferred_bytes(self, tokens: int, plain: bool = False) -> int:
        """Returns the bytes of keys, values and weights that a pass of level 2 copies to the device.

        Args:
            tokens: committed tokens of each sequence.
            plain: whether the pass is the autoregressive one.
        """
        queries = 1 if plain or self.levels == 1 else self.max_draft_tokens + 1
        streamed = self.target.streamed
        weights = streamed.pass_bytes(self.batch * queries) if streamed is not None else 0
        return weights + self.cache.backend.transferred_bytes(tokens, queries)

    def serves(self, config: HierarchyConfig) -> bool:
        """Returns whether the program serves other settings once ``self.config`` is set to them.

        They may differ in options that every pass reads again. All others are built into buffers and graphs.
        """

        def built_in(settings: HierarchyConfig) -> HierarchyConfig:
            return replace(settings, rounds=None, retrieval=replace(settings.retrieval, refresh=0))

        return built_in(self.config) == built_in(config) and self.two_levels >= self._may_choose_levels(
            config
        )

    def stages_of_pass(self, kind: PassKind) -> list[tuple[str, str]]:
        """Returns the stages of a pass in their order, each with the level to which its seconds belong."""
        stages: list[tuple[str, str]] = []
        for done in range(kind.rounds):
            stages.append((stage_name("draft", kind.shape), "draft"))
            if kind.levels == 3:
                name = "retrieval_refresh" if self.config.retrieval.chooses(done) else "retrieval"
                stages.append((stage_name(name, kind.shape), "retrieval"))
        if kind.levels == 2:
            last = stage_name("target" if self.levels == 2 else "target_tree", kind.shape)
        else:
            last = "target" if kind.levels == 3 else "plain"
        return [*stages, (last, "target")]

    @property
    def stage_names(self) -> Collection[str]:
        """Returns the names of the prepared stages."""
        return self.selected.stages.keys()

    def stage(self, name: str) -> Stage:
        return self.selected.stages[name]

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
        for part in self.selected.runs[name]:
            part()
