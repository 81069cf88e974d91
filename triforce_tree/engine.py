"""An engine: a target, its draft and their settings, and one generation after the other."""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from triforce_tree import parallel
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.decoder import CycleDecoder
from triforce_tree.cycle.steady import SteadyDecoder
from triforce_tree.cycle.streamed_weights import StreamedWeights
from triforce_tree.decoder import Decoder
from triforce_tree.hf_model import HFModel
from triforce_tree.hierarchy import Hierarchy
from triforce_tree.inputs import Inputs, token_rows
from triforce_tree.level import Progress
from triforce_tree.memory_plan import MemoryPlan
from triforce_tree.options import (
    check_sampling_options,
    ending_of,
    law_of,
    refuse_model_inputs,
    refuse_unsupported,
)
from triforce_tree.output import GenerateOutput, joined, padded
from triforce_tree.profiles import Entry, Profile
from triforce_tree.sampling import TokenLaw


class Engine:
    """A target, its draft and their settings, ready to generate. Made by :func:`load`.

    Args:
        target, draft: transformers causal LMs; without a draft, prompt lookup proposes.
        tokenizer: for text prompts and ``stop_strings``.
        config: what each level does.
        profile: measured settings, taken up for the prompts that they were measured for.
        given: options that no profile changes.
        streamed: the target's layers' weights, where they are in host memory.

    Raises:
        ValueError: models that cannot work together; ``offload_weights=True`` without ``streamed``.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: HierarchyConfig | None = None,
        profile: Profile | None = None,
        given: Collection[str] = (),
        streamed: StreamedWeights | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.profile = profile
        self._given = frozenset(given)
        self._config = config or HierarchyConfig()
        if self._config.offload_weights is True and streamed is None:
            raise ValueError(
                "offload_weights=True moves weights when they are loaded: use triforce_tree.load"
            )
        self.hierarchy = Hierarchy(
            HFModel(target, streamed), HFModel(draft) if draft is not None else None, self._config
        )

    def with_options(self, **options: Any) -> "Engine":
        """The same models under other settings (those of :func:`load`).

        Raises:
            ValueError: an unknown or impossible setting, or another ``offload_weights``.
        """
        weights = self._config.offload_weights
        if options.get("offload_weights", weights) != weights:
            raise ValueError(
                f"offload_weights={options['offload_weights']!r} differs from {weights!r}, with which the "
                "weights were placed; load the models anew"
            )
        other = copy.copy(self)
        other._given = self._given | options.keys()
        other._config = HierarchyConfig.from_options(**{**self._config.as_options(), **options})
        other.hierarchy = self.hierarchy.with_config(other._config)
        return other

    def close(self) -> None:
        """Give the memory of the last texts back, and that of weights in host memory.

        Without such weights the next generation takes memory anew; with them the engine is of no use any
        more, and raises RuntimeError.
        """
        self.hierarchy.release()
        if self.hierarchy.target.streamed is not None:
            self.hierarchy.target.streamed.close()

    def memory_plan(self, prompt_tokens: int, new_tokens: int) -> MemoryPlan | None:
        """Where a generation of one such prompt would keep its rows; None unless they may be offloaded.

        Raises:
            ValueError: memory is short, or what would have to be offloaded cannot be.
        """
        self.hierarchy.config = self._config
        self.hierarchy.settle_memory(TokenLaw(greedy=True), [prompt_tokens], new_tokens, self._given)
        return self.hierarchy.memory

    def _settle(
        self, law: TokenLaw, temperature: float, prompts: list[list[int]], new_tokens: int
    ) -> Entry | None:
        """Decide where rows live; take up what the profile advises, where it holds; else our own settings."""
        self.hierarchy.config = self._config
        self.hierarchy.settle_memory(law, [len(p) for p in prompts], new_tokens, self._given)
        # Profiles are measured with the cache on the device.
        if self.profile is None or self.hierarchy.offloads:
            return None
        longest = max(len(prompt) for prompt in prompts)
        entry = self.profile.nearest(longest, temperature)
        if entry is None:
            return None
        advised = entry.options_for(self._given)
        config = HierarchyConfig.from_options(**{**self._config.as_options(), **advised})
        # Asked in 16 bits: fewer would raise where the captured cycle cannot serve.
        asked = replace(config, middle_bits=self._config.middle_bits)
        if (self.hierarchy.with_config(asked).why_not_captured(law, prompts) is None) != entry.captured:
            return None
        self.hierarchy.config = config
        return entry

    def generate(
        self,
        inputs: Inputs,
        *,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        stop_strings: str | list[str] | None = None,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
        pinned: Callable[[int], None] | None = None,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Continue a text, by exactly the target's own law.

        Args:
            inputs: text, token ids, or int64 ``[L]`` / ``[B, L]``; rows of a batch run together where the
                cycle is captured, one by one elsewhere.
            attention_mask: ``[B, L]``; tokens under 0 are padding and left out.
            generation_config, logits_processor, stopping_criteria, stop_strings, streamer: as in
                transformers; ``stop_strings`` needs a tokenizer.
            seed: of all draws; by default taken from torch's global generator.
            progress: called after each chunk of the prompt with the number of tokens in it.
            pinned: called with bytes of host memory as an offloaded cache takes them.
            kwargs: options of ``GenerationConfig``: max_new_tokens, temperature, top_k, top_p,
                do_sample, eos_token_id, ...; one that is not supported raises.

        Raises:
            ValueError: an empty or too long prompt, an unsupported option, NaN logits.
        """
        check_sampling_options(kwargs)
        vocabulary = self.hierarchy.target.vocab_size
        rows = token_rows(inputs, attention_mask, self.tokenizer, vocabulary)
        if streamer is not None and len(rows) > 1:
            raise ValueError(f"a streamer follows one sequence, but the batch has {len(rows)}")
        criteria = StoppingCriteriaList(stopping_criteria or [])
        stop_strings = stop_strings or getattr(generation_config, "stop_strings", None)
        if stop_strings:
            if self.tokenizer is None:
                raise ValueError("stop_strings needs a tokenizer: load(..., tokenizer=...)")
            criteria.append(StopStringCriteria(self.tokenizer, stop_strings))
        if generation_config is not None and generation_config.stop_strings:
            generation_config = GenerationConfig(**{**generation_config.to_dict(), "stop_strings": None})

        def continued(rows: list[list[int]], seed: int | None) -> GenerateOutput:
            target: Any = self.hierarchy.target.model  # transformers mixes generate() in by hand
            longest = max(len(row) for row in rows)
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=target.device)
            real = torch.tensor(
                [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=target.device
            )
            out: GenerateOutput = target.generate(
                ids,
                attention_mask=real,
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=criteria,
                custom_generate=self.runner(streamer, progress, seed, pinned),
                **kwargs,
            )
            return out

        try:
            return continued(rows, seed)
        except _OneByOneError:
            outputs = [
                continued([row], seed if seed is None else seed + number) for number, row in enumerate(rows)
            ]
            return joined(outputs, self.hierarchy.target.model)

    def runner(
        self,
        streamer: BaseStreamer | None,
        progress: Progress | None,
        seed: int | None,
        pinned: Callable[[int], None] | None = None,
    ) -> Callable[..., GenerateOutput]:
        """The callable that transformers' ``generate`` runs after it has prepared everything.

        Args:
            streamer, progress, seed, pinned: as for :meth:`generate`.
        """

        def run(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_inputs: Any,
        ) -> GenerateOutput:
            # Not a parameter by name: transformers would hand it over twice.
            attention_mask = model_inputs.pop("attention_mask", None)
            refuse_unsupported(generation_config, logits_processor)
            refuse_model_inputs(model_inputs)
            prompts = token_rows(input_ids, attention_mask, self.tokenizer, self.hierarchy.target.vocab_size)
            endings = [
                ending_of(generation_config, stopping_criteria, input_ids.shape[1], input_ids.device)
                for _ in prompts
            ]
            new_tokens = endings[0].max_new_tokens
            for prompt in prompts:
                self.check_length(len(prompt), new_tokens)
            law = law_of(generation_config, logits_processor)
            alike = (prompts, new_tokens, law.greedy, seed is None, self._config)
            parallel.check_alike("prompts or settings", alike)
            chosen = parallel.told(int(torch.randint(2**62, ())) if seed is None else seed)
            temperature = generation_config.temperature if generation_config.do_sample else 0.0
            entry = self._settle(law, 1.0 if temperature is None else temperature, prompts, new_tokens)
            captured = self.hierarchy.why_not_captured(law, prompts) is None
            if not captured and len(prompts) > 1:
                raise _OneByOneError
            new: list[list[int]] = [[] for _ in prompts]
            if streamer is not None:
                streamer.put(input_ids.cpu())
            steps: Iterator[list[list[int]]]
            decoder: Decoder | SteadyDecoder
            with self.hierarchy.active():
                if captured:
                    cycles = SteadyDecoder(
                        lambda number: CycleDecoder(
                            self.hierarchy.cycle(prompts, new_tokens, pinned),
                            law,
                            chosen + number,
                            repeatable=seed is not None,
                        ),
                        self.hierarchy.shrink,
                    )
                    if entry is not None and entry.pace and "tree" not in self._given:
                        cycles.pace.acceptance = entry.pace["acceptance"]
                        cycles.pace.gathered = entry.pace["gathered"]
                    cycles.prefill(prompts, progress)
                    decoder, steps = cycles, cycles.decode(prompts, endings)
                else:
                    [prompt], [ending] = prompts, endings
                    single = self.hierarchy.decoder(law, chosen, len(prompt), new_tokens, ending.stop_tokens)
                    context = single.prefill(prompt, progress)
                    decoder, steps = single, ([tokens] for tokens in single.decode(context, ending))
                for fresh in steps:
                    for row, tokens in zip(new, fresh, strict=True):
                        row += tokens
                    if streamer is not None:
                        streamer.put(torch.tensor(fresh[0]))
            if streamer is not None:
                streamer.end()
            out = self._output(prompts, new, decoder, input_ids)
            if entry is not None and self.profile is not None:
                out.profile = str(self.profile.path)
            if captured and self.hierarchy.memory is not None:
                out.memory = self.hierarchy.memory.as_dict()
            return out

        return run

    def check_length(self, prompt: int, new: int) -> None:
        """Raise ValueError where a prompt and its new tokens exceed the model's positions."""
        limit = self.hierarchy.target.max_positions
        if limit is not None and prompt + new > limit:
            fewer = f" or set max_new_tokens<={limit - prompt}" if prompt < limit else ""
            raise ValueError(
                f"{prompt} prompt tokens + {new} new ones = {prompt + new} exceed the model's "
                f"{limit} positions; shorten the prompt{fewer}"
            )

    def _output(
        self,
        prompts: list[list[int]],
        new: list[list[int]],
        decoder: Decoder | SteadyDecoder,
        input_ids: Tensor,
    ) -> GenerateOutput:
        reasons = decoder.finish_reasons
        rows = [input_ids.new_tensor(p + n) for p, n in zip(prompts, new, strict=True)]
        if len(rows) == 1:
            # As transformers does, with whatever padding the prompt came with.
            rows = [torch.cat([input_ids[0], input_ids.new_tensor(new[0])])]
        return GenerateOutput(
            sequences=padded(rows, self.hierarchy.target.model),
            levels=decoder.levels,
            finish_reason=reasons[-1],
            prefill_seconds=decoder.prefill_seconds,
            decode_seconds=decoder.decode_seconds,
            new_tokens=sum(len(n) for n in new),
            text=str(self.tokenizer.decode(new[-1], skip_special_tokens=True)) if self.tokenizer else None,
            captured=isinstance(decoder, SteadyDecoder),
            capture_seconds=decoder.capture_seconds if isinstance(decoder, SteadyDecoder) else None,
        )


class _OneByOneError(Exception):
    """These rows cannot be decoded as one batch; never leaves this module."""
