"""Decodes a few tokens before the server answers, so that no client waits for kernels and captured stages."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from triforce_tree.bench.texts import pydoc_text, surrounding
from triforce_tree.engine import Engine
from triforce_tree.planning.batch_size import free_bytes
from triforce_tree.planning.memory_layout import gib
from triforce_tree.requests.batch_pool import sizes_of
from triforce_tree.runtime.progress_log import LOG, logged
from triforce_tree.server.protocol import request_of
from triforce_tree.server.scheduler import ClosedError, Scheduler
from triforce_tree.server.text_stream import ServedText

# Tokens of the short prompt, and new tokens: enough passes for each of their stages to be used.
_SHORT, _NEW = 64, 24
_LOOK = 0.05
# Fields of requests. Stages for some that draw and some that do not serve every batch without other options.
_KINDS: dict[str, list[dict[str, object]]] = {
    "greedy": [{"temperature": 0}],
    "sampled": [{"temperature": 0.6, "top_p": 0.9}, {"temperature": 0}],
}


def default_prompts(engine: Engine, batch_tokens: int) -> tuple[int, ...]:
    """Returns how many tokens the prompts of a warm-up have.

    On a GPU buffers are made and stages are captured for the longest prompt, and serve shorter ones as well.
    On a CPU nothing is captured, and a long prompt would only take time.
    """
    return (_SHORT,) if engine.target.device.type == "cpu" else (batch_tokens,)


def warm_up(
    engine: Engine, scheduler: Scheduler, lengths: Collection[int], said: Callable[[str], None]
) -> None:
    """Decodes after prompts of these lengths, in tokens.

    The longest prompt comes last, because the buffers of the last batch are kept. On a GPU short prompts
    follow in batches of each number of places, by each kind of sampling that most requests have. If the
    scheduler is stopped, the warm-up ends.

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
    steps = [(1, length, "greedy") for length in sorted({min(length, longest) for length in lengths})]
    if engine.target.device.type == "cuda":
        # Fewer places use memory that more places have.
        sizes = [min(places, scheduler.limits.waiting) for places in reversed(sizes_of(scheduler.batch))]
        steps += [(places, min(_SHORT, longest), how) for places in sizes for how in _KINDS]
    for places, length, how in steps:
        new = most if positions is None else min(most, positions - length)
        several = f"{places} prompts" if places > 1 else "a prompt"
        step = f"preparing {how} decoding after {several} of {length:,} tokens"
        said(step)
        with logged(step):
            try:
                asked = [_KINDS[how][number % len(_KINDS[how])] for number in range(places)]
                problem = _decoded(scheduler, ids[:length], new, asked)
            except ClosedError:
                return
        if problem is not None:
            raise ValueError(
                f"the warm-up with {several} of {length:,} tokens failed ({problem}); give "
                "--warm-up-tokens smaller numbers, or 0 for no warm-up"
            ) from problem
        with engine.generation():
            program = engine.last_program
            if program is not None:
                # Acceptance in a few tokens of one text says little about the texts of clients.
                program.learnt.clear()
                if program.makes_slowly:
                    program.prepare_shapes()
    step = "preparing short prompts"
    said(step)
    with logged(step), engine.generation():
        engine.target.capture_chunks()
    program, device = engine.last_program, engine.target.device
    if device.type == "cuda" and program is not None and (slots := program.cache.backend.pool_slots):
        LOG.info(
            "there is room for keys and values of %s tokens in up to %d texts at a time; %s of GPU memory "
            "are free", f"{slots:,}", scheduler.batch, gib(free_bytes(device)),
        )  # fmt: skip


def _decoded(
    scheduler: Scheduler, prompt: list[int], new: int, asked: Sequence[Mapping[str, object]]
) -> BaseException | None:
    """Decodes ``_NEW`` tokens of texts with these fields of a request, with buffers for ``new``; returns the
    error, if there was one.
    """
    ended, texts = threading.Semaphore(0), list[ServedText]()

    def emit(text: str | None) -> None:
        if text is None:
            ended.release()

    for fields in asked:
        sampling = request_of({"model": "", "prompt": prompt, **fields}, chat=False).sampling()
        texts.append(ServedText(prompt, {"max_new_tokens": new, **sampling}, (), emit))
    scheduler.submit(texts)
    for _ in texts:
        while not ended.acquire(timeout=_LOOK):
            # All end together, so that the batch keeps its number of places.
            if all(text.stream is not None and text.stream.count >= _NEW for text in texts):
                for text in texts:
                    text.cancelled = True
    return next((text.error for text in texts if text.error is not None), None)
