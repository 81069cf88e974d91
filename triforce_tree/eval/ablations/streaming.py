"""StreamingLLM alone (Xiao et al., arXiv 2309.17453): the target on sinks and its newest tokens. Lossy.

What lies between them is forgotten, so that the output is not the target's: it shows what a window of the
retrieval cache's size can know, beside retrieval of the same size.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import StoppingCriteria

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.stages import DraftStage
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.engine import Engine
from triforce_tree.eval.attention.timing import synchronize
from triforce_tree.runtime.executor import executor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits


def window_config(engine: Engine) -> HierarchyConfig:
    """Settings of a window that never holds more than the engine's retrieval budget."""
    config = engine.hierarchy.config
    half = max(1, (config.retrieval.budget - config.streaming.sinks) // 2)
    return replace(config, tree="chain:1", lookup=0, streaming=replace(config.streaming, window=half))


@torch.no_grad()
def decode(
    engine: Engine,
    prompt: Sequence[int],
    new_tokens: int,
    to_probs: ProbsFromLogits,
    seed: int,
    stop: StoppingCriteria | None = None,
    ends: Sequence[int] = (),
) -> tuple[list[int], float, float]:
    """Continue a prompt token by token.

    The window is the draft model's (``drafters.tree_model``): positions count inside it, and when it is full
    its newer half is computed anew.

    Args:
        to_probs: logits to distributions.
        stop: ends early, with the tokens so far.
        ends: token ids after which it ends.

    Returns:
        (new tokens, seconds before the first one, seconds after).
    """
    target = engine.hierarchy.target
    device = target.device
    with engine.hierarchy.generation(), engine.hierarchy.active():
        start = time.perf_counter()
        drafter = TreeDrafter(target, window_config(engine))
        state = SequenceState(1, len(prompt) + new_tokens + drafter.nodes + 1, 0, drafter.nodes, 0, device)
        drafter.bind(state)
        sequence = list(prompt)
        state.tokens[0, : len(sequence)] = torch.tensor(sequence, device=device)
        state.length.fill_(len(sequence) - 1)
        drafter.start([sequence])
        probs = DeviceProbs(to_probs, device, Noise)
        stage = DraftStage(drafter, probs, state, target.vocab_size)
        run = executor(stage.steps(), device)
        generator = torch.Generator(device).manual_seed(seed)
        # As in decoding, the first token is not part of prefill.
        synchronize(device)
        before = time.perf_counter()
        while len(sequence) < len(prompt) + new_tokens:
            for noise in stage.noise:
                noise.draw(generator)
            run()
            token = int(stage.tree.tokens[0, 1])
            sequence.append(token)
            state.tokens[0, len(sequence) - 1] = token
            state.length += 1
            if token in ends:
                break
            if stop is not None and bool(stop(torch.tensor([sequence]), None).any()):
                break
            drafter.prepare([sequence], resumed=False)
        synchronize(device)
        return sequence[len(prompt) :], before - start, time.perf_counter() - before
