"""Forwards and greedy decoding of the target by transformers, with which ours are compared.

With ``kv_bits=8`` they attend to keys and values that are rounded as our cache stores them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

from triforce_tree.engine import Engine
from triforce_tree.kernels.step.kv_slots import dequantized, quantized
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.requests.options import without_settings
from triforce_tree.verify.sampling import ProbsFromLogits

_CHUNK = 2048  # tokens of a prompt in one forward
_SCORED = 256  # tokens in one forward that returns the logits of all of them


class RoundedCache(DynamicCache):
    """A cache whose layers attend to every key and value as a cache in 8 bits would return it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        stored = [dequantized(*quantized(t), t.dtype) for t in (key_states, value_states)]
        return super().update(stored[0], stored[1], layer_idx, *args, **kwargs)


def own_cache(engine: Engine) -> DynamicCache | None:
    """Returns an empty cache for transformers' forwards of the target, or None if transformers makes its
    own.
    """
    if engine.config.kv_bits == 16:
        return None
    return RoundedCache(config=engine.target.model.config.get_text_config(decoder=True))


def last_logits(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """Returns the logits fp32 ``[V]`` after the last token, by the target's own forward of it alone."""
    model: Any = engine.target.model
    with torch.no_grad():
        cache = prefilled(engine, tokens[:-1])
        out = model(as_ids(model, tokens[-1:]), use_cache=True, logits_to_keep=1, **{CACHE: cache})
    logits: Tensor = out.logits
    return logits[0, -1].float()


def as_ids(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns int64 ``[1, L]`` on the model's device."""
    return torch.tensor([list(tokens)], device=model.device)


def prefilled(engine: Engine, tokens: Sequence[int]) -> Any:
    """Returns transformers' KV cache of these tokens. It is None for no tokens, if transformers makes its own
    cache.
    """
    model: Any = engine.target.model
    cache: Any = own_cache(engine)
    # Where rotary frequencies depend on the length, transformers chooses them by the tokens of each forward.
    chunk = _CHUNK if LengthRope.of(model) is None else max(1, len(tokens))
    for start in range(0, len(tokens), chunk):
        ids = as_ids(model, tokens[start : start + chunk])
        out = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        cache = out[CACHE]
    return cache


def own_decoding(
    engine: Engine, prompt: Sequence[int], new_tokens: int, stop: StoppingCriteriaList | None
) -> list[int]:
    """Returns the new tokens of greedy decoding by transformers."""
    model: Any = engine.target.model
    ids, cache = as_ids(model, prompt), own_cache(engine)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        stopping_criteria=stop,
        **({} if cache is None else {CACHE: cache}),
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def greedy_scores(engine: Engine, prompt: Sequence[int], new_tokens: int, **options: Any) -> ProbsFromLogits:
    """Returns the map from logits to the scores whose largest a greedy generation takes, by transformers'
    processors.

    Args:
        options: options of :meth:`Engine.generate`. Without any, the model's ``generation_config`` alone
            decides.
    """
    model = without_settings(engine.target.model)

    def read(
        _: Any, __: Tensor, logits_processor: LogitsProcessorList, *___: Any, **____: Any
    ) -> ProbsFromLogits:
        return ProbsFromLogits(logits_processor, greedy=True)

    ids = as_ids(model, prompt)
    found: ProbsFromLogits = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        custom_generate=read,
        **{**options, "do_sample": False},
    )
    return found


def last_position_logits(engine: Engine, tokens: Sequence[int], positions: int) -> Tensor:
    """Returns the logits fp32 ``[positions, V]`` of the last tokens, by one forward of transformers over all
    tokens.
    """
    model: Any = engine.target.model
    cache = own_cache(engine)
    how = {"use_cache": False} if cache is None else {CACHE: cache}
    with torch.no_grad():
        logits: Tensor = model(as_ids(model, tokens), logits_to_keep=positions, **how).logits
    return logits[0, -positions:].float()


@torch.no_grad()
def token_logprobs(engine: Engine, tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    """Scores the tokens from ``start`` on, each given all tokens before it, by the target's raw logits.

    Args:
        start: number of tokens that are given; at least 1.

    Returns:
        Log-probabilities, fp32 ``[len(tokens) - start]``, and whether each token is the most probable one,
        bool, both in host memory.
    """
    logprobs, greedy = [torch.empty(0, device="cpu")], [torch.empty(0, dtype=torch.bool, device="cpu")]
    for found, coming in _predictions(engine, tokens, start):
        logprobs.append(found.gather(-1, coming[:, None])[:, 0].cpu())
        greedy.append((found.argmax(-1) == coming).cpu())
    return torch.cat(logprobs), torch.cat(greedy)


@torch.no_grad()
def alternatives(
    engine: Engine, tokens: Sequence[int], count: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Returns for each token from the second on its log-probability by the target's raw logits, and the
    ``count`` most probable tokens in its place with theirs.
    """
    found = []
    for logprobs, coming in _predictions(engine, tokens, 1):
        own = logprobs.gather(-1, coming[:, None])[:, 0].tolist()
        top = logprobs.topk(min(count, logprobs.shape[-1]))
        best = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        found += [(value, list(zip(*pair, strict=True))) for value, pair in zip(own, best, strict=True)]
    return found


def _predictions(engine: Engine, tokens: Sequence[int], start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields log-probabilities fp32 ``[n, V]`` of the next n tokens, and these tokens, int64 ``[n]``. The
    first is token ``start``.
    """
    model: Any = engine.target.model
    cache = prefilled(engine, tokens[: start - 1])
    # Where rotary frequencies depend on the length, one forward chooses them for all tokens.
    chunk = _SCORED if LengthRope.of(model) is None else len(tokens)
    for at in range(start - 1, len(tokens) - 1, chunk):
        fed = tokens[at : min(at + chunk, len(tokens) - 1)]
        out = model(as_ids(model, fed), use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        found = out.logits[0].float()
        coming = as_ids(model, tokens[at + 1 : at + 1 + len(fed)])[0].to(found.device)
        yield found.log_softmax(-1), coming
