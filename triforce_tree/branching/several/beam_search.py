"""``generate(num_beams=...)``: transformers' own beam search over a :class:`BeamTree`."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from triforce_tree.branching.options import check_engine, given_prompts, leaf_options
from triforce_tree.branching.several.beams import BeamTree, beam_pool
from triforce_tree.branching.slots import TreeSlots
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kv.prefill import chunk_tokens
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.requests.checkpoint_settings import without_settings
from triforce_tree.requests.keywords import checked_seed
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.output import GenerateOutput, by_row
from triforce_tree.requests.own_forward import seeded, with_own_forward
from triforce_tree.text.new_text import new_text
from triforce_tree.text.vocabulary import Vocabulary

# Options that only beam search reads, with transformers' defaults.
_DEFAULTS: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False}


def beam_search(
    engine: LoadedEngine, inputs: Any, beams: int, count: int, kwargs: dict[str, Any]
) -> GenerateOutput:
    """Returns the best ``count`` of ``beams`` texts of each prompt. Other arguments are those of
    :meth:`Engine.generate`.

    Raises:
        ValueError: an option that beam search does not support.
    """
    check_engine(engine)
    target = engine.target
    settings = {name: checked(name, _setting(engine, kwargs, name)) for name in _DEFAULTS}
    prompts, options = given_prompts(engine, inputs, kwargs)
    if options.pop("logprobs", None):
        raise ValueError(f"logprobs=True is not supported with num_beams={beams}; use output_scores=True")
    seed, progress = checked_seed(options.pop("seed", None)), options.pop("progress", None)
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    width = prompts.ids.shape[1]
    plain = {k: v for k, v in options.items() if k not in ("output_scores", "output_logits")}
    job = leaf_options(engine, width, plain).job
    new_tokens, ends = job.new_tokens, job.sequences[0].ending.stop_tokens
    for prompt in prompts.rows:
        target.check_length(len(prompt), new_tokens)
    request = prompts.request
    start = perf_counter()
    with engine.generation(), target.active(), seeded(seed, target.device):
        if target.length_rope is not None:
            target.length_rope.choose_for_texts([len(prompt) for prompt in prompts.rows])
        pool = beam_pool(target, prompts.rows, beams, new_tokens)
        pool.store.attention = chosen(engine.config.attention_backend, target.device)
        slots = TreeSlots(target, pool, chunk_tokens(engine.config.prefill_chunk, target.device))
        out = cast(
            GenerateBeamDecoderOnlyOutput,
            cast(Any, with_own_forward(without_settings(target.model))).generate(
                prompts.ids.to(target.device), attention_mask=prompts.mask.to(target.device),
                generation_config=request.config, logits_processor=request.processors,
                stopping_criteria=request.criteria, prefix_allowed_tokens_fn=allowed,
                **{
                    CACHE: BeamTree(slots, beams, progress),
                    **request.options, **settings, "num_beams": beams, "num_return_sequences": count,
                    "return_dict_in_generate": True,
                },
            ),
        )  # fmt: skip
    indices = cast(Tensor, out.beam_indices)
    lengths = (indices >= 0).sum(1).tolist()
    device = prompts.ids.device
    fresh = out.sequences[:, width:].to(device)
    new = [row[:length].tolist() for row, length in zip(fresh, lengths, strict=True)]
    reasons = [
        "eos" if tokens and tokens[-1] in ends else "length" if len(tokens) == new_tokens else "stop"
        for tokens in new
    ]
    vocabulary = engine.tokenizer and Vocabulary(engine.tokenizer)
    texts = vocabulary and [
        new_text(vocabulary, prompts.rows[number // count], tokens, ends) for number, tokens in enumerate(new)
    ]
    return GenerateOutput(
        sequences=cast(torch.LongTensor, torch.cat([prompts.ids.repeat_interleave(count, 0), fresh], 1)),
        scores=out.scores,
        logits=out.logits,
        sequences_scores=out.sequences_scores,
        beam_indices=indices,
        finish_reason=by_row(reasons),
        decode_seconds=perf_counter() - start,
        new_tokens=by_row(lengths),
        text=by_row(texts) if texts else None,
    )


def _setting(engine: LoadedEngine, kwargs: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a beam search option: the caller's, or else the checkpoint's."""
    config = kwargs.get("generation_config")
    given = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
    sources = kwargs, given, vars(engine.target.model.generation_config)
    return next((value for own in sources if (value := own.get(name)) is not None), _DEFAULTS[name])
