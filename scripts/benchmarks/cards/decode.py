"""Whole speculative decoding of a real text, on one card or several, beside plain decoding of its cache."""

from collections.abc import Sequence as Sequences

import torch

from scripts.benchmarks.common.results import Record
from scripts.benchmarks.common.timing import timed
from triforce_tree import Engine
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.runtime import distributed
from triforce_tree.verify.sampling import ProbsFromLogits

# Tokens that are decoded before anything is timed: kernels are compiled, and graphs captured.
_WARM_UP = 8


def decoded(engine: Engine, name: str, prompt: Sequences[int], new_tokens: int, plain_tokens: int) -> Record:
    """Greedy decoding after a prompt that is prefilled, by the engine's settings and then plainly."""
    greedy, ids = ProbsFromLogits.at(0.0), list(prompt)
    with torch.no_grad(), engine.program([ids], new_tokens, greedy) as program:
        _, prefill = timed(program.device, lambda: program.prefill([ids]))
        for rounds in (None, 0):
            _continued(program, ids, _WARM_UP, rounds)
        ours, loop = _continued(program, ids, new_tokens, None)
        plain, alone = _continued(program, ids, plain_tokens, 0)
    distributed.check_equal("tokens", ours)
    ms, plain_ms = (1e3 * d.decode_seconds / len(tokens) for d, tokens in ((loop, ours), (alone, plain)))
    return {
        "text": name,
        "new_tokens": len(ours),
        "ms_per_token": ms,
        "plain_ms_per_token": plain_ms,
        "speedup": plain_ms / ms,
        "tokens_per_pass": len(ours) / max(1, loop.passes.total()),
        "acceptance": {v.name: v.acceptance_rate for v in loop.levels if v.acceptance_rate is not None},
        "passes": {str(kind): made for kind, made in loop.passes.most_common()},
        "equal_tokens": [common_prefix(ours, plain), len(plain)],
        "prefill_seconds": prefill,
    }


def _continued(
    program: DecodingProgram, prompt: list[int], count: int, rounds: int | None
) -> tuple[list[int], DecodingLoop]:
    """New tokens, and the loop that made them; 0 rounds are plain decoding."""
    loop, sequence = DecodingLoop.over(program, ProbsFromLogits.at(0.0), 0), Sequence(prompt, Ending(count))
    if rounds is not None:
        loop.policy.fixed = rounds
    loop.begin([sequence], cached=True)
    for _ in loop.decode():
        pass
    return sequence.new, loop
