"""Sequences with seeds of their own: the text follows from seed, prompt and options, whatever decodes it."""

from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.api_cases import SMALL, SMALL_LOOKUP, TARGET, characters
from tests.support.models.families import perturbed, prompt_of
from tests.support.models.joining import Coming
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.kernels.cpu.fp32.noise import fill_exponential
from triforce_tree.requests.joining import Joined
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.verify.sampling import Stream, derived

PROMPTS = [prompt_of(length) for length in (61, 7, 43, 90, 30)]
SEEDS = [5, 2**63 - 1, 0, 5, 9]
NEW, TEMPERATURE = 14, 0.9
SAMPLED = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": NEW}
DRAFTED = {**SMALL, "prefill_chunk": 16}


def defined(prompt: list[int], seed: int) -> list[int]:
    """The text by the definition: at each position the argmax of the target's probs / Exp(1) noise."""
    tokens, generator = list(prompt), torch.Generator()
    for _ in range(NEW):
        with torch.no_grad():
            logits = TARGET(torch.tensor([tokens])).logits[0, -1].float()
        generator.manual_seed(derived(seed, Stream.POSITION, len(tokens)))
        noise = torch.empty(len(logits))
        fill_exponential(noise, generator)
        tokens.append(int(((logits / TEMPERATURE).softmax(-1) / noise).argmax()))
    return tokens[len(prompt) :]


def new_tokens(out: GenerateOutput) -> list[list[int]]:
    rows: list[list[int]] = out.sequences.tolist()
    return [row[-NEW:] for row in rows]


def engine_of(kind: str) -> Engine:
    if kind == "plain":
        return triforce_tree.load(TARGET, levels=1, tokenizer=characters(), **load_arguments(SMALL_LOOKUP))
    if kind == "lookup":
        return triforce_tree.load(TARGET, levels=2, tokenizer=characters(), **load_arguments(SMALL_LOOKUP))
    tree, levels = "chain:3" if kind == "chain" else "best-first:6", 3 if kind == "3 levels" else 2
    draft = perturbed(TARGET, 0.3)
    more = {"rounds": 2, "runner_ups": True} if levels == 3 else {"rounds": 1}
    return triforce_tree.load(
        TARGET,
        draft,
        levels=levels,
        tokenizer=characters(),
        **load_arguments({**DRAFTED, "tree": tree, **more}),
    )


@pytest.mark.parametrize("kind", ["plain", "lookup", "chain", "tree", "3 levels"])
def test_a_seed_alone_decides_the_text(kind: str) -> None:
    """It is that of the definition, with every drafter and number of levels, at any batch index."""
    engine = engine_of(kind)
    texts = [defined(prompt, seed) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    together = engine.generate(PROMPTS, seed=SEEDS, **SAMPLED)
    assert new_tokens(together) == texts
    assert new_tokens(engine.generate(PROMPTS, seed=SEEDS, max_batch=2, **SAMPLED)) == texts
    assert new_tokens(engine.generate(PROMPTS[1], seed=SEEDS[1:2], **SAMPLED)) == texts[1:2]
    if kind in ("chain", "tree", "3 levels"):
        # Drafts are drawn by the same noise, so that they are right more often than by chance.
        assert together.levels[-1].accepted > 0.2 * together.levels[-1].emitted


def test_sequences_without_a_seed_draw_as_they_do_without_seeds_beside_them() -> None:
    engine = engine_of("tree").with_options(advanced={"rounds": 1})
    before = engine.generate(PROMPTS[0], seed=3, **SAMPLED).sequences
    torch.manual_seed(4)
    mixed = new_tokens(engine.generate(PROMPTS[:3], seed=[None, 8, None], **SAMPLED))
    assert mixed[1] == defined(PROMPTS[1], 8)
    torch.manual_seed(5)
    other = new_tokens(engine.generate(PROMPTS[:3], seed=[None, 8, None], **SAMPLED))
    assert other[1] == mixed[1]
    assert other[0] != mixed[0]
    assert other[2] != mixed[2]
    assert engine.generate(PROMPTS[0], seed=3, **SAMPLED).sequences.equal(before)


def test_processors_that_read_the_text_leave_seeds_alone() -> None:
    """Such sequences are decoded one by one."""
    engine, options = engine_of("tree"), {**SAMPLED, "repetition_penalty": 1.3}
    together = new_tokens(engine.generate(PROMPTS[:2], seed=[3, 4], **options))
    alone = [new_tokens(engine.generate(PROMPTS[n], seed=[3 + n], **options))[0] for n in range(2)]
    assert together == alone


@pytest.mark.parametrize("kind", ["tree", "3 levels"])
def test_seeds_of_sequences_that_join(kind: str) -> None:
    """Into a batch that began without seeds, early and late; on a CPU it gets further rows."""
    joining = [
        Joined(prompt, NEW, seed=seed) for prompt, seed in zip(PROMPTS[1:], (7, None, 7, 11), strict=True)
    ]
    engine, coming = engine_of(kind), Coming(joining, 3)
    first = max(PROMPTS, key=len)
    engine.generate([first], seed=[None], joining=coming, **SAMPLED)
    assert len(coming.outputs) == len(PROMPTS)
    for number, seed in ((1, 7), (3, 7), (4, 11)):
        assert new_tokens(coming.outputs[number]) == [defined(PROMPTS[number], seed)]


def test_greedy_decoding_has_no_use_for_seeds() -> None:
    engine = engine_of("tree")
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    found = engine.generate(PROMPTS[:2], seed=[1, 2], **given).sequences
    assert found.equal(engine.generate(PROMPTS[:2], **given).sequences)


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3], [1, 0.5]])
def test_wrong_lists_of_seeds(seeds: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"seed.*(entries for 2 sequences|must be an integer)"):
        engine_of("plain").generate(PROMPTS[:2], seed=seeds, **SAMPLED)
