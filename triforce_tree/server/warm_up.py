"""Decodes a few tokens before the server answers, so that no client waits for kernels and captured stages."""

import threading
from collections.abc import Callable, Collection

from triforce_tree.bench.texts import pydoc_text, surrounding
from triforce_tree.engine import Engine
from triforce_tree.runtime.progress_log import logged
from triforce_tree.server.protocol import request_of
from triforce_tree.server.scheduler import ClosedError, Scheduler, ServedText

# Tokens of the short prompt, and new tokens: enough passes for each of their stages to be used.
_SHORT, _NEW = 64, 24
_LOOK = 0.05


def default_prompts(engine: Engine, batch_tokens: int) -> tuple[int, ...]:
    """Returns how many tokens the prompts of a warm-up have.

    On a GPU buffers are made and stages are captured for a length, so one of them is the longest prompt that
    a batch of several may have. On a CPU nothing is captured, and a long prompt would only take time.
    """
    return (_SHORT,) if engine.target.device.type == "cpu" else (_SHORT, batch_tokens)


def warm_up(
    engine: Engine, scheduler: Scheduler, lengths: Collection[int], said: Callable[[str], None]
) -> None:
    """Decodes after prompts of these lengths, in tokens, greedily and sampled.

    The longest prompt comes last, because the buffers of the last batch are kept. If the scheduler is
    stopped, the warm-up ends.

    Args:
        engine: the engine of the scheduler; it has a tokenizer.
        said: called with the next step in words.

    Raises:
        ValueError: decoding failed. The message names the option with the lengths.
    """
    assert engine.tokenizer is not None
    most, positions = scheduler.limits.new_tokens, engine.target.max_positions
    longest = max(lengths) if positions is None else max(1, positions - most)
    ids = surrounding(engine.tokenizer, pydoc_text(), max(lengths), "warm-up")
    for length in sorted({min(length, longest) for length in lengths}):
        new = most if positions is None else min(most, positions - length)
        # Sampled first: a program that first gets seeded sequences drops the stages that it has.
        for temperature, how in ((1, "sampled"), (0, "greedy")):
            step = f"preparing {how} decoding after prompts of {length:,} tokens"
            said(step)
            with logged(step):
                try:
                    problem = _decoded(scheduler, ids[:length], new, temperature)
                except ClosedError:
                    return
            if problem is not None:
                raise ValueError(
                    f"the warm-up with a prompt of {length:,} tokens failed ({problem}); give "
                    "--warm-up-tokens smaller numbers, or 0 for no warm-up"
                ) from problem


def _decoded(scheduler: Scheduler, prompt: list[int], new: int, temperature: int) -> BaseException | None:
    """Decodes ``_NEW`` tokens with buffers for ``new``; returns the error, if there was one."""
    fields = {"model": "", "prompt": prompt, "temperature": temperature}
    asked = request_of(fields, chat=False)
    ended = threading.Event()

    def emit(text: str | None) -> None:
        if text is None:
            ended.set()

    sequence = ServedText(prompt, {"max_new_tokens": new, **asked.sampling()}, (), emit)
    scheduler.submit([sequence])
    while not ended.wait(_LOOK):
        sequence.cancelled |= sequence.stream is not None and sequence.stream.count >= _NEW
    return sequence.error
