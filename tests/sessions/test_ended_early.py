"""Calls of sessions and trees that end early leave nothing behind: later texts are as of a fresh engine."""

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.api_cases import CHUNKED, CHUNKED_DRAFTED
from tests.support.models.ended_early import PLACES, Fault, LeftError, Wire, faulty_options, some_error, wired
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.sessions.session import Session

NEW = 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TEXT = prompt_of(400)
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama-gqa", {**CHUNKED, "levels": 1}),
    "windows": ("mistral-window", {**CHUNKED_DRAFTED, "levels": 2, "rounds": 1}),
    "three levels": ("llama-gqa", {**CHUNKED_DRAFTED, "levels": 3, "rounds": 2}),
    "earlier texts": ("llama-gqa", {**CHUNKED_DRAFTED, "levels": 2, "rounds": 1, "prefix_cache": "1MiB"}),
    "offloaded": ("llama-gqa", {**CHUNKED_DRAFTED, "levels": 2, "rounds": 1, "offload": True}),
}


def made(kind: str) -> tuple[Engine, Wire, PreTrainedModel]:
    """An engine whose forwards may fail, and the same model without faults."""
    family, options = ENGINES[kind]
    target, wire = wired(family)
    drafts = [perturbed(target, 0.05)] if "tree" in options else []
    return triforce_tree.load(target, *drafts, **load_arguments(options)), wire, tiny(family)


def some(draw: random.Random) -> list[int]:
    start = draw.randrange(300)
    return TEXT[start : start + draw.randrange(1, 60)]


def asked(
    session: Session, model: PreTrainedModel, draw: random.Random, how: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Returns what a session generates next, and what the model alone would."""
    question = some(draw)
    prompt = [*session.tokens, *question]
    out = session.generate(question, **GREEDY, **how)
    return out.sequences[0, len(prompt) :].tolist(), greedy(model, prompt, NEW)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", ENGINES)
def test_sessions_go_on_as_those_of_a_fresh_engine(kind: str) -> None:
    """Sessions that take turns are trimmed and forked; calls fail, and each session is then as before."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    engine, wire, model = made(kind)
    sessions = [engine.session(some(draw), reserve=32) for _ in range(2)]
    raised = 0
    for step in range(6):
        session = draw.choice(sessions)
        place, error = draw.choice(PLACES), some_error(draw)
        fault = Fault(draw.randrange(1, draw.choice([3, 12, 40])) if step else 1, error)
        what = f"{seed=} {step=} {place} {error!r} at {fault.left}"
        before = list(session.tokens)
        try:
            how = faulty_options(place, fault, wire)
            if draw.random() < 0.3:
                engine.generate(some(draw), **GREEDY, **how)
            else:
                found, expected = asked(session, model, draw, how)
                assert found == expected, what
        except (LeftError, KeyboardInterrupt, torch.OutOfMemoryError) as problem:
            if problem is not error:
                raise
            raised += 1
            assert session.tokens == before
        wire.set()
        action = draw.choice(["trim", "fork", "other", "nothing"])
        if action == "trim":
            session.trim(draw.randrange(len(session.tokens) + 1))
        elif action == "fork":
            sessions[draw.randrange(2)] = session.fork()
        elif action == "other":
            prompt = some(draw)
            assert engine.generate(prompt, **GREEDY).sequences[0, -NEW:].tolist() == greedy(
                model, prompt, NEW
            )
        found, expected = asked(draw.choice(sessions), model, draw, {})
        assert found == expected, what
    assert raised, seed


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_trees_go_on_as_each_text_alone(family: str) -> None:
    """A leaf whose call failed has the tokens that it was given by then, and goes on from there."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    target, wire = wired(family)
    engine, model, raised = triforce_tree.load(target, **load_arguments(CHUNKED)), tiny(family), 0
    tree = engine.tree(TEXT[:40])
    for step in range(6):
        error = some_error(draw)
        fault = Fault(draw.randrange(1, draw.choice([2, 5, 9])) if step else 1, error)
        what = f"{seed=} {step=} {error!r} at {fault.left}"
        leaf = draw.choice(tree.leaves)
        leaves = [tree.extend(child, some(draw)[:20]) for child in tree.fork(leaf, draw.randrange(1, 4))]
        wire.set(fault)
        try:
            tree.generate(leaves, **GREEDY)
        except (LeftError, KeyboardInterrupt, torch.OutOfMemoryError) as problem:
            if problem is not error:
                raise
            raised += 1
        wire.set()
        texts = [leaf.text_tokens for leaf in leaves]
        branches = tree.generate(leaves, **GREEDY)
        assert [branch.tokens for branch in branches] == [greedy(model, text, NEW) for text in texts], what
        [scores] = tree.score(leaves[0])
        assert len(scores) == len(leaves[0].tokens)
        with torch.no_grad():
            text = leaves[0].text_tokens
            logits = model(torch.tensor([text])).logits[0].log_softmax(-1)
        alone = logits[:-1].gather(1, torch.tensor(text)[1:, None])[-len(scores) :, 0]
        torch.testing.assert_close(scores, alone, atol=1e-4, rtol=1e-4, msg=what)
    assert raised, seed
