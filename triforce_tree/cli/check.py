"""``triforce-tree check``: test on the user's own pair that the output is the target's."""

import argparse
from collections.abc import Sequence
from typing import Any

from transformers import StoppingCriteriaList

from triforce_tree.bench import texts as text
from triforce_tree.check import losslessness as check
from triforce_tree.cli import options
from triforce_tree.cli.console import Interrupt, bar, json_line, plain_table, results
from triforce_tree.cli.texts import documents
from triforce_tree.engine import Engine


def run(args: argparse.Namespace) -> int:
    # Only in a prompt well above the budget does the retrieval cache leave chunks out.
    long = 2 * args.budget + 455
    args.lengths = args.lengths or [1, 67, 1021, long]
    args.context = args.context or long
    _, texts = documents(args)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    ids = text.token_ids(engine.tokenizer, next(iter(texts)))
    done: list[check.Forward | check.Greedy | check.Sampling] = []
    with Interrupt() as interrupt:
        forwards = _forwards(args, engine, ids, interrupt)
        done += [*forwards, *_greedy(args, engine, ids, interrupt)]
        if args.draws and not interrupt.requested:
            done += _sampling(args, engine, ids, interrupt)
    passed = all(result.passed for result in done)
    if not interrupt.requested:
        results(args).print(
            f"passed: no difference to the target was found{_power(done)}"
            if passed
            else "FAILED: the output is not the target's own"
        )
    if args.json:
        result: dict[str, Any] = {"passed": passed, "interrupted": interrupt.requested}
        result["forwards"] = check.as_dicts(forwards)
        result["results"] = check.as_dicts(done[len(forwards) :])
        json_line(result)
    return 130 if interrupt.requested else int(not passed)


def _power(done: Sequence[check.Forward | check.Greedy | check.Sampling]) -> str:
    """Returns a sentence about the error that the sampling test would have found, at its weakest level."""
    least = [result.detectable for result in done if isinstance(result, check.Sampling)]
    if not least:
        return ""
    return (
        f"; sampling off by {max(least):.2f} in total variation would have failed in nine of ten runs (more "
        "--draws find less)"
    )


def _cut(ids: Sequence[int], length: int, number: int) -> list[int]:
    if length > len(ids):
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than the prompt of {length}; give a longer text or "
            "shorter prompts"
        )
    start = number * 7919 % (len(ids) - length + 1)
    return list(ids[start : start + length])


def _forwards(
    args: argparse.Namespace, engine: Engine, ids: Sequence[int], stop: Interrupt
) -> list[check.Forward]:
    done = []
    with bar("prompts") as progress:
        task = progress.add_task("logits against transformers", total=len(args.lengths))
        for number, length in enumerate(args.lengths):
            if stop.requested:
                break
            done.append(check.forward(engine, _cut(ids, length, number)))
            progress.advance(task)
    rows = [
        (
            str(r.prompt_tokens),
            str(r.positions),
            f"{r.error:.1e}",
            f"{r.limit:.0e}",
            "ok" if r.passed else "FAILED",
        )
        for r in done
    ]
    columns = ("prompt", "positions", "relative error", "limit", "")
    results(args).print(
        plain_table("logits of a prompt's last tokens against transformers' own forward", columns, rows)
    )
    return done


def _greedy(
    args: argparse.Namespace, engine: Engine, ids: Sequence[int], stop: Interrupt
) -> list[check.Greedy]:
    prompts = [_cut(ids, length, number) for number, length in enumerate(args.lengths)]
    hierarchies = _levels(args, engine)
    done: list[check.Greedy] = []
    with bar("prompts") as progress:
        task = progress.add_task("greedy against transformers", total=len(prompts) * len(hierarchies))
        for prompt in prompts:
            for levels in hierarchies:
                result = check.greedy(engine, prompt, args.new_tokens, levels, StoppingCriteriaList([stop]))
                if stop.requested:
                    break
                done.append(result)
                progress.advance(task)
    columns = ("levels", "prompt", "tokens compared", "ties", "failures", "widest gap", "noise", "")
    rows = [
        (
            str(r.levels),
            str(r.prompt_tokens),
            str(r.compared),
            str(r.ties),
            str(r.failures),
            f"{r.widest_gap:.1e}" if r.ties or r.failures else "",
            f"{r.noise:.1e}",
            "ok" if r.passed else "FAILED",
        )
        for r in done
    ]
    results(args).print(plain_table("greedy tokens against transformers' own decoding", columns, rows))
    return done


def _levels(args: argparse.Namespace, engine: Engine) -> list[int]:
    """Returns the numbers of levels to check, which are all that ``auto`` may choose."""
    if args.levels != "auto":
        return [args.levels]
    return [2, 3] if engine.target.has_level_one else [2]


def _sampling(
    args: argparse.Namespace, engine: Engine, ids: Sequence[int], stop: Interrupt
) -> list[check.Sampling]:
    contexts = check.uncertain_contexts(engine, _cut(ids, args.context, 1), args.contexts)
    done: list[check.Sampling] = []
    with bar("draws") as progress:
        hierarchies = _levels(args, engine)
        task = progress.add_task(
            "sampling, level by level", total=args.draws * len(contexts) * len(hierarchies)
        )

        def each() -> None:
            stop.check()
            progress.advance(task)

        for levels in hierarchies:
            done += check.sampling_checks(
                engine, contexts, args.draws, levels, args.temperature, args.seed, each
            )
    rows = [
        (
            str(r.levels),
            r.level,
            str(r.draws * r.contexts),
            str(r.bins),
            f"{r.chi_square:.1f}",
            f"{r.p_value:.4f}",
            f"{r.shift:+.3f}",
            f"{r.shift_p_value:.4f}",
            str(r.refused_emitted),
            "ok" if r.passed else "FAILED",
        )
        for r in done
    ]
    columns = ("levels", "level", "draws", "bins", "chi-square", "p", "shift", "p", "refused emitted", "")
    title = f"sampled tokens against the exact distribution, T={args.temperature:g}"
    results(args).print(plain_table(title, columns, rows))
    return done
