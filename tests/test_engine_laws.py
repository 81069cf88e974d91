"""The law of the engine on transformers models with all three caches: by enumeration, and by chi-square."""

from collections import Counter

import pytest
import torch
from enumeration import NOISE, chi_square_p, exact_law, total_variation
from families import perturbed, prompt_of, tiny
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.endings import Ending
from triforce_tree.hf_model import HFModel
from triforce_tree.hierarchy import Hierarchy
from triforce_tree.sampling import TokenLaw

TIGHT = {"budget": 8, "chunk": 2, "recent": 4, "sinks": 2, "window": 4}


# A refused token leaves a choice where there are three; who chooses chunks shows with two as well.
@pytest.mark.parametrize(
    ("refresh", "tree", "leaves", "vocabulary"),
    [
        (1, "chain:1", False, 3),
        *((refresh, "chain:1", False, 2) for refresh in (0, 2)),
        *((refresh, "chain:2", True, 2) for refresh in (0, 1, 2)),
    ],
)
def test_the_exact_law_of_the_whole_engine(
    refresh: int, tree: str, leaves: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers models and all three caches, every draw enumerated; the budget overflows.

    The middle level's law must not depend on the tokens that it judges, not even by way of the
    chunks that their queries would select.
    """
    target = tiny("llama", vocab_size=vocabulary, initializer_range=0.3)
    draft = tiny("llama", seed=3, vocab_size=vocabulary, num_hidden_layers=1)
    config = HierarchyConfig.from_options(
        **TIGHT, levels=3, gamma=1, tree=tree, leaves=leaves, refresh=refresh
    )
    hierarchy, law = Hierarchy(HFModel(target), HFModel(draft), config), TokenLaw()
    prompt = prompt_of(41, vocabulary)

    def run(random) -> list[int]:
        monkeypatch.setattr(Hierarchy, "_random", lambda self, seed, level: random)
        decoder = hierarchy.decoder(law, 0, len(prompt), 2, frozenset())
        blocks = decoder.decode(decoder.prefill(prompt), Ending(2))
        return [token for block in blocks for token in block]

    expected = exact_two_token_law(target, law, prompt)
    with hierarchy.active():
        assert total_variation(exact_law(run), expected) < NOISE


CHOICES, SAMPLES = 4, 600


@pytest.mark.slow
def test_the_whole_engine_on_transformers_models_by_chi_square() -> None:
    """Two tokens of a vocabulary of 50, top-k 4: 16 outcomes; the prompt exceeds the budget."""
    target = tiny("llama", vocab_size=50, num_hidden_layers=1)
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(CHOICES)])
    law = TokenLaw(processors)
    prompt = torch.randint(50, (41,)).tolist()
    config = HierarchyConfig.from_options(
        levels=3, gamma=2, tree="best-first:2,1", budget=24, chunk=4, recent=8, sinks=2, window=8
    )
    hierarchy = Hierarchy(HFModel(target), HFModel(perturbed(target, 0.1)), config)
    expected = exact_two_token_law(target, law, prompt)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    with hierarchy.active():
        for seed in range(SAMPLES):
            decoder = hierarchy.decoder(law, seed, len(prompt), 2, frozenset())
            blocks = decoder.decode(decoder.prefill(prompt), Ending(2))
            counts[tuple(token for block in blocks for token in block)] += 1
            accepted += decoder.levels[-1].accepted
    assert accepted > SAMPLES / 4
    assert chi_square_p(counts, expected) > 1e-3


@torch.no_grad()
def exact_two_token_law(target, law: TokenLaw, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The target's law of two more tokens, from plain forwards, in float64."""

    def next_law(tokens: list[int]) -> torch.Tensor:
        logits = target(torch.tensor([tokens])).logits[0, -1:]
        return law.scores(logits, lambda: [tokens])[0].double().softmax(-1)

    first = next_law(prompt)
    result = {}
    for a in first.nonzero().flatten().tolist():
        second = next_law([*prompt, a])
        for b in second.nonzero().flatten().tolist():
            result[a, b] = float(first[a] * second[b])
    return result
