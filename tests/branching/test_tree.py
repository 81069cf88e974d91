"""Texts of a tree are those of each text alone; tokens are stored once; refusals."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.api_cases import characters, text_of
from tests.support.models.families import greedy, prompt_of, tiny
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine, UnsupportedModelError
from triforce_tree.branching import attention
from triforce_tree.branching.node import Node
from triforce_tree.branching.pages import TreeFullError, slot_bytes
from triforce_tree.branching.tree import TextTree
from triforce_tree.check.goodness_of_fit import chi_square, chi_square_p
from triforce_tree.verify.draws import sequence_seed

PROMPT = prompt_of(75)
GREEDY: dict[str, Any] = {"do_sample": False}


@pytest.fixture(autouse=True)
def _poisoned(poisoned_empty: None) -> None:
    pass


@cache
def engine(family: str = "llama-gqa", **settings: Any) -> Engine:
    return triforce_tree.load(tiny(family, **settings))


def grown(made: Engine) -> tuple[TextTree, list[Node]]:
    """A tree of leaves at several depths: one empty, one behind given tokens, two behind a generated text."""
    tree = made.tree(PROMPT)
    first, second, third = tree.fork(tree.root, 3)
    tree.extend(first, [1, 2, 3, 4, 5])
    tree.generate([third, first], max_new_tokens=6, **GREEDY)
    left, right = tree.fork(third, 2)
    tree.extend(right, [7])
    return tree, [second, first, left, right]


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-gqa", "llama-mqa", "mistral-window", "gemma2", "gemma3", "qwen3", "gpt-neox", "mixtral"],
)
@pytest.mark.parametrize("least", [2, attention.LEAST_SPARED], ids=["nodes", "paths"])
def test_leaves_continue_as_their_texts_alone(
    family: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention by nodes, and by each leaf's path as for short nodes."""
    monkeypatch.setattr(attention, "LEAST_SPARED", least)
    made = engine(family)
    tree, leaves = grown(made)
    texts = [leaf.text_tokens for leaf in leaves]
    branches = tree.generate(leaves, max_new_tokens=14, **GREEDY)
    for text, leaf, branch in zip(texts, leaves, branches, strict=True):
        assert branch.tokens == greedy(made.target.model, text, 14)
        assert leaf.text_tokens == text + branch.tokens
        assert branch.finish_reason == "length"


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma2"])
@pytest.mark.parametrize("most, least", [(256, 2), (7, 2), (256, 10**9)])
def test_scores_are_the_targets(family: str, most: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the tokens are stored already, others need several forwards."""
    monkeypatch.setattr(attention, "LEAST_SPARED", least)
    made = engine(family)
    tree, leaves = grown(made)
    tree._slots.most_queries = most
    nodes = [*leaves, tree.root, *tree.root.children]
    tree.extend(leaves[0], prompt_of(30))
    for node, found in zip(nodes, tree.score(nodes), strict=True):
        ids = torch.tensor([node.text_tokens])
        exact = made.target.model(ids).logits[0, :-1].log_softmax(-1)
        exact = exact.gather(1, ids[0, 1:, None])[:, 0][max(0, node.start - 1) :]
        assert len(found) == len(node.tokens)
        torch.testing.assert_close(found if node.start else found[1:], exact, atol=2e-5, rtol=0)
    before = tree.used_bytes
    tree.score(nodes)
    assert tree.used_bytes == before


def test_every_row_is_stored_once() -> None:
    made = engine()
    tree, leaves = grown(made)
    tree.generate(leaves, max_new_tokens=20, **GREEDY)
    nodes, stack = [], [tree.root]
    while stack:
        nodes.append(stack.pop())
        stack += nodes[-1].children
    page = tree._slots.pages.page
    taken = [slot for node in nodes for slot in node.slots(0, node.stored, page).tolist()]
    assert len(set(taken)) == len(taken)
    # All tokens of all nodes but the last one of each leaf, which nothing follows.
    assert len(taken) == sum(len(node.tokens) for node in nodes) - len(tree.leaves)
    pages = sum(-(-node.stored // page) for node in nodes)
    assert tree.used_bytes == pages * page * slot_bytes(made.target)


def test_pruned_rows_are_free_for_others() -> None:
    made = engine()
    tree = made.tree(PROMPT)
    before = tree.used_bytes
    for _ in range(3):
        nodes = tree.fork(tree.root, 4)
        tree.generate(nodes, max_new_tokens=20, **GREEDY)
        below = tree.fork(nodes[1], 1)[0]
        tree.generate(below, max_new_tokens=9, **GREEDY)
        assert below.text_tokens == PROMPT + greedy(made.target.model, PROMPT, 29)
        assert tree.used_bytes > before
        for node in nodes:
            tree.prune(node)
        assert tree.used_bytes == before
        assert not below.alive
    assert tree.leaves == [tree.root]


def test_draws_follow_the_targets_distribution() -> None:
    """Pairs of tokens, against all of them enumerated."""
    made = engine(vocab_size=6)
    prompt = [1, 2, 3, 4, 5, 0, 2]
    model, tree = made.target.model, made.tree(prompt)
    counts: Counter[int] = Counter()
    options: dict[str, Any] = {"temperature": 1.3, "top_k": 5}
    for seed in range(4):
        leaves = tree.fork(tree.root, 250)
        for branch in tree.generate(leaves, max_new_tokens=2, seed=seed, **options):
            counts[branch.tokens[0] * 6 + branch.tokens[1]] += 1
        for leaf in leaves:
            tree.prune(leaf)

    def probs(text: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([text])).logits[0, -1] / 1.3
        return logits.masked_fill(logits < logits.topk(5).values[-1], -torch.inf).softmax(-1)

    first = probs(prompt)
    exact = torch.cat([first[token] * probs([*prompt, token]) for token in range(6)])
    assert not any(count for pair, count in counts.items() if exact[pair] == 0)
    assert chi_square_p(*chi_square(counts, exact)) > 1e-3


def test_a_leaf_draws_by_its_seed_whatever_its_company() -> None:
    made = engine()
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 3}
    tree = made.tree(PROMPT)
    many = tree.generate(tree.fork(tree.root, 5), **options)
    assert len({tuple(branch.tokens) for branch in many}) == 5
    two = tree.generate(tree.fork(tree.root, 2), **options)
    assert [branch.tokens for branch in two] == [branch.tokens for branch in many[:2]]
    other = tree.generate(tree.fork(tree.root, 2), **{**options, "seed": 4})
    assert [branch.tokens for branch in other] != [branch.tokens for branch in two]


@pytest.mark.parametrize("most", [256, 2])
def test_a_seed_means_what_it_does_for_each_text_alone(most: int) -> None:
    """Leaf i has the text of ``generate`` with the seed of sequence i, which drafts."""
    made = engine()
    tree, leaves = grown(made)
    tree._slots.most_queries = most
    texts = [leaf.text_tokens for leaf in leaves]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.2, "top_p": 0.9}
    branches = tree.generate(leaves, seed=9, **options)
    for number, (text, branch) in enumerate(zip(texts, branches, strict=True)):
        alone = made.generate(text, seed=[sequence_seed(9, number)], **options)
        assert alone.sequences[0, len(text) :].tolist() == branch.tokens


def test_options_mean_what_they_do_for_each_text_alone() -> None:
    """Penalties read each leaf's own text, and lengths are counted from its end."""
    made = engine()
    model = made.target.model
    tree, leaves = grown(made)
    texts = [leaf.text_tokens for leaf in leaves]
    stop = greedy(model, texts[1], 9)[5]
    options: dict[str, Any] = {
        "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "eos_token_id": stop,
        "pad_token_id": stop,
    }  # fmt: skip
    branches = tree.generate(leaves, max_new_tokens=20, **GREEDY, **options)
    for text, branch in zip(texts, branches, strict=True):
        assert branch.tokens == greedy(model, text, 20, **options)
        assert branch.finish_reason == ("eos" if branch.tokens[-1] == stop else "length")
    plain = tree.generate(tree.fork(tree.root, 1), max_new_tokens=9, eos_token_id=stop, **GREEDY)
    assert plain[0].tokens == greedy(model, PROMPT, 9, eos_token_id=stop, pad_token_id=stop)


def test_stop_strings_end_each_leaf_by_itself() -> None:
    made = triforce_tree.load(tiny("llama-gqa"), tokenizer=characters())
    tree, leaves = grown(made)
    texts = [leaf.text_tokens for leaf in leaves]
    stop = text_of(greedy(made.target.model, texts[0], 9)[3:5])
    branches = tree.generate(leaves, max_new_tokens=25, stop_strings=stop, **GREEDY)
    for text, branch in zip(texts, branches, strict=True):
        alone = made.generate(text, max_new_tokens=25, stop_strings=stop, **GREEDY)
        assert (branch.tokens, branch.text) == (alone.sequences[0, len(text) :].tolist(), alone.text)
        assert branch.finish_reason == alone.finish_reason
    assert branches[0].finish_reason == "stop"
    assert tree.text(leaves[0]).endswith(stop)


@pytest.mark.parametrize("options", [GREEDY, {"temperature": 1.3, "top_k": 20, "seed": 5}])
def test_forwards_may_be_queued_before_their_tokens_are_known(options: dict[str, Any]) -> None:
    """A GPU queues forwards so. The texts are the same; some end while the forward after their last token is
    queued.
    """
    found, logprobs, free, queued = [], [], [], []
    for queues in (False, True):
        tree, leaves = grown(engine())
        tree._slots.queues = queues
        next_logits = tree._slots.next_logits
        tree._slots.next_logits = lambda *args, inner=next_logits: (queued.append(1), inner(*args))[1]
        leaves += tree.fork(tree.root, 3)[::-1]
        usual = tree.generate(tree.fork(tree.root, 1), max_new_tokens=12, **options)[0].tokens
        branches = tree.generate(leaves, max_new_tokens=24, eos_token_id=[usual[3], usual[9]], **options)
        assert len({len(branch.tokens) for branch in branches if branch.finish_reason == "eos"}) > 1
        found.append([branch.tokens for branch in branches])
        logprobs.append(torch.tensor([value for branch in branches for value in branch.logprobs]))
        # What follows goes on from slots of such forwards too.
        below = [tree.fork(leaf, 1)[0] for leaf in leaves]
        found[-1] += [branch.tokens for branch in tree.generate(below, max_new_tokens=5, **options)]
        free.append(tree._slots.pages.free)
        assert bool(queued) == queues
    assert found[0] == found[1]
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=2e-5, rtol=0)
    assert free[0] == free[1]


def test_nan_leaves_a_tree_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another forward may be queued already."""
    made = engine()
    tree = made.tree(PROMPT)
    tree._slots.queues = True
    nodes = tree.fork(tree.root, 2)
    tree.generate(nodes, max_new_tokens=3, **GREEDY)
    computed = tree._slots.logits
    monkeypatch.setattr(tree._slots, "logits", lambda *args, **kwargs: computed(*args, **kwargs) * torch.nan)
    texts = [node.text_tokens for node in nodes]
    with pytest.raises(ValueError, match="NaN logits"):
        tree.generate(nodes, max_new_tokens=6, **GREEDY)
    assert [node.text_tokens for node in nodes] == texts
    monkeypatch.setattr(tree._slots, "logits", computed)
    for text, branch in zip(texts, tree.generate(nodes, max_new_tokens=6, **GREEDY), strict=True):
        assert branch.tokens == greedy(made.target.model, text, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma2"])
def test_on_a_gpu(family: str) -> None:
    """Forwards of several sizes, captured, beside transformers in fp32."""
    model = tiny(family).cuda()
    made = triforce_tree.load(model)
    tree, leaves = grown(made)
    leaves += tree.fork(tree.root, 13)
    texts = [leaf.text_tokens for leaf in leaves]
    branches = tree.generate(leaves, max_new_tokens=40, **GREEDY)
    for text, branch in zip(texts, branches, strict=True):
        assert branch.tokens == greedy(model, text, 40)
    for node, found in zip(leaves, tree.score(leaves), strict=True):
        ids = torch.tensor([node.text_tokens], device="cuda")
        exact = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(found, exact[node.start - 1 :].cpu(), atol=1e-4, rtol=0)
    ids = torch.tensor([PROMPT], device="cuda")
    how = {"num_beams": 4, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(made.generate(ids, **how).sequences, model.generate(ids, **how))


def test_logprobs_are_those_of_the_raw_logits() -> None:
    made = engine()
    tree = made.tree(PROMPT)
    [branch] = tree.generate(tree.fork(tree.root, 1), max_new_tokens=8, temperature=2.0, seed=1)
    ids = torch.tensor([branch.node.text_tokens])
    exact = made.target.model(ids).logits[0, :-1].log_softmax(-1)
    exact = exact.gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0]
    torch.testing.assert_close(torch.tensor(branch.logprobs), exact, atol=2e-5, rtol=0)
    assert branch.logprobs == branch.node.logprobs


def test_a_full_tree_refuses_before_it_computes() -> None:
    made = engine()
    slot = slot_bytes(made.target)
    tree = made.tree(PROMPT, max_bytes=160 * slot)
    nodes = tree.fork(tree.root, 4)
    before = tree.used_bytes
    with pytest.raises(
        TreeFullError, match=r"192 more KV slots are needed, and 80 of the tree's 160 are free"
    ):
        tree.generate(nodes, max_new_tokens=40, **GREEDY)
    assert tree.used_bytes == before
    assert all(not node.tokens for node in nodes)
    with pytest.raises(TreeFullError, match="prune nodes, ask for fewer tokens"):
        tree.extend(nodes[0], [1] * 81)
    for node in nodes[1:]:
        tree.prune(node)
    [branch] = tree.generate(nodes[:1], max_new_tokens=40, **GREEDY)
    assert branch.tokens == greedy(made.target.model, PROMPT, 40)
    with pytest.raises(TreeFullError, match="more KV slots are needed"):
        made.tree(PROMPT, max_bytes=50 * slot)
    with pytest.raises(ValueError, match="max_bytes=3 holds no token"):
        made.tree(PROMPT, max_bytes=3)


def test_what_a_tree_refuses() -> None:
    made = engine()
    tree = made.tree(PROMPT)
    first, second = tree.fork(tree.root)
    with pytest.raises(ValueError, match="has children, which continue its text as it is; fork it"):
        tree.extend(tree.root, [1])
    with pytest.raises(ValueError, match="has children"):
        tree.generate([tree.root], max_new_tokens=3)
    with pytest.raises(ValueError, match="given twice"):
        tree.generate([first, first], max_new_tokens=3)
    with pytest.raises(ValueError, match="the root cannot be pruned"):
        tree.prune(tree.root)
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        tree.fork(first, 0)
    with pytest.raises(ValueError, match=r"'x' is no node; give tree\.root, or what fork returned"):
        tree.fork("x")
    with pytest.raises(ValueError, match="token id 64 lies outside the vocabulary of 64"):
        tree.extend(first, [64])
    with pytest.raises(ValueError, match="a text needs a tokenizer"):
        tree.extend(first, "text")
    with pytest.raises(ValueError, match="exceed the model's 2048 positions"):
        tree.generate([first], max_new_tokens=2000)
    with pytest.raises(ValueError, match="output_scores and output_logits are not supported"):
        tree.generate([first], max_new_tokens=2, output_scores=True)
    with pytest.raises(ValueError, match="num_beams=3 is not supported"):
        tree.generate([first], max_new_tokens=2, num_beams=3)
    tree.prune(second)
    with pytest.raises(ValueError, match="not in this tree: it was pruned"):
        tree.fork(second)
    with pytest.raises(ValueError, match="not in this tree"):
        made.tree(PROMPT).fork(first)
    with pytest.raises(ValueError, match="kv_bits=8 is not supported by a tree"):
        made.with_options(kv_bits=8).tree(PROMPT)
    with pytest.raises(ValueError, match="leave out offload"):
        made.with_options(offload=True).tree(PROMPT)


def test_recurrent_targets_are_refused() -> None:
    made = triforce_tree.load(recurrent("lfm2"), levels=1)
    with pytest.raises(UnsupportedModelError, match="recurrent layers, whose states cannot be shared"):
        made.tree(PROMPT)


def test_other_weights_are_noticed() -> None:
    model = tiny("llama-gqa", seed=5)
    tree = triforce_tree.load(model).tree(PROMPT)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(ValueError, match="the target's weights have changed since the tree was made"):
        tree.generate(tree.fork(tree.root), max_new_tokens=2)
