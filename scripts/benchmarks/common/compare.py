"""Greedy tokens of a bench beside those of autoregressive decoding."""

from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.common.engine import Bench, Prompts, Run

# Tokens before a difference at which the noise between two kinds of forward is measured.
_NOISE_TOKENS = 8


def replay(bench: Bench, prompts: Prompts, texts: Prompts) -> tuple[Run, dict[str, Any]]:
    """Autoregressive greedy decoding along ``texts``: its times, and where its tokens would differ.

    After a difference it goes on from the tokens of ``texts``. With the cache on the device each difference
    is a tie, where the best logit beats the chosen one by no more than two forwards of different sizes
    differ by there, or a failure.
    """
    offloaded = bench.program.cache.backend.transfers
    run, differences, done = Run([[] for _ in prompts]), [], [0] * len(texts)
    # Kernels are compiled before anything is timed.
    bench.decode(0.0, prompts, 1, rounds=0)
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        heads = [[*p, *t[:d]] for p, t, d in zip(prompts, texts, done, strict=True)]
        ends = [max(1, len(t) - d) for t, d in zip(texts, done, strict=True)]
        differ = [False] * len(texts)
        for seconds, fresh in bench.passes(run, 0.0, heads, ends, 0):
            run.stamps.append((seconds, len(run.stamps) + 1))
            for b, tokens in enumerate(fresh):
                if done[b] < len(texts[b]) and tokens:
                    differ[b] = tokens[0] != texts[b][done[b]]
                    done[b] += not differ[b]
            if any(differ):
                break
        heads = [[*p, *t[:d]] for p, t, d in zip(prompts, texts, done, strict=True)]
        for b in (b for b in range(len(texts)) if differ[b]):
            at: dict[str, float] = {"sequence": b, "at": done[b]}
            differences.append(at if offloaded else at | _gap(bench, heads, b, texts[b][done[b]]))
            done[b] += 1
    found: dict[str, Any] = {"compared": sum(map(len, texts)), "differences": differences}
    if offloaded:
        return run, {**found, "partings": len(differences)}
    ties = sum(d["gap"] <= d["noise"] for d in differences)
    return run, {**found, "ties": ties, "failures": len(differences) - ties}


@torch.no_grad()
def _gap(bench: Bench, heads: Prompts, b: int, ours: int) -> dict[str, float]:
    """Returns how near sequence ``b`` was to the token ``ours`` after ``heads[b]``, by logits of plain
    forwards.
    """
    width = bench.program.chain_nodes
    with bench.shortened([p[: len(p) - width] for p in heads], width):
        many = last_logits(bench, heads, width)[b, -_NOISE_TOKENS:]
        shorter = [[p[: len(p) - n] for p in heads] for n in reversed(range(min(width, _NOISE_TOKENS)))]
        single = torch.cat([last_logits(bench, texts, 1)[b] for texts in shorter])
    noise = 2 * float((many - single).abs().max())
    return {"gap": float(single[-1].max() - single[-1, ours]), "noise": noise}


@torch.no_grad()
def last_logits(bench: Bench, texts: Prompts, width: int) -> Tensor:
    """Returns ``[B, width, V]`` in fp32 at the last ``width`` tokens of each text, in one forward.

    The cache holds all tokens before them, and those alone where it is in host memory.
    """
    view = bench.program.full_view(width, torch.ones(width, width, dtype=torch.bool).tril(), None)
    starts = torch.tensor([len(text) - width for text in texts], device=bench.device)
    view.begin(starts)
    tokens = torch.tensor([list(text[-width:]) for text in texts], device=bench.device)
    positions = starts[:, None] + torch.arange(width, device=bench.device)
    return bench.program.full(tokens, positions, view, states=view.recurrent).float()
