"""``triforce-tree generate``: continue a text, or answer a chat."""

import argparse
from typing import Any

from transformers import StoppingCriteriaList

from triforce_tree.check.compare import compared, ms_per_token, summary
from triforce_tree.cli import options
from triforce_tree.cli.console import (
    Interrupt,
    PinningBar,
    PrefillBar,
    TextOut,
    json_line,
    levels_table,
    memory_table,
    screen,
)
from triforce_tree.engine import Engine
from triforce_tree.requests.chat import encoded
from triforce_tree.requests.output import GenerateOutput

# Preparations that take less time are not mentioned.
_NOTABLE_SECONDS = 0.1


def run(args: argparse.Namespace) -> int:
    several, given = args.num_beams > 1 or args.num_return_sequences > 1, args.given_prompt
    engine = options.engine_of(args, given, args.max_new_tokens)
    seed = options.seed_of(args)
    assert engine.tokenizer is not None
    prompt = encoded(engine.tokenizer, given, engine.target.max_positions)
    sampling = options.sampling_of(args, engine)
    greedy = sampling["temperature"] == 0
    if several and greedy and args.num_beams == 1:
        raise ValueError(
            f"--num-return-sequences {args.num_return_sequences} at temperature 0 are equal texts; give "
            f"--temperature above 0, or --num-beams {args.num_return_sequences}"
        )
    if several:
        return _several(args, engine, prompt, seed, sampling)
    with Interrupt() as interrupt:
        more = {"max_new_tokens": args.max_new_tokens, "seed": seed, "grammar": args.grammar, **sampling}
        out = generate(engine, prompt, interrupt, show=True, **more)
        show = screen()
        show.print(levels_table(out.levels or []))
        ms = ms_per_token(out)
        show.print(
            f"prefill of {len(prompt)} tokens"
            + (f" ({out.reused_tokens:,} of them kept)" if out.reused_tokens else "")
            + f" in {out.prefill_seconds:.1f} s, "
            f"{out.new_tokens} new tokens"
            + (f" at {ms:.1f} ms each" if ms else "")
            + f"; ended by {'Ctrl-C' if interrupt.requested else out.finish_reason}"
        )
        if out.capture_seconds and out.capture_seconds >= _NOTABLE_SECONDS:
            gpu = engine.target.device.type == "cuda"
            what = (
                "CUDA graphs compiled, captured and timed"
                if gpu
                else "stages timed, once for these settings,"
            )
            show.print(f"{what} in {out.capture_seconds:.1f} s, apart from prefill and decoding")
        if out.ranks:
            heads, positions = out.ranks["heads"], out.ranks["positions"]
            show.print(
                f"{heads * positions} ranks: heads split over {heads}, the text over {positions} "
                f"(context_parallel {positions})"
            )
        last = engine.last_program
        if last is not None and last.levels == 3 and last.config.retrieval_weight_bits != 16:
            show.print(f"retrieval level on weights in {last.config.retrieval_weight_bits} bits")
        comparison = None
        if args.compare and not interrupt.requested:
            baseline = generate(engine.with_options(levels=1), prompt, interrupt, show=False, **more)
            if not interrupt.requested:
                comparison = compared(engine, prompt, out, baseline, greedy)
                show.print(comparison.verdict())
    if args.json:
        extra = {"seed": seed, "sampling": sampling, "interrupted": interrupt.requested, "text": out.text}
        json_line({**summary(out, comparison), **extra})
    if interrupt.requested:
        return 130
    return int(comparison is not None and comparison.failed)


def _several(
    args: argparse.Namespace, engine: Engine, prompt: list[int], seed: int, sampling: dict[str, Any]
) -> int:
    """Generates several texts of one prompt. Each is written to stdout after a numbered line on the screen.
    Returns the exit code.
    """
    more = {"num_beams": args.num_beams, "num_return_sequences": args.num_return_sequences}
    if args.length_penalty is not None:
        more["length_penalty"] = args.length_penalty
    assert engine.tokenizer is not None
    show = TextOut(engine.tokenizer)
    with Interrupt() as interrupt:
        with PrefillBar(len(prompt) - 1, interrupt) as progress:
            out = engine.generate(
                prompt,
                stopping_criteria=StoppingCriteriaList([interrupt]),
                progress=progress,
                max_new_tokens=args.max_new_tokens,
                seed=seed,
                grammar=args.grammar,
                **more,
                **sampling,
            )
        columns: tuple[Any, ...] = (out.text, out.new_tokens, out.finish_reason)
        texts, counts, reasons = ([c] if args.num_return_sequences == 1 else c for c in columns)
        for number, text in enumerate(texts):
            reason = "Ctrl-C" if interrupt.requested else reasons[number]
            screen().print(f"text {number + 1} of {len(texts)}, {counts[number]} tokens, ended by {reason}:")
            show.on_finalized_text(text, stream_end=True)
    if args.json:
        found = {"texts": texts, "new_tokens": counts, "finish_reasons": reasons}
        extra = {"seed": seed, "sampling": sampling, "interrupted": interrupt.requested}
        json_line({"prompt_tokens": len(prompt), **more, **found, **extra})
    return 130 if interrupt.requested else 0


def generate(
    engine: Engine, prompt: list[int], interrupt: Interrupt, *, show: bool, **more: Any
) -> GenerateOutput:
    """Runs one generation with progress bars and Ctrl-C handling. Its text is printed if ``show`` is set."""
    assert engine.tokenizer is not None
    plan = engine.memory_plan(len(prompt), more["max_new_tokens"])
    if plan is not None:
        screen().print(memory_table(plan))
    what = "prefill" if show else "prefill, target alone"
    with (
        PrefillBar(len(prompt) - 1, interrupt, what) as progress,
        PinningBar(plan.coming_bytes if plan is not None else 0, interrupt) as pinned,
    ):
        return engine.generate(
            prompt,
            stopping_criteria=StoppingCriteriaList([interrupt]),
            streamer=TextOut(engine.tokenizer) if show else None,
            progress=progress,
            pinned=pinned,
            **more,
        )
