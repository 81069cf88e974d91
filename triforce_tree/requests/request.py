"""One call of ``generate``: its arguments are checked, prepared by transformers, and become sequences."""

import copy
import json
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from triforce_tree.decoding.sequence import Sequence
from triforce_tree.grammar.matching import Grammars, Matcher
from triforce_tree.grammar.values import Grammar
from triforce_tree.models.hf_model import HFModel
from triforce_tree.option_checks import shortened
from triforce_tree.policy.passes import SpeculationLimit
from triforce_tree.requests.endings import StopStrings, ending_of
from triforce_tree.requests.inputs import Inputs, Prompts, check_tokens, prompts_of, real_tokens, text_alone
from triforce_tree.requests.joining import Joining
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.options import (
    PENALTIES,
    PER_PROMPT,
    check_prepared,
    given_options,
    per_prompt,
    refuse_model_inputs,
    supported,
    without_settings,
)
from triforce_tree.requests.streamers import Streamers
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import listed_ids
from triforce_tree.verify.draws import sequence_seed
from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.sampling_options import GeneratedTokenPenalties

# A ``prefix_allowed_tokens_fn``: the tokens that may follow the text of the sequence with this number.
Allowed = Callable[[int, Tensor], list[int]]
# Returns the sequence of a prompt with options, for a number of new tokens and a seed.
Other = Callable[[list[int], Mapping[str, Any], int, int | None], Sequence]

# Options of prompts that join, of which is kept what transformers has prepared.
_MOST_KNOWN = 64


@dataclass(frozen=True)
class RunOptions:
    """The arguments of :meth:`Engine.generate` that are not transformers' options; they are described
    there.

    Attributes:
        grammar: the grammar of each prompt, or None; None if there are none.
        logprobs: whether the log-probabilities of each prompt's new tokens are wanted; None for no prompt.
        grammars: compiles them.
    """

    streamers: Streamers = field(default_factory=Streamers)
    progress: Progress | None = None
    seed: int | None = None
    seeds: list[int | None] | None = None
    pinned: Callable[[int], None] | None = None
    logprobs: list[bool] | None = None
    max_batch: int | None = None
    joining: Joining | None = None
    grammar: list[Grammar | None] | None = None
    grammars: Grammars | None = None
    speculation: SpeculationLimit | None = None

    def matcher(self, grammar: Grammar | None, end_tokens: Collection[int]) -> Matcher | None:
        """Returns the state of a grammar before the first new token, or None without a grammar."""
        if grammar is None:
            return None
        assert self.grammars is not None, "requests with a grammar have a compiler"
        return self.grammars.matcher(grammar, end_tokens)

    def alone(self, number: int) -> "RunOptions":
        """Returns the options for decoding one of the sequences alone. Its seed is such that its draws stay
        the same.
        """
        seed = self.seed if self.seed is None else sequence_seed(self.seed, number)
        seeds = self.seeds and self.seeds[number : number + 1]
        grammar = self.grammar and self.grammar[number : number + 1]
        logprobs = self.logprobs and self.logprobs[number : number + 1]
        return replace(
            self, streamers=self.streamers.alone(number), seed=seed, seeds=seeds, grammar=grammar,
            logprobs=logprobs, joining=None,
        )  # fmt: skip


def seeds_of(seed: Any, count: int) -> tuple[int | None, list[int | None] | None]:
    """Returns (seed, None) for one seed, or (None, seeds) for a list with one seed for each of ``count``
    sequences.

    Raises:
        ValueError: the value is something else, or the list has another length.
    """
    if not isinstance(seed, (list, tuple)):
        return checked("seed", seed), None
    if len(seed) != count:
        raise ValueError(f"seed has {len(seed)} entries for {count} sequences; give one for each, or one int")
    return None, [checked("seed", each) for each in seed]


def speculation_of(given: Any) -> SpeculationLimit | None:
    """Returns the limit that an option ``speculation`` of :meth:`Engine.generate` sets.

    Raises:
        ValueError: the value is neither "off" nor a dict with ``levels`` and ``length``.
    """
    if given is None or given == "off":
        return given and SpeculationLimit(1)
    if not isinstance(given, Mapping) or given.keys() - {"levels", "length"}:
        raise ValueError(
            f'speculation={given!r} must be "off", or a dict such as {{"levels": 2, "length": 8}}, of which '
            "either may be left out"
        )
    levels, length = given.get("levels", 3), given.get("length")
    if levels not in (1, 2, 3):
        raise ValueError(f"speculation has levels={levels!r}; give 1 (no drafts), 2 or 3")
    return SpeculationLimit(levels, checked("length", length))


def logprobs_of(given: Any, count: int) -> list[bool]:
    """Returns a flag for each of ``count`` sequences.

    Raises:
        ValueError: the value is something else, or the list has another length.
    """
    if not isinstance(given, (list, tuple)):
        return [bool(checked("logprobs", given))] * count
    if len(given) != count:
        raise ValueError(f"logprobs has {len(given)} values for {count} prompts; give one for each, or one")
    return [bool(checked("logprobs", each)) for each in given]


class Prepared(NamedTuple):
    """What transformers' ``generate`` prepares for its own decoding of prompts.

    Attributes:
        processors, criteria: all of them, the user's included.
        config: all options.
        model_inputs: further inputs of the model's forward.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Arguments:
    """The checked arguments of a call, in the form in which transformers' ``generate`` takes them.

    Attributes:
        prompts: the prompts as they were given.
        input_ids, attention_mask: the prompts with all padding on the left, int64 ``[B, W]``, on the
            target's device.
        config, options: arguments of transformers' generate; ``options`` take precedence.
        processors, criteria: the user's own, and stop strings.
        allowed: the user's ``prefix_allowed_tokens_fn``.
        pad_token: fills sequences that end before others.
        penalties: the options ``PENALTIES``.
        each: the options of each prompt that it has not in common with others; empty if all are in common.
        of_other: returns the arguments of another prompt with these options, which replace those of
            ``PER_PROMPT`` if the third argument is true.
    """

    prompts: Prompts
    input_ids: Tensor
    attention_mask: Tensor
    config: GenerationConfig | None
    options: dict[str, Any]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    allowed: Allowed | None
    pad_token: int
    penalties: Mapping[str, float]
    each: Sequences[Mapping[str, Any]]
    of_other: Callable[[list[int], Mapping[str, Any], bool], "Arguments"]

    @classmethod
    def read(
        cls,
        target: HFModel,
        tokenizer: PreTrainedTokenizerBase | None,
        inputs: Inputs | None,
        given: Mapping[str, Any],
    ) -> "Arguments":
        """Checks the inputs and options of :meth:`Engine.generate`.

        Args:
            given: keywords of transformers' generate, and its options.

        Raises:
            ValueError: an argument is wrong; the message names it.
        """
        given, lists = per_prompt(given)
        common = {name: value for name, value in given.items() if name not in _PROMPTS}

        def of_other(prompt: list[int], own: Mapping[str, Any], replaces: bool) -> "Arguments":
            left = {name: value for name, value in common.items() if not (replaces and name in PER_PROMPT)}
            return cls.read(target, tokenizer, [prompt], {**left, **own})

        input_ids, attention_mask, config, processors, criteria, allowed, strings = (
            given.pop(name, None) for name in _PARAMETERS
        )
        allowed = checked("prefix_allowed_tokens_fn", allowed)
        if isinstance(inputs, Mapping):
            inputs = text_alone(inputs, target.model)
        settings = target.settings
        config, options = given_options(text_alone(given, target.model), config, settings)
        sources = options, vars(config) if config is not None else {}, vars(settings)
        if any(options.get(name, sources[1].get(name)) for name in ("output_scores", "output_logits")):
            # Otherwise transformers would warn that they are ignored.
            options["return_dict_in_generate"] = True
        pad_token, inferred = _padding(*sources)
        ends, pad = (_first(name, sources) for name in ("eos_token_id", "pad_token_id"))
        if isinstance(ends, list | tuple) and not ends and pad is None:
            # transformers would pad with the first end token, and there is none.
            options["pad_token_id"] = pad_token
        prompts = prompts_of(target, tokenizer, inputs, input_ids, attention_mask, pad_token, inferred)
        criteria = StoppingCriteriaList(checked("stopping_criteria", criteria) or ())
        strings = _first("stop_strings", ({"stop_strings": strings}, *sources))
        # transformers does not get stop strings, for which it would need a tokenizer of its own.
        options.pop("stop_strings", None)
        if config is not None and config.stop_strings:
            config = copy.deepcopy(config)
            config.stop_strings = None
        if strings := checked("stop_strings", strings):
            if tokenizer is None:
                raise ValueError("stop_strings needs a tokenizer: load(..., tokenizer=...)")
            criteria.append(StopStrings(tokenizer, strings, max(map(len, prompts.tokens))))
        processors = LogitsProcessorList(checked("logits_processor", processors) or ())
        ids, mask = prompts.input_ids.to(target.device), prompts.attention_mask.to(target.device)
        penalties = {name: float(options.pop(name, None) or 0) for name in PENALTIES}
        each = _by_prompt(lists, len(prompts.tokens))
        return cls(
            prompts, ids, mask, config, options, processors, criteria, allowed, pad_token, penalties, each,
            of_other,
        )  # fmt: skip

    def prepared(self, target: HFModel, how: RunOptions, number: int | None = None) -> "Request":
        """Returns the request, with logits processors and stop criteria as transformers prepares them for its
        own decoding.

        Args:
            number: the index of a prompt that is decoded alone; None for all prompts together.
        """
        if self.each:
            chosen = range(len(self.each)) if number is None else [number]
            parts = [
                self.of_other(self.prompts.tokens[n], self.each[n], False).prepared(
                    target, how.alone(n) if number is None else how
                )
                for n in chosen
            ]
            if number is not None:
                return parts[0]
            sequences = [replace(part.sequences[0], number=number) for number, part in enumerate(parts)]
            return replace(
                parts[0], given_ids=self.prompts.ids, input_ids=self.input_ids, sequences=sequences, how=how,
                parts=parts,
            )  # fmt: skip
        own = {} if self.config is None else vars(self.config)
        sources = self.options, own, vars(target.settings)
        decay, ends = (_first(name, sources) for name in ("exponential_decay_length_penalty", "eos_token_id"))
        if decay is not None and ends is None:
            raise ValueError(
                "exponential_decay_length_penalty raises the score of the end token, and the model names "
                "none; give eos_token_id"
            )
        part, first = (slice(None), 0) if number is None else (slice(number, number + 1), number)
        allowed, given_ids, ids = self.allowed, self.prompts.ids[part], self.input_ids[part]
        made: list[Prepared] = []

        def taken(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_inputs: Any,
        ) -> Prepared | None:
            made.append(Prepared(logits_processor, stopping_criteria, generation_config, model_inputs))
            # transformers passes on the tensor itself.
            return made[0] if input_ids is ids or torch.equal(input_ids, ids) else None

        processors = LogitsProcessorList(self.processors)
        if any(self.penalties.values()):
            processors.append(GeneratedTokenPenalties(ids.shape[1], *self.penalties.values()))
        returned, cause = None, None
        try:
            returned = without_settings(target.model).generate(
                ids, attention_mask=self.attention_mask[part], generation_config=self.config,
                logits_processor=processors, stopping_criteria=self.criteria,
                prefix_allowed_tokens_fn=allowed
                and renumbered(allowed, lambda n: first + n, target.vocab_size),
                custom_generate=taken, **self.options,
            )  # fmt: skip
        except Exception as error:  # what follows ``taken`` is code of the model's class
            if not made:
                raise
            cause = error
        if not made or returned is not made[0]:
            raise ValueError(
                f"{target.name} has its own generate, whose changes of the prompt or the output decoding "
                "here would pass by; call it with custom_generate=triforce_tree.custom_generate(...)"
            ) from cause
        tokens = self.prompts.tokens[part]
        # Without padding nothing is read from the device, which would be waited for.
        padding = [
            row[: len(row) - len(own)].tolist() if len(row) > len(own) else []
            for row, own in zip(ids, tokens, strict=True)
        ]
        request = Request.of(target, given_ids, ids, tokens, padding, made[0], how)
        return replace(request, other=self._others(target))

    def _others(self, target: HFModel) -> "Other":
        """Returns a function that makes the sequences of other prompts.

        transformers takes milliseconds to prepare the options of a prompt. What it has prepared serves other
        prompts with the same options, unless it depends on the prompt.
        """
        known: dict[str, Sequence] = {}

        def other(
            prompt: list[int], options: Mapping[str, Any], new_tokens: int, seed: int | None
        ) -> Sequence:
            key = _as_text(options, vars(target.settings))
            if (alike := known.get(key)) is not None:
                check_tokens([prompt], target.vocab_size)
                ending = replace(alike.ending, max_new_tokens=checked("max_new_tokens", new_tokens))
                own_seed = seed if alike.to_probs and not alike.to_probs.greedy else None
                return Sequence(prompt, ending, 0, own_seed, None, alike.to_probs, alike.outputs)
            own = {name: value for name, value in options.items() if name != "logprobs"}
            arguments = self.of_other(prompt, {**own, "max_new_tokens": new_tokens}, True)
            how = RunOptions(seeds=[seed], logprobs=[bool(options.get("logprobs"))])
            [sequence] = arguments.prepared(target, how).sequences
            assert sequence.to_probs is not None
            if key and sequence.to_probs.context_free and sequence.ending.stop is None:
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[key] = replace(sequence, prompt=[])
            return sequence

        return other


def renumbered(allowed: Allowed, number: Callable[[int], int], vocabulary: int) -> Allowed:
    """Returns a ``prefix_allowed_tokens_fn`` that calls ``allowed`` with other numbers of sequences, and
    raises a ValueError where it returns no tokens of the vocabulary.
    """

    def own(n: int, sent: Tensor) -> Any:
        found: Any = allowed(number(n), sent)
        try:
            tokens = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError):
            tokens = torch.empty(0, 0)
        known = tokens.dtype is torch.bool or ((-vocabulary <= tokens) & (tokens < vocabulary)).all()
        if tokens.dim() != 1 or not len(tokens) or not known:
            raise ValueError(
                f"prefix_allowed_tokens_fn returned {shortened(found)}; return a list of at "
                f"least one token id below {vocabulary}"
            )
        return found

    # What the function says about itself still holds (see ``kept_state.py``).
    vars(own).update(keeps_state=getattr(allowed, "keeps_state", None))
    return own


def _by_prompt(lists: Mapping[str, Sequences[Any]], count: int) -> list[dict[str, Any]]:
    """Returns the options of each prompt.

    Raises:
        ValueError: a list has another length.
    """
    for name, values in lists.items():
        if len(values) != count:
            raise ValueError(
                f"{name} has {len(values)} values for {count} prompts; give one for each, or a single value"
            )
    if not lists:
        return []
    return [
        {name: values[n] for name, values in lists.items() if values[n] is not None} for n in range(count)
    ]


_PROMPTS = ("input_ids", "attention_mask")
# Parameters of transformers' generate that are no options of GenerationConfig.
_PARAMETERS = (
    "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "stop_strings",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """Prompts that are decoded together, with the options of their call.

    Attributes:
        given_ids: the prompts as they were given, int64 ``[B, W]``; the output begins with them.
        input_ids: the prompts with all padding on the left, int64 ``[B, W]``, on the target's device.
        sequences: one for each prompt.
        to_probs: maps logits to distributions.
        processors, criteria, config, model_inputs: see :class:`Prepared`.
        how: the options of this package.
        pad_token: fills sequences that end before others.
        parts: a request for each prompt alone, if the prompts have different options.
        other: returns the sequence of another prompt with other options of ``PER_PROMPT``, for a number of
            new tokens and a seed; None if transformers has prepared the request.
    """

    given_ids: Tensor
    input_ids: Tensor
    sequences: list[Sequence]
    to_probs: ProbsFromLogits
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_inputs: Mapping[str, Any]
    how: RunOptions
    pad_token: int
    parts: Sequences["Request"] = ()
    other: Other | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """Returns the tokens of each prompt, without padding."""
        return [sequence.prompt for sequence in self.sequences]

    @property
    def new_tokens(self) -> int:
        """Returns the most new tokens of a sequence."""
        return max(sequence.ending.max_new_tokens for sequence in self.sequences)

    @property
    def outputs(self) -> frozenset[str]:
        """Returns which of "logits", "scores" and "logprobs" the output will have."""
        return frozenset().union(*(sequence.outputs for sequence in self.sequences))

    def alike(self) -> dict[str, object]:
        """Returns what must be equal on all ranks that decode this request together, by plural names."""
        options = [
            (
                part.config.to_dict(),
                *([type(each) for each in some] for some in (part.processors, part.criteria)),
            )
            for part in self.parts or [self]
        ]
        grammars, how = [sequence.matcher is None for sequence in self.sequences], self.how
        return {
            "prompts": self.prompts, "seeds": (how.seed, how.seeds),
            "generation options": (options, grammars, how.max_batch, how.logprobs, how.speculation),
        }  # fmt: skip

    @property
    def masked(self) -> bool:
        """Returns whether a sequence has a grammar."""
        return any(sequence.matcher is not None for sequence in self.sequences)

    @classmethod
    def of(
        cls,
        target: HFModel,
        given_ids: Tensor,
        input_ids: Tensor,
        tokens: Sequences[list[int]],
        padding: Sequences[list[int]],
        prepared: Prepared,
        how: RunOptions,
    ) -> "Request":
        """Makes the sequences of prompts.

        Args:
            tokens: the prompts without padding.
            padding: the padding of each prompt. Processors and criteria see it and count it, as in
                transformers.

        Raises:
            ValueError: an option that transformers has prepared cannot be carried out.
        """
        processors, criteria, config, _ = prepared
        check_prepared(config, processors, target.vocab_size)
        seeds = how.seeds if how.seeds is not None and config.do_sample else [None] * len(tokens)
        to_probs = ProbsFromLogits(processors, greedy=not config.do_sample, padding=padding[0])
        named = ("logits", "scores") if config.return_dict_in_generate else ()
        outputs = frozenset(name for name in named if getattr(config, f"output_{name}"))
        sequences = []
        for number, (prompt, own) in enumerate(zip(tokens, padding, strict=True)):
            ending = ending_of(config, criteria, input_ids.shape[1], input_ids.device, own)
            matcher = how.matcher(how.grammar[number] if how.grammar else None, ending.stop_tokens)
            reads = not to_probs.context_free
            probs = ProbsFromLogits(processors, to_probs.greedy, own, number) if reads else to_probs
            wanted = outputs | {"logprobs"} if how.logprobs and how.logprobs[number] else outputs
            sequences.append(Sequence(prompt, ending, number, seeds[number], matcher, probs, wanted))
        pad_token, _ = _padding(vars(config))
        return cls(given_ids, input_ids, sequences, to_probs, *prepared, how, pad_token)

    @classmethod
    def from_transformers(
        cls, target: HFModel, input_ids: Tensor, prepared: Prepared, how: RunOptions
    ) -> "Request":
        """Checks the arguments that transformers' ``generate`` passes to a ``custom_generate`` callable.

        Raises:
            ValueError: an option or an input would be ignored, or a prompt is empty.
        """
        inputs = text_alone(prepared.model_inputs, target.model)
        mask = inputs.pop("attention_mask", None)
        for name, value in prepared.config.to_diff_dict().items():
            supported(name, value)
        refuse_model_inputs(inputs, input_ids, mask)
        tokens = real_tokens(input_ids, mask)
        check_tokens(tokens, target.vocab_size)
        padding: list[list[int]] = [[] for _ in tokens]
        if mask is not None:
            padding = [row[hidden].tolist() for row, hidden in zip(input_ids, mask == 0, strict=True)]
        return cls.of(target, input_ids, input_ids, tokens, padding, prepared, how)

    def sequence(
        self,
        prompt: list[int],
        new_tokens: int,
        number: int = 0,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Sequence:
        """Returns a sequence of another prompt, without a grammar.

        Args:
            options: its options of ``PER_PROMPT``; None for those of the first prompt.

        Raises:
            ValueError: an option has a wrong value.
        """
        if options is not None:
            assert self.other is not None, "prompts join the requests of Engine.generate"
            return replace(self.other(prompt, options, new_tokens, seed), number=number)
        ending = ending_of(self.config, self.criteria, len(prompt), self.input_ids.device)
        ending = replace(ending, max_new_tokens=new_tokens)
        return Sequence(prompt, ending, number, seed, None, self.to_probs, self.outputs)


def _first(name: str, sources: Sequences[Mapping[str, Any]]) -> Any:
    """Returns the value of an option in the first source that has it, or None."""
    return next((own[name] for own in sources if own.get(name) is not None), None)


def _as_text(*options: Mapping[str, Any]) -> str:
    """Returns options as JSON; an empty string if one of them is no plain value."""
    try:
        return json.dumps(options, sort_keys=True)
    except (TypeError, ValueError):
        return ""


def _padding(*sources: Mapping[str, Any]) -> tuple[int, int | None]:
    """Returns the token that fills shorter sequences, and the token that transformers treats as padding in
    prompts without a mask, or None.

    Both are the pad token, if there is one. Without one, the first EOS token fills. A pad token that is also
    an EOS token is not treated as padding.

    Args:
        sources: options by name; earlier sources take precedence.
    """
    pad, ends = (listed_ids(_first(name, sources)) for name in ("pad_token_id", "eos_token_id"))
    fill = next(iter((*pad, *ends)), 0)
    return fill, pad[0] if pad and pad[0] not in ends else None
