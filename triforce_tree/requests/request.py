"""One call of ``generate``, checked before and after transformers' own preparation."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from triforce_tree.decoding.sequence import Sequence
from triforce_tree.models.hf_model import HFModel
from triforce_tree.requests.checkpoint_settings import refuse_unsupported_settings
from triforce_tree.requests.inputs import Ids, Inputs, Prompts, check_rows, prompts_of, real_ids, text_alone
from triforce_tree.requests.kept_state import why_in_step
from triforce_tree.requests.keywords import (
    as_list,
    checked_stop_strings,
    generation_options,
    inferred_padding,
    pad_token,
)
from triforce_tree.requests.options import (
    check_forced_tokens,
    ending_of,
    refuse_model_inputs,
    refuse_unsupported,
)
from triforce_tree.requests.stop_strings import StopStrings
from triforce_tree.verify.sampling import ProbsFromLogits


@dataclass(frozen=True)
class Request:
    """The arguments of :meth:`Engine.generate`.

    Attributes:
        prompts: the prompts to continue.
        config, options: arguments of transformers' generate; ``options`` take precedence.
        processors, criteria: the user's own, and stop strings.
        pad_token: fills sequences that end before others.
    """

    prompts: Prompts
    config: GenerationConfig | None
    options: dict[str, Any]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    pad_token: int

    @classmethod
    def read(
        cls,
        target: HFModel,
        tokenizer: PreTrainedTokenizerBase | None,
        inputs: Inputs | None,
        input_ids: Ids | None,
        attention_mask: Ids | None,
        generation_config: GenerationConfig | Mapping[str, Any] | None,
        logits_processor: Any,
        stopping_criteria: Any,
        stop_strings: Any,
        options: Mapping[str, Any],
    ) -> "Request":
        """Check the arguments of :meth:`Engine.generate`.

        Raises:
            ValueError: an argument is wrong; the message names it.
        """
        if isinstance(inputs, Mapping):
            inputs = text_alone(inputs, target.model)
        config, own_options = generation_options(text_alone(options, target.model), generation_config)
        own = vars(config) if config is not None else {}
        settings = target.model.generation_config
        given = {name for name, value in {**own, **own_options}.items() if value is not None}
        refuse_unsupported_settings(settings, given)
        if any(own_options.get(name, own.get(name)) for name in ("output_scores", "output_logits")):
            # Else transformers would warn that they are ignored.
            own_options["return_dict_in_generate"] = True
        sources = own_options, own, vars(settings)
        padding, inferred = pad_token(*sources), inferred_padding(*sources)
        prompts = prompts_of(target, tokenizer, inputs, input_ids, attention_mask, padding, inferred)
        if not isinstance(inputs if input_ids is None else input_ids, Tensor):
            prompts = Prompts(prompts.ids.to(target.device), prompts.mask.to(target.device))
        criteria = StoppingCriteriaList(as_list("stopping_criteria", stopping_criteria))
        # Taken out in any case: transformers would ask for a tokenizer of its own.
        given_strings = own_options.pop("stop_strings", None)
        strings = checked_stop_strings(
            stop_strings or given_strings or own.get("stop_strings") or settings.stop_strings
        )
        if strings:
            if tokenizer is None:
                raise ValueError("stop_strings needs a tokenizer: load(..., tokenizer=...)")
            criteria.append(StopStrings(tokenizer, strings, int(prompts.mask.sum(1).max())))
        if config is not None and config.stop_strings:
            # Else transformers would ask for the tokenizer too.
            config = copy.deepcopy(config)
            config.stop_strings = None
        processors = LogitsProcessorList(as_list("logits_processor", logits_processor))
        return cls(prompts, config, own_options, processors, criteria, padding)


@dataclass(frozen=True)
class Job:
    """The inputs of one generation, as transformers prepared them.

    Attributes:
        input_ids: int64 ``[B, W]``, padding included.
        sequences: the prompts without padding, each with its stop criteria.
        to_probs: maps logits to distributions.
        config: all options.
        processors, criteria: all of them, the user's included.
        model_inputs: inputs of the model's forward.
    """

    input_ids: Tensor
    sequences: list[Sequence]
    to_probs: ProbsFromLogits
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    model_inputs: Mapping[str, Any]

    @classmethod
    def read(
        cls,
        target: HFModel,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_inputs: Mapping[str, Any],
    ) -> "Job":
        """Check the arguments that transformers' generate passes to a ``custom_generate`` callable.

        Raises:
            ValueError: an option or an input would be ignored, or a prompt is empty.
        """
        inputs = text_alone(model_inputs, target.model)
        mask = inputs.pop("attention_mask", None)
        refuse_unsupported(config, processors)
        check_forced_tokens(config, target.vocab_size)
        refuse_model_inputs(inputs, input_ids, mask)
        rows = real_ids(input_ids, mask)
        check_rows(rows, target.vocab_size)
        # Processors and criteria see the padding and count it, as in transformers.
        padding: list[list[int]] = [[] for _ in rows]
        if mask is not None:
            padding = [row[hidden].tolist() for row, hidden in zip(input_ids, mask == 0, strict=True)]
        # Where processors read the tokens so far, the sequences of a batch are decoded one by one.
        to_probs = ProbsFromLogits(processors, greedy=not config.do_sample, padding=padding[0])
        sequences = [
            Sequence(
                row.tolist(), ending_of(config, criteria, input_ids.shape[1], input_ids.device, own), number
            )
            for number, (row, own) in enumerate(zip(rows, padding, strict=True))
        ]
        return cls(input_ids, sequences, to_probs, config, processors, criteria, model_inputs)

    def why_in_step(self, vocabulary: int) -> str | None:
        """Returns why processors and criteria must be called once per token with all sequences, or None.

        Args:
            vocabulary: V of the scores.
        """
        passed = bool(self.config.output_scores and self.config.return_dict_in_generate)
        return why_in_step(self.processors, self.criteria, self.input_ids, vocabulary, passed)

    @property
    def prompts(self) -> list[list[int]]:
        return [sequence.prompt for sequence in self.sequences]

    def joining(self, prompt: list[int], new_tokens: int, number: int, seed: int | None) -> Sequence:
        """Returns a sequence that joins a running batch, with the stop criteria of the call."""
        ending = ending_of(self.config, self.criteria, len(prompt), self.input_ids.device)
        return Sequence(prompt, replace(ending, max_new_tokens=new_tokens), number, seed)

    @property
    def pad_token(self) -> int:
        return pad_token(vars(self.config))

    @property
    def outputs(self) -> set[str]:
        """Returns which of "logits" and "scores" the call requests."""
        return {name for name in ("logits", "scores") if getattr(self.config, f"output_{name}")}

    @property
    def new_tokens(self) -> int:
        """Returns the most new tokens of a sequence."""
        return self.sequences[0].ending.max_new_tokens

    @property
    def temperature(self) -> float:
        if not self.config.do_sample:
            return 0.0
        return 1.0 if self.config.temperature is None else self.config.temperature
