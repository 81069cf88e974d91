"""Whole speculative decoding of a real text over ranks, beside plain decoding of the same cache."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from scripts.benchmarks.common.results import Record
from triforce_tree import Engine
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.eval.attention.timing import timed
from triforce_tree.eval.text import token_ids
from triforce_tree.eval.texts.registry import SOURCES, MissingTextError, Texts, TextSource
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.runtime import distributed
from triforce_tree.verify.sampling import ProbsFromLogits

# Tokens that are decoded before anything is timed: kernels are compiled, and graphs captured.
_WARM_UP = 8


class LongTexts:
    """Prompts of any length of real text.

    Args:
        texts: what is here.
        names: of texts, or kinds of which the first that is here is taken.

    Raises:
        ValueError: a name is unknown, or nothing of it is here.
    """

    def __init__(self, texts: Texts, names: Sequence[str]) -> None:
        self._texts, self._sources = texts, [texts.first(name) for name in names]
        self._ids: dict[str, list[int]] = {}

    def prompts(self, tokenizer: PreTrainedTokenizerBase, context: int) -> dict[str, list[int]]:
        """By name the beginning of each text; where it is short, other texts come before it.

        Raises:
            ValueError: all texts that are here have fewer than ``context`` tokens.
        """
        return {source.name: self._prompt(source, tokenizer, context) for source in self._sources}

    def _prompt(self, own: TextSource, tokenizer: PreTrainedTokenizerBase, context: int) -> list[int]:
        ids = self._read(own, tokenizer)[:context]
        for other in (s for s in SOURCES if s.copies is None and s.name != own.name):
            if len(ids) == context:
                break
            try:
                ids = [*self._read(other, tokenizer)[: context - len(ids)], *ids]
            except MissingTextError:
                continue
        if len(ids) < context:
            raise ValueError(
                f"the texts that are here have {len(ids):,} tokens, and the prompt {context:,}; pack more of "
                "them (python -m scripts.benchmarks texts --tokens), or give shorter contexts"
            )
        return ids

    def _read(self, source: TextSource, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        if source.name not in self._ids:
            self._ids[source.name] = token_ids(tokenizer, self._texts.read(source))
        return self._ids[source.name]


def decoded(engine: Engine, name: str, prompt: Sequence[int], new_tokens: int, plain_tokens: int) -> Record:
    """Greedy decoding after a prompt that is prefilled, by the engine's settings and then plainly."""
    greedy, ids = ProbsFromLogits.at(0.0), list(prompt)
    with torch.no_grad(), engine.program([ids], new_tokens, greedy, 0.0) as program:
        _, prefill = timed(program.device, lambda: program.prefill([ids]))
        for rounds in (None, 0):
            _continued(program, ids, _WARM_UP, rounds)
        ours, decoder = _continued(program, ids, new_tokens, None)
        plain, alone = _continued(program, ids, plain_tokens, 0)
    distributed.check_equal("tokens", ours)
    ms, plain_ms = (1e3 * d.decode_seconds / len(tokens) for d, tokens in ((decoder, ours), (alone, plain)))
    return {
        "text": name,
        "new_tokens": len(ours),
        "ms_per_token": ms,
        "plain_ms_per_token": plain_ms,
        "speedup": plain_ms / ms,
        "tokens_per_pass": len(ours) / max(1, decoder.passes.total()),
        "passes": {str(kind): made for kind, made in decoder.passes.most_common()},
        "equal_tokens": [common_prefix(ours, plain), len(plain)],
        "prefill_seconds": prefill,
    }


def _continued(
    program: DecodingProgram, prompt: list[int], count: int, rounds: int | None
) -> tuple[list[int], Decoder]:
    """New tokens, and the decoder that made them; 0 rounds are plain decoding."""
    decoder = Decoder(program, ProbsFromLogits.at(0.0), 0)
    if rounds is not None:
        decoder.controller.fixed = rounds
    program.rewind([prompt])
    new = [token for [fresh] in decoder.decode([prompt], [Ending(count)]) for token in fresh]
    return new[:count], decoder
