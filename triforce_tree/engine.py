"""The engine: a target, its drafter and their settings, behind ``generate``."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from triforce_tree.branching.several.calls import tree_of, with_several
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.decoding.explain.explanation import Explanation, explained
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.oom_retry import OomRetryDecoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter
from triforce_tree.generation.checkpoint_settings import without_settings
from triforce_tree.generation.drafter_choice import check_drafter_options
from triforce_tree.generation.inputs import Ids, Inputs, prompt_of
from triforce_tree.generation.keywords import checked_seed, checked_switch
from triforce_tree.generation.notices import CostNotices
from triforce_tree.generation.output import GenerateOutput, joined, output_of, placed
from triforce_tree.generation.request import Job, OneByOneError, Request
from triforce_tree.generation.scores import EmittedScores
from triforce_tree.generation.streamers import Streamers
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.loading.vocabularies import token_map
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning.device_defaults import chosen_settings
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.planning.profiles import Entry, Profile
from triforce_tree.runtime import distributed
from triforce_tree.runtime.stats import Progress
from triforce_tree.sessions.session import RESERVE, Session
from triforce_tree.verify.sampling import ProbsFromLogits, Stream, derived


class Engine:
    """A target, its draft and their settings, ready to generate. Made by :func:`load`.

    Args:
        target: a transformers causal LM.
        draft: another one, or any :class:`~triforce_tree.drafters.base.Drafter`; None for suffix matching.
        tokenizer: for text prompts and ``stop_strings``.
        config: settings of all levels.
        profile: measured settings, used for prompts like those that they were measured with.
        given: names of options that a profile must not change.
        streamed: the weights of the target's layers, where they are in host memory.
        draft_tokenizer: the draft model's own, to compare; None where it is not at hand.

    Raises:
        ValueError: models that cannot work together; ``offload_weights=True`` without ``streamed``.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: HierarchyConfig | None = None,
        profile: Profile | None = None,
        given: Collection[str] = (),
        streamed: StreamedWeights | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.profile = profile
        self._given = frozenset(given)
        self._notices = CostNotices()
        self._in_session, self._room = False, 0
        self._config = config or HierarchyConfig()
        if self._config.offload_weights is True and streamed is None:
            raise ValueError(
                "offload_weights=True takes effect when weights are loaded; use triforce_tree.load"
            )
        level_0 = HFModel(draft) if isinstance(draft, PreTrainedModel) else draft
        level_2, tokens = HFModel(target, streamed), None
        if isinstance(level_0, HFModel):
            tokens = token_map(level_2.vocab_size, level_0.vocab_size, tokenizer, draft_tokenizer)
        self.hierarchy = Hierarchy(level_2, level_0, self._config, tokens)

    def with_options(self, **options: Any) -> "Engine":
        """An engine over the same models with other options (those of :func:`load`).

        Raises:
            ValueError: impossible options; another ``offload_weights``; ``tree`` or ``lookup`` where the
                drafter does not take them.
        """
        check_drafter_options(self.hierarchy.own_drafter, self.hierarchy.draft, options)
        given, weights = options.get("offload_weights"), self._config.offload_weights
        if given not in (None, weights):
            raise ValueError(
                f"offload_weights={given!r} differs from {weights!r}, with which the weights were placed; "
                "load the models anew"
            )
        other = copy.copy(self)
        other._given = self._given | options.keys()
        other._config = HierarchyConfig.from_options(**{**self._config.as_options(), **options})
        other.hierarchy = self.hierarchy.with_config(other._config)
        return other

    def session(self, document: Inputs | None = None, *, reserve: int = RESERVE) -> Session:
        """A text or a conversation of which each call prefills the new tokens alone: see :class:`Session`."""
        return Session(self, document, reserve)

    def load_session(self, folder: str | Path, *, reserve: int = RESERVE) -> Session:
        """A session that :meth:`Session.save` wrote; see :meth:`Session.load`."""
        return Session.load(self, Path(folder), reserve)

    tree = tree_of

    def in_session(self, room: int) -> "Engine":
        """The same engine over the same buffers, made for ``room`` tokens, which keeps all they hold."""
        other = copy.copy(self)
        other._in_session, other._room = True, min(room, self.hierarchy.target.max_positions or room)
        return other

    @property
    def _reuse(self) -> Reuse:
        return "all" if self._in_session else "chunks" if self._config.prefix_cache else "none"

    def close(self) -> None:
        """Free the last generation's buffers, and weights in host memory: calls then raise RuntimeError."""
        with self.hierarchy.generation():
            self.hierarchy.release()
            self.hierarchy.prefixes.clear()
            if self.hierarchy.target.streamed is not None:
                self.hierarchy.target.streamed.close()

    def memory_plan(self, prompt_tokens: int, new_tokens: int) -> MemoryPlan | None:
        """Where a generation of such a prompt would keep its KV slots; None unless they may be offloaded.

        Raises:
            ValueError: memory is short, or what would have to be offloaded cannot be.
        """
        with self.hierarchy.generation():
            self.hierarchy.config = self._config
            return self.hierarchy.plan_memory([prompt_tokens], new_tokens, self._given)

    def _choose_settings(self, temperature: float, prompts: list[list[int]], new_tokens: int) -> Entry | None:
        """Plan the memory; apply the device's defaults, and the profile's entry for these prompts if any."""
        self.hierarchy.config = self._config
        self.hierarchy.adopt_memory_plan([len(p) for p in prompts], new_tokens, self._given)
        hierarchy = self.hierarchy
        # Both are measured with the full cache and all weights on the device.
        if hierarchy.offloads or hierarchy.target.streamed is not None:
            return None
        longest, models = max(map(len, prompts)), (hierarchy.target, hierarchy.draft)
        hierarchy.config, entry = chosen_settings(
            self._config, self._given, *models, longest, temperature, self.profile
        )
        return entry

    @contextmanager
    def program(
        self, prompts: list[list[int]], new_tokens: int, to_probs: ProbsFromLogits | None, temperature: float
    ) -> Iterator[DecodingProgram]:
        """A context with the buffers and stages that :meth:`generate` would run for these prompts.

        Args:
            to_probs: logits to distributions, for the stages; None where only forwards are run.
            temperature: by which a profile's entry is chosen.

        Raises:
            ValueError: a prompt is too long, or memory is short.
        """
        for prompt in prompts:
            self.hierarchy.target.check_length(len(prompt), new_tokens)
        with self.hierarchy.generation():
            self._choose_settings(temperature, prompts, new_tokens)
            with self.hierarchy.active():
                program = self.hierarchy.program(prompts, new_tokens, reuse=self._reuse)
                if to_probs is not None:
                    program.prepare(to_probs)
                yield program

    def explain(
        self, inputs: Inputs, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0
    ) -> Explanation:
        """Continue one prompt, and tell which passes were chosen and why."""
        target, to_probs = self.hierarchy.target, ProbsFromLogits.at(temperature)
        prompt = prompt_of(inputs, self.tokenizer, target.vocab_size, target.max_positions)
        with self.program([prompt], max_new_tokens, to_probs, temperature) as program:
            return explained(program, to_probs, prompt, max_new_tokens, seed, self.tokenizer)

    @with_several
    def generate(
        self,
        inputs: Inputs | None = None,
        *,
        input_ids: Ids | None = None,
        attention_mask: Ids | None = None,
        generation_config: GenerationConfig | dict[str, Any] | None = None,
        logits_processor: LogitsProcessorList | LogitsProcessor | list[LogitsProcessor] | None = None,
        stopping_criteria: StoppingCriteriaList | StoppingCriteria | list[StoppingCriteria] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        stop_strings: str | list[str] | None = None,
        streamer: BaseStreamer | Sequence[BaseStreamer] | None = None,
        seed: int | None = None,
        logprobs: bool = False,
        progress: Progress | None = None,
        pinned: Callable[[int], None] | None = None,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Continue a prompt, by exactly the target's own distribution.

        Threads may call engines over the same models at the same time; their generations wait for each
        other. The models themselves are not changed: transformers' own generate may run at the same time.

        Args:
            inputs: text, token ids ``[L]`` or ``[B, L]`` (tensor, array, list; rows of a list may differ in
                length), a list of texts, what a tokenizer returns, or a list of messages (dicts with role and
                content; a last one of the assistant is continued) or of such lists, by the tokenizer's chat
                template. Sequences of a batch run together, or one by one where a logits processor reads the
                tokens so far.
            input_ids: token ids by transformers' own keyword, instead.
            attention_mask: of the ids' shape; tokens with mask 0 are padding, on either side, and left out.
            generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, stop_strings: as
                in transformers; ``stop_strings`` needs a tokenizer.
            streamer: as in transformers, or one for each sequence; see :class:`Streamers`.
            seed: of all draws, independent for each sequence; by default from torch's global generator.
            logprobs: return the log-probability of each new token, see :class:`GenerateOutput`.
            progress: called with the number of kept tokens, then with that of each chunk after it.
            pinned: called with the bytes of host memory that an offloaded cache allocates, as it does.
            kwargs: options of ``GenerationConfig``: max_new_tokens, temperature, top_k, top_p, do_sample,
                num_beams, num_return_sequences, output_scores, ...; one that is not supported raises.

        Raises:
            ValueError: an empty or too long prompt, an unsupported option, NaN logits.
            RuntimeError: called from a callback of a generation with the same models.
        """
        request = Request.read(
            self.hierarchy.target, self.tokenizer, inputs, input_ids, attention_mask, generation_config,
            logits_processor, stopping_criteria, stop_strings, kwargs,
        )  # fmt: skip
        seed, logprobs = checked_seed(seed), checked_switch("logprobs", logprobs)
        ids, count = request.prompts.ids, len(request.prompts.ids)
        streamers = Streamers.of(streamer, count)
        padded = request.prompts.left_padded()

        def continued(part: slice, seed: int | None) -> GenerateOutput:
            target = without_settings(self.hierarchy.target.model)
            allowed = prefix_allowed_tokens_fn
            out: GenerateOutput = target.generate(
                padded.ids[part].to(target.device), attention_mask=padded.mask[part].to(target.device),
                generation_config=request.config, logits_processor=request.processors,
                stopping_criteria=request.criteria,
                prefix_allowed_tokens_fn=allowed and (lambda _, sent: allowed(part.start, sent)),
                custom_generate=self.runner(streamers.part(part), progress, seed, pinned, logprobs),
                **request.options,
            )  # fmt: skip
            return placed(out, ids[part], moves_scores=not self.hierarchy.offloads)

        try:
            return continued(slice(0, count), seed)
        except OneByOneError:
            # The first sequence draws as it would alone.
            outputs = [
                continued(slice(n, n + 1), derived(seed, Stream.ROW, n) if n and seed is not None else seed)
                for n in range(count)
            ]
            return joined(outputs, ids, request.pad_token)

    def runner(
        self,
        streamers: Streamers,
        progress: Progress | None,
        seed: int | None,
        pinned: Callable[[int], None] | None = None,
        logprobs: bool = False,
    ) -> Callable[..., GenerateOutput]:
        """The ``custom_generate`` callable, which transformers' ``generate`` runs after its preparation.

        Args:
            streamers, progress, seed, pinned, logprobs: as for :meth:`generate`.
        """

        def run(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_inputs: Any,
        ) -> GenerateOutput:
            # attention_mask is in model_inputs: as a named parameter it would be passed twice.
            job = Job.read(
                self.hierarchy.target, input_ids, logits_processor, stopping_criteria, generation_config,
                model_inputs,
            )  # fmt: skip
            with self.hierarchy.generation():
                return self._run(job, streamers, progress, seed, pinned, logprobs)

        return run

    def _run(
        self, job: Job, streamers: Streamers, progress: Progress | None, seed: int | None,
        pinned: Callable[[int], None] | None, logprobs: bool,
    ) -> GenerateOutput:  # fmt: skip
        prompts, to_probs, endings, new_tokens = job.prompts, job.to_probs, job.endings, job.new_tokens
        for prompt in prompts:
            self.hierarchy.target.check_length(len(prompt), new_tokens)
        distributed.check_equal(
            "prompts or settings", (prompts, new_tokens, to_probs.greedy, seed is None, self._config)
        )
        chosen = distributed.broadcast_object(int(torch.randint(2**62, ())) if seed is None else seed)
        coming = max(new_tokens, self._room - max(map(len, prompts)))
        entry = self._choose_settings(job.temperature, prompts, coming)
        self._notices.tell(to_probs.reading_text, job.config, len(prompts), self.hierarchy.target.device)
        if not self.hierarchy.together(to_probs, prompts):
            raise OneByOneError
        new: list[list[int]] = [[] for _ in prompts]
        kept_on = torch.device("cpu") if self.hierarchy.offloads else job.input_ids.device
        names = job.outputs | ({"logprobs"} if logprobs else set())
        scores = EmittedScores(names, to_probs, prompts, kept_on)
        streamers.begin(job.input_ids)
        with self.hierarchy.active():

            def make(number: int) -> Decoder:
                program = self.hierarchy.program(prompts, coming, pinned, self._reuse)
                return Decoder(program, to_probs, derived(chosen, Stream.ATTEMPT, number), seed is not None)

            decoder = OomRetryDecoder(make, self.hierarchy.shrink)
            # Only with as many levels: the estimates of two and of three are of different quantities.
            if entry and (estimates := entry.estimates(decoder.controller.levels, self._given)):
                decoder.controller.expect(**estimates)
            decoder.prefill(prompts, progress, self._reuse)
            for fresh in decoder.decode(prompts, endings, scores.add if names else None):
                for sequence, tokens in zip(new, fresh, strict=True):
                    sequence += tokens
                streamers.put(fresh, decoder.end, scores)
        streamers.end()
        out = output_of(job.input_ids, new, job.pad_token, self.tokenizer, decoder, scores.results())
        out.profile = str(self.profile.path) if entry is not None and self.profile is not None else None
        out.memory = self.hierarchy.memory.as_dict() if self.hierarchy.memory is not None else None
        return out
