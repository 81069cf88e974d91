"""Several texts per prompt in ``generate``: beams over a tree of texts, and samples as one batch."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from triforce_tree.branching.node import Node
from triforce_tree.branching.options import OF_ENGINE, check_engine, one_text_each, prepared_request
from triforce_tree.branching.pages import page_slots
from triforce_tree.branching.slots import TreeSlots, needs_before
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.requests.endings import CheckedCriterion
from triforce_tree.requests.inputs import Prompts, real_tokens
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.options import OF_BEAMS, per_prompt, without_settings
from triforce_tree.requests.output import GenerateOutput, by_row
from triforce_tree.requests.own_forward import OwnForward, seeded, with_own_forward
from triforce_tree.requests.request import renumbered, speculation_of
from triforce_tree.runtime.stats import Progress
from triforce_tree.text.new_text import new_text
from triforce_tree.text.vocabulary import Vocabulary
from triforce_tree.verify.checked_processors import CheckedProcessor, Drawable
from triforce_tree.verify.draws import sequence_seed
from triforce_tree.verify.sampling import NAN_LOGITS

_SCORES = ("output_scores", "output_logits")


def several_texts(engine: LoadedEngine, beams: int, count: int, kwargs: dict[str, Any]) -> GenerateOutput:
    """Returns ``count`` texts of each prompt.

    Beams are those of transformers' ``generate``, decoded plainly over one tree. Samples are independent
    sequences of one batch.

    Args:
        kwargs: arguments of :meth:`Engine.generate`.
    """
    if beams == 1:
        return _samples(engine, count, kwargs)
    if kwargs.get("streamer") is not None:
        asked = f"num_beams={beams}"
        raise ValueError(f"a streamer takes one text as it is made, not those of {asked}; leave out one")
    if count > beams:
        raise ValueError(f"num_return_sequences={count} exceeds num_beams={beams}; ask for as many beams")
    if kwargs.get("grammar") is not None:
        raise ValueError(f"grammar is not supported with num_beams={beams}; leave out one")
    return _beams(engine, beams, count, kwargs)


def _samples(engine: LoadedEngine, count: int, kwargs: dict[str, Any]) -> GenerateOutput:
    """Returns ``count`` texts of each prompt, drawn independently as sequences of one batch, with drafts.

    With one seed, the text of sample i depends only on the prompt, its index, the seed and i.

    Args:
        kwargs: arguments of :meth:`Engine.generate`.
    """
    arguments, options = one_text_each(engine, kwargs)
    prompts = arguments.prompts
    ids, mask = prompts.input_ids, prompts.attention_mask
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    options, lists = per_prompt(options)
    own = {name: value for name, value in options.items() if name not in (*OF_ENGINE, *_SCORES)}
    for chosen in arguments.each or [{}]:
        if prepared_request(engine, ids.shape[1], {**own, **chosen}).to_probs.greedy:
            raise ValueError(
                f"num_return_sequences={count} of greedy decoding are {count} equal texts; "
                "set do_sample=True with a temperature above 0, or num_beams"
            )
    options |= {name: [each for each in values for _ in range(count)] for name, values in lists.items()}
    allowed = allowed and renumbered(allowed, lambda n: n // count, engine.target.vocab_size)
    if isinstance(grammar := options.get("grammar"), list | tuple):
        options["grammar"] = [each for each in grammar for _ in range(count)]
    seed = options.pop("seed", None)
    if seed is not None and not isinstance(seed, Sequence):
        chosen = checked("seed", seed)
        of_prompts = [sequence_seed(chosen, number) for number in range(len(ids))]
        seed = [sequence_seed(each, number) for each in of_prompts for number in range(count)]
    out = engine.generate(
        input_ids=ids.repeat_interleave(count, 0), attention_mask=mask.repeat_interleave(count, 0),
        prefix_allowed_tokens_fn=allowed, streamer=kwargs.get("streamer"), pinned=kwargs.get("pinned"),
        seed=seed, **options,
    )  # fmt: skip
    out.sequences = _after_given(prompts, count, out.sequences)
    if out.logprobs is not None:
        out.sequences_scores = out.logprobs.sum(1)
    return out


class BeamTree(OwnForward):
    """The texts of all beams as one tree, as a cache that transformers reorders.

    Each prompt is a node, which is stored and read once for its beams. Each of its beams has a child with the
    new tokens.

    Args:
        slots: keys and values.
        width: beams of each prompt.
        progress: called with the number of tokens of each chunk of a long prompt.
        with_nan: whether logits may contain NaN, which a processor removes.
    """

    def __init__(
        self, slots: TreeSlots, width: int, progress: Progress | None = None, with_nan: bool = False
    ) -> None:
        super().__init__()
        self._slots, self._width, self._progress, self._with_nan = slots, width, progress, with_nan
        # The beams are in the order of transformers' batch.
        self._beams: list[Node] = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Lets beam i continue the former beam ``beam_idx[i]``; int64 ``[beams]``."""
        sources = [self._beams[index] for index in beam_idx.tolist()]
        kept = set(sources)
        free = [node for node in self._beams if node not in kept]
        for number, source in enumerate(sources):
            if source in kept:
                kept.remove(source)
            else:
                # A second beam continues this one, in the place of a beam that none continues.
                taken = next(node for node in free if node.parent is source.parent)
                free.remove(taken)
                self._slots.copy(source, taken)
                sources[number] = taken
        self._beams = sources

    def step(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if not self._beams:
            mask = None if attention_mask is None else attention_mask[:: self._width]
            prompts = [Node(None, prompt) for prompt in real_tokens(input_ids[:: self._width], mask)]
            self._beams = [Node(prompt) for prompt in prompts for _ in range(self._width)]
            self._slots.fill(needs_before(self._beams), self._progress)
        else:
            for node, token in zip(self._beams, input_ids[:, -1].tolist(), strict=True):
                node.append([token])
        logits = self._slots.last_logits(self._beams)
        if not self._with_nan and bool(logits.isnan().any()):
            raise ValueError(NAN_LOGITS)
        return logits


def _known(callback: Any) -> bool:
    """Returns whether a logits processor or stopping criterion is one of transformers."""
    return type(callback).__module__.startswith("transformers.")


def _beams(engine: LoadedEngine, beams: int, count: int, kwargs: dict[str, Any]) -> GenerateOutput:
    """Returns the best ``count`` of ``beams`` texts of each prompt, by transformers' own beam search.

    Args:
        kwargs: arguments of :meth:`Engine.generate`.

    Raises:
        ValueError: an option is not supported by beam search.
    """
    check_engine(engine)
    target = engine.target
    settings = {name: checked(name, _setting(engine, kwargs, name)) for name in OF_BEAMS}
    arguments, options = one_text_each(engine, kwargs)
    if arguments.each or isinstance(kwargs.get("logprobs"), list | tuple):
        raise ValueError(
            f"options of each prompt are not supported with num_beams={beams}; give all prompts the same"
        )
    # Nothing is drafted, whatever limits drafts.
    speculation_of(options.pop("speculation", None))
    for name in ("max_batch", "joining"):
        if options.pop(name, None) is not None:
            raise ValueError(f"{name} is not supported with num_beams={beams}; leave out one")
    if options.pop("logprobs", None):
        raise ValueError(f"logprobs=True is not supported with num_beams={beams}; use output_scores=True")
    seed, progress = checked("seed", options.pop("seed", None)), options.pop("progress", None)
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    prompts, width = arguments.prompts.tokens, arguments.input_ids.shape[1]
    request = prepared_request(engine, width, {k: v for k, v in options.items() if k not in _SCORES})
    new_tokens, ends = request.new_tokens, request.sequences[0].ending.stop_tokens
    for prompt in prompts:
        target.check_length(len(prompt), new_tokens)
    start = perf_counter()
    processors = [each if _known(each) else CheckedProcessor(each) for each in arguments.processors]
    criteria = [each if _known(each) else CheckedCriterion(each) for each in arguments.criteria]
    if not request.to_probs.greedy:
        processors.append(Drawable(request.to_probs.nan_error(False), beams))
    with engine.generation(), seeded(seed, target.device):
        if target.length_rope is not None:
            target.length_rope.choose_for_texts([len(prompt) for prompt in prompts])
        lengths = [*map(len, prompts), *[new_tokens] * beams * len(prompts)]
        page = page_slots(target)
        slots = TreeSlots(engine, sum(-(-length // page) for length in lengths))
        out = cast(
            GenerateBeamDecoderOnlyOutput,
            cast(Any, with_own_forward(without_settings(target.model))).generate(
                arguments.input_ids, attention_mask=arguments.attention_mask,
                generation_config=arguments.config, logits_processor=LogitsProcessorList(processors),
                stopping_criteria=StoppingCriteriaList(criteria),
                prefix_allowed_tokens_fn=allowed and renumbered(allowed, lambda n: n, target.vocab_size),
                **{
                    CACHE: BeamTree(slots, beams, progress, request.to_probs.removes_nan),
                    **arguments.options, **settings, "num_beams": beams, "num_return_sequences": count,
                    "return_dict_in_generate": True,
                },
            ),
        )  # fmt: skip
    indices = cast(Tensor, out.beam_indices)
    lengths = (indices >= 0).sum(1).tolist()
    new = [own[width:][:length].tolist() for own, length in zip(out.sequences, lengths, strict=True)]
    reasons = [
        "eos" if tokens and tokens[-1] in ends else "length" if len(tokens) == new_tokens else "stop"
        for tokens in new
    ]
    vocabulary = engine.tokenizer and Vocabulary(engine.tokenizer)
    texts = vocabulary and [
        new_text(vocabulary, prompts[number // count], tokens, ends) for number, tokens in enumerate(new)
    ]
    return GenerateOutput(
        sequences=_after_given(arguments.prompts, count, out.sequences),
        scores=out.scores,
        logits=out.logits,
        sequences_scores=out.sequences_scores,
        beam_indices=indices,
        finish_reason=by_row(reasons),
        decode_seconds=perf_counter() - start,
        new_tokens=by_row(lengths),
        text=by_row(texts) if texts else None,
    )


def _after_given(prompts: Prompts, count: int, sequences: Tensor) -> torch.LongTensor:
    """Returns int64 ``[B * count, W + N]``: the prompts as they were given, each ``count`` times, followed by
    the new tokens in ``sequences``, whose prompts are padded on the left.
    """
    ids = prompts.ids.repeat_interleave(count, 0)
    fresh = sequences[:, ids.shape[1] :].to(ids.device)
    return cast(torch.LongTensor, torch.cat([ids, fresh], 1))


def _setting(engine: LoadedEngine, kwargs: dict[str, Any], name: str) -> Any:
    """Returns an option of beam search: the caller's, or else the checkpoint's, or else the default."""
    config = kwargs.get("generation_config")
    given = config if isinstance(config, dict) else vars(config) if config is not None else {}
    sources = kwargs, given, vars(engine.target.settings), {"length_penalty": 1.0}
    return next((value for own in sources if (value := own.get(name)) is not None), False)
