"""Typical acceptance: the longest likely path of a tree, beside a plain definition; labelled lossy."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import triforce_tree
from tests.support.models.program_cases import PROMPTS, draft_of, model
from triforce_tree.config import HierarchyConfig
from triforce_tree.planning.memory_layout import levels_of
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.typical import DELTA, EPSILON, accept_typical

VOCABULARY = 12
TYPICAL_METHOD: dict[str, Any] = {"acceptance_method": "typical"}
TEXT = "It was the best of times, it was the worst of times. " * 20


def _longest(tokens: list[int], parents: list[int], p: Tensor, depth: int) -> list[int]:
    """The definition, node by node."""
    paths = {0: [0]}
    for node in range(1, len(tokens)):
        above = parents[node]
        if tokens[node] < 0 or above not in paths or len(paths[above]) > depth:
            continue
        entropy = -sum(x * math.log(x) for x in p[above].tolist() if x > 0)
        if p[above, tokens[node]].item() > min(EPSILON, DELTA * math.exp(-entropy)):
            paths[node] = [*paths[above], node]
    return max(paths.values(), key=lambda path: (len(path), -path[-1]))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_likely_path_is_accepted(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, nodes, depth = 3, 14, 4

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    tokens = integers(-1, VOCABULARY, batch, nodes)
    parents = torch.stack([integers(0, max(1, n), batch) for n in range(nodes)], 1)
    parents[:, 0] = -1
    # Flat and peaked distributions, with zeros among them.
    sharpness = torch.rand(batch, nodes, 1, generator=generator) * 6
    scores = torch.randn(batch, nodes, VOCABULARY, generator=generator) * sharpness
    scores[scores < -2] = -torch.inf
    p = scores.softmax(-1)
    path, count, last = accept_typical(tokens, parents, p, depth)
    expected = [_longest(tokens[b].tolist(), parents[b].tolist(), p[b], depth) for b in range(batch)]
    assert path.tolist() == [own + [-1] * (depth + 1 - len(own)) for own in expected]
    assert count.tolist() == [len(own) for own in expected]
    assert last.tolist() == [own[-1] for own in expected]


def test_the_token_after_the_path_follows_the_target() -> None:
    noise, p = Noise(2, 1, VOCABULARY, 3, torch.device("cpu")), torch.rand(2, 3, VOCABULARY)
    noise.draw(torch.Generator().manual_seed(1))
    node = torch.tensor([2, 0])
    drawn = [(p[b, n] / noise.exponential[b, 0]).argmax().item() for b, n in enumerate(node.tolist())]
    assert noise.token_after(p, node).tolist() == drawn


def _text(seed: int = 0, **options: Any) -> triforce_tree.GenerateOutput:
    sampling = {"temperature": options.pop("temperature", 1.0)}
    engine = triforce_tree.load(model("llama-gqa"), draft_of("llama-gqa"), profile=False, **options)
    return engine.generate([PROMPTS[0][:40]], max_new_tokens=24, seed=seed, **sampling)


def test_drawn_text_is_labelled_lossy_and_accepts_more() -> None:
    accepted = []
    for method in ("exact", "typical"):
        outs = [_text(seed, levels=2, rounds=1, acceptance_method=method) for seed in range(6)]
        assert {out.lossy for out in outs} == {None if method == "exact" else "typical acceptance"}
        accepted.append(sum(out.levels[-1].accepted for out in outs if out.levels))
    assert accepted[1] > accepted[0]


def test_greedy_text_is_the_targets_own() -> None:
    typical = _text(levels=2, rounds=1, acceptance_method="typical", temperature=0)
    assert typical.lossy is None
    assert typical.sequences.tolist() == _text(levels=1, temperature=0).sequences.tolist()


def test_sequences_with_seeds_of_their_own_do_not_depend_on_each_other() -> None:
    pair, options = (model("llama-gqa"), draft_of("llama-gqa")), TYPICAL_METHOD | {"levels": 2, "rounds": 1}
    engine = triforce_tree.load(*pair, profile=False, **options)
    prompts = [PROMPTS[0][:40], PROMPTS[1][:40]]
    both = engine.generate(prompts, max_new_tokens=16, seed=[3, 4], temperature=1.0)
    alone = engine.generate(prompts[1:], max_new_tokens=16, seed=[4], temperature=1.0)
    assert both.sequences[1].tolist() == alone.sequences[0].tolist()


def test_levels_left_open_are_two() -> None:
    config = HierarchyConfig(acceptance_method="typical")
    assert levels_of(config, 100_000) == 2
    assert HierarchyConfig(acceptance_method="typical", levels=1).lossy is None, "the target's own decoding"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance_method": "loose"}, "acceptance_method='loose' must be 'exact' or 'typical'"),
        (
            TYPICAL_METHOD | {"levels": 3},
            "levels=3 does not work with acceptance_method='typical'",
        ),
        (
            TYPICAL_METHOD | {"exact": True},
            "exact=True does not work with acceptance_method='typical'",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HierarchyConfig.from_options(**options)


def test_trees_of_texts_refuse_it() -> None:
    engine = triforce_tree.load(model("llama-gqa"), acceptance_method="typical", profile=False)
    with pytest.raises(ValueError, match="acceptance_method='typical' verifies drafts"):
        engine.tree(PROMPTS[0][:40])


@pytest.mark.gpu
def test_it_is_the_same_in_a_cuda_graph() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (2, 14), device="cuda", generator=generator)
    parents = torch.tensor([[-1, *(n // 2 for n in range(13))]] * 2, device="cuda")
    scores = torch.randn(2, 14, VOCABULARY, device="cuda", generator=generator)
    p = torch.full_like(scores, torch.nan)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        accept_typical(tokens, parents, p, 4)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = accept_typical(tokens, parents, p, 4)
    p.copy_((3 * scores).softmax(-1))
    graph.replay()
    expected = accept_typical(tokens.cpu(), parents.cpu(), p.cpu(), 4)
    assert [t.tolist() for t in found] == [t.tolist() for t in expected]
    assert expected[1].max() > 1


@pytest.mark.gpu
def test_generation_on_a_gpu_is_captured_and_labelled() -> None:
    engine = triforce_tree.load(profile=False, device="cuda", levels=2, **TYPICAL_METHOD)
    outs = [engine.generate(TEXT, max_new_tokens=64, seed=seed, temperature=0.8) for seed in range(2)]
    assert all(out.lossy and out.new_tokens == 64 for out in outs)
