"""What ``Engine`` takes from this folder: ``tree``, and several texts of one prompt by ``generate``."""

from collections.abc import Callable, Mapping
from functools import wraps
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from triforce_tree.branching.options import given_prompts, leaf_options
from triforce_tree.branching.pool import slot_bytes
from triforce_tree.branching.several.beam_search import beam_search
from triforce_tree.branching.tree import Branch, TextTree
from triforce_tree.generation.inputs import Inputs
from triforce_tree.generation.keywords import as_list, checked_seed, checked_switch
from triforce_tree.generation.output import GenerateOutput, appended, by_row
from triforce_tree.runtime.stats import Progress
from triforce_tree.verify.sampling import Stream, derived

if TYPE_CHECKING:
    from triforce_tree.engine import Engine

_MOST_TEXTS = 65_536
"""Texts of one prompt."""

Generate = TypeVar("Generate", bound=Callable[..., GenerateOutput])


def with_several(generate: Generate) -> Generate:
    """``Engine.generate`` that also carries out ``num_beams`` and ``num_return_sequences``.

    Each prompt is then stored and read once for all its texts. They are decoded plainly, a token of each in a
    forward. Beams are those of transformers' ``generate``, scores included; samples are independent.
    """

    @wraps(generate)
    def run(engine: "Engine", *args: Any, **kwargs: Any) -> GenerateOutput:
        beams, count = (number_asked(name, kwargs) for name in ("num_beams", "num_return_sequences"))
        if beams == count == 1:
            return generate(engine, *args, **kwargs)
        inputs, others = args[0] if args else kwargs.get("inputs"), {**kwargs, "inputs": None}
        if kwargs.get("streamer") is not None:
            asked = f"num_beams={beams}" if beams > 1 else f"num_return_sequences={count}"
            raise ValueError(f"a streamer takes one text as it is made, not those of {asked}; leave out one")
        if beams == 1:
            return _samples(engine, generate, inputs, count, others)
        if count > beams:
            raise ValueError(f"num_return_sequences={count} exceeds num_beams={beams}; ask for as many beams")
        return beam_search(engine, inputs, beams, count, others)

    return cast(Generate, run)


def tree_of(
    engine: "Engine", prompt: Inputs, *, max_bytes: int | None = None, progress: Progress | None = None
) -> TextTree:
    """A text that branches, after a prompt that is prefilled now: see :class:`TextTree`."""
    return TextTree(engine, prompt, max_bytes, progress)


def number_asked(name: str, kwargs: Mapping[str, Any]) -> int:
    """The value of ``num_beams`` or ``num_return_sequences`` in the arguments of a call, 1 without one.

    Raises:
        ValueError: it is no integer from 1 to ``_MOST_TEXTS``.
    """
    config = kwargs.get("generation_config")
    value = kwargs.get(name)
    if value is None and config is not None:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TEXTS:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1, and at most {_MOST_TEXTS}")
    return value


def _samples(
    engine: "Engine", generate: Callable[..., GenerateOutput], inputs: Any, count: int, kwargs: dict[str, Any]
) -> GenerateOutput:
    """``count`` texts of each prompt, drawn independently; arguments as of :meth:`Engine.generate`.

    Args:
        generate: of one text a prompt, which decodes them where processors need all texts together.
    """
    prompts, options = given_prompts(engine, inputs, kwargs)
    if _in_step(engine, prompts.ids.shape[1], count, count * len(prompts.rows), options):
        ids, mask = (each.repeat_interleave(count, 0) for each in (prompts.ids, prompts.mask))
        out = generate(engine, input_ids=ids, attention_mask=mask, **options)
        if out.logprobs is not None:
            out.sequences_scores = out.logprobs.sum(1)
        return out
    logprobs = checked_switch("logprobs", options.pop("logprobs", None))
    seed = checked_seed(options.pop("seed", None))
    chosen = int(torch.randint(2**62, ())) if seed is None else seed
    progress, allowed = options.pop("progress", None), options.pop("prefix_allowed_tokens_fn", None)
    branches: list[Branch] = []
    prefill = decode = 0.0
    for number, prompt in enumerate(prompts.rows):
        own = dict(options)
        if allowed is not None:
            own["logits_processor"] = _constrained(own, _of_prompt(allowed, number))
        how = leaf_options(engine, len(prompt), own)
        # Whatever the size of a page, each text and the prompt have one that is not full.
        slots = len(prompt) + 64 + count * (how.job.new_tokens + 64)
        start = perf_counter()
        tree = TextTree(engine, prompt, slots * slot_bytes(engine.hierarchy.target), progress)
        prefill, start = prefill + perf_counter() - start, perf_counter()
        branches += tree.generate(
            tree.fork(tree.root, count), seed=derived(chosen, Stream.ATTEMPT, number), **own
        )
        decode += perf_counter() - start
    new = [branch.tokens for branch in branches]
    found = [torch.tensor(branch.logprobs, dtype=torch.float32) for branch in branches]
    return GenerateOutput(
        sequences=appended(prompts.ids.repeat_interleave(count, 0), new, prompts.request.pad_token),
        finish_reason=by_row([branch.finish_reason for branch in branches]),
        prefill_seconds=prefill,
        decode_seconds=decode,
        new_tokens=by_row([len(tokens) for tokens in new]),
        text=None if engine.tokenizer is None else by_row([branch.text for branch in branches]),
        logprobs=torch.nn.utils.rnn.pad_sequence(found, batch_first=True) if logprobs else None,
        sequences_scores=torch.stack([own.sum() for own in found]) if logprobs else None,
    )


def _in_step(engine: "Engine", width: int, count: int, texts: int, options: Mapping[str, Any]) -> bool:
    """Whether processors or criteria need all texts together, one token of each at a time.

    Args:
        width: tokens of a prompt, padding included.
        count: texts of each prompt.
        texts: of all prompts.
    """
    left_out = ("logprobs", "seed", "progress", "prefix_allowed_tokens_fn", "output_scores", "output_logits")
    own = {name: value for name, value in options.items() if name not in left_out}
    if (allowed := options.get("prefix_allowed_tokens_fn")) is not None:
        own["logits_processor"] = _constrained(own, allowed)
    job = leaf_options(engine, width, own).job
    if job.to_probs.greedy:
        raise ValueError(
            f"num_return_sequences={count} of greedy decoding are {count} equal texts; "
            "set do_sample=True with a temperature above 0, or num_beams"
        )
    return job.why_in_step(engine.hierarchy.target.vocab_size, texts) is not None


def _constrained(options: Mapping[str, Any], allowed: Callable[[int, Any], list[int]]) -> LogitsProcessorList:
    """The processors of a call, and one for ``prefix_allowed_tokens_fn``."""
    given = as_list("logits_processor", options.get("logits_processor"))
    return LogitsProcessorList([*given, PrefixConstrainedLogitsProcessor(allowed, 1)])


def _of_prompt(allowed: Callable[[int, Any], list[int]], number: int) -> Callable[[int, Any], list[int]]:
    return lambda _, sent: allowed(number, sent)
