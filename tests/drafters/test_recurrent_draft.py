"""Drafts with recurrent layers: their states and windows after accepted, rejected and plain tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import triforce_tree
from tests.support.distributions.enumeration import NOISE, total_variation
from tests.support.distributions.generation_distributions import Generations, stranger, target_distribution
from tests.support.models.families import greedy, perturbed, prompt_of
from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    decoded,
    finished,
    model,
    program_of,
    reference,
    sequences_of,
)
from tests.support.models.recurrent_families import RECURRENT, recurrent
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.models.hf_model import HFModel
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime.devices import plain_torch_modes
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import pass_limits
from triforce_tree.verify.probs import Sampler
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")
CHAIN: dict[str, Any] = {"tree": "chain:3", "runner_ups": False, "prefill_chunk": 16}
# Holds all of every sequence, so that the draft's own forward gives what it should propose.
WHOLE = CHAIN | {"window": 200}
# Without experts, whose products depend on how many tokens are routed to each.
DENSE = {"granite-4": {"num_local_experts": 0}, "jamba": {"num_experts": 1}}


def reads(program: DecodingProgram) -> int:
    """The convolutions that the draft computes while a program reads its prompts again."""
    with _Operators() as seen:
        program.drafter.start(PROMPTS)
    return seen.names.count("aten.convolution")


class _Operators(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@contextmanager
def compared(program: DecodingProgram, draft: PreTrainedModel) -> Iterator[list[int]]:
    """Compares distributions of every proposed tree, sampled as by ``SAMPLED``, with the draft's own forward.

    Yields:
        a list that has an element for each compared node: its depth.
    """
    drafter, seen = program.drafter, list[int]()
    propose = drafter.propose

    @torch.no_grad()
    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        propose(state, tree, sampler)
        for b in state.active.nonzero()[:, 0].tolist():
            text = state.tokens[b, : int(state.end[b]) + 1].tolist()
            tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
            for node in {parents[-1], parents[-2], 0}:
                path, ancestor = list[int](), node
                while ancestor > 0:
                    path, ancestor = [tokens[ancestor], *path], parents[ancestor]
                logits = draft(torch.tensor([text + path]), use_cache=False).logits[0, -1]
                expected = (logits / 0.8).softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, atol=5e-4, rtol=1e-3)
                seen.append(len(path))

    drafter.propose = checked
    yield seen
    del drafter.propose


@pytest.mark.parametrize("family", RECURRENT)
def test_trees_follow_the_drafts_own_distribution(family: str) -> None:
    """Under a target of the same family, which accepts all; and in rounds under one with attention alone."""
    draft = recurrent(family)
    for target, levels, tree in ((draft, 2, "static:0;1;1.0;0.0;0.0.0"), (model("llama-gqa"), 3, "chain:3")):
        program = program_of(target, draft, levels, 3, **WHOLE | {"tree": tree})
        with compared(program, draft) as depths:
            _, loop = decoded(program, PROMPTS, [16] * 3, SAMPLED)
        assert depths.count(2) > 8
        judged = loop.levels[-1]
        assert judged.accepted == judged.proposed if levels == 2 else 0 < judged.accepted < judged.proposed


@pytest.mark.parametrize("family", ["qwen3.5", "jamba", "lfm2"])
def test_best_first_trees_in_rounds(family: str) -> None:
    draft = recurrent(family)
    program = program_of(model("llama-gqa"), draft, 3, 2, **WHOLE | {"tree": "best-first:3,3,2"})
    with compared(program, draft) as depths:
        decoded(program, PROMPTS[:2], [16] * 2, SAMPLED)
    assert depths.count(2) > 8


@pytest.mark.parametrize("family, levels", [("qwen3.5", 2), ("jamba", 2), ("lfm2", 2), ("lfm2", 3)])
def test_greedy_text_with_windows_that_move(family: str, levels: int) -> None:
    target = model("llama-gqa")
    program = program_of(target, recurrent(family), levels, 3, 300, **CHAIN)
    new = [70, 60, 50]
    moved = set()
    prepare = program.drafter.prepare

    def noted(*args: Any) -> None:
        prepare(*args)
        moved.add(tuple(program.drafter.window.dropped.tolist()))

    program.drafter.prepare = noted
    assert decoded(program, PROMPTS, new)[0] == [
        reference(target, p, n) for p, n in zip(PROMPTS, new, strict=True)
    ]
    assert len(moved) > 2


@torch.no_grad()
def test_prompts_of_many_windows_are_read_by_windows() -> None:
    """They hold the sinks and at least one window; the states also depend on the tokens before."""
    draft = recurrent("olmo-hybrid")  # Random models of other families forget within 40 tokens.
    program = program_of(model("llama-gqa"), draft, 2, 1, 300, **CHAIN, sinks=2, window=8)
    prompt = prompt_of(150)
    window = program.drafter.window
    window.start(0, prompt)
    filled = len(prompt) - program.drafter.refeed_tokens - int(window.dropped[0])
    assert 2 + 8 <= filled <= 2 + 16
    states = [state.clone() for state in window.states.recurrences]
    window.start(0, [*prompt[:50], prompt[50] + 1, *prompt[51:]])
    for before, state in zip(states, window.states.recurrences, strict=True):
        assert (before - state).abs().max() > 1e-3


def test_a_window_of_one_chunk_or_of_many_gives_the_same_states() -> None:
    draft = recurrent("granite-4")
    found = []
    for chunk in (1, 7, 64, 1000):
        options = WHOLE | {"prefill_chunk": chunk}
        window = program_of(model("llama-gqa"), draft, 2, 1, **options).drafter.window
        window.start(0, PROMPTS[2])
        found.append([part[:, :, :80] for part in window._slots(0)] + window.states.buffers)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_drafting_off_and_on() -> None:
    """Tokens of plain passes are read before the next chain."""
    draft = recurrent("qwen3.5")
    program = program_of(model("llama-gqa"), draft, 2, 2, **WHOLE)
    loop = DecodingLoop.over(program, SAMPLED, 0)
    kinds = iter([PassKind(2, 1), PLAIN, PLAIN, PassKind(2, 1), PassKind(2, 1), *[PLAIN] * 9] * 24)
    loop.policy.choose = lambda *_: next(kinds)
    with compared(program, draft) as chains:
        finished(loop, PROMPTS[:2], [40, 33])
    assert len(chains) > 10


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_prompts_shorter_than_what_is_read_again(length: int) -> None:
    target, prompt = model("llama-gqa"), prompt_of(length)
    program = program_of(target, recurrent("lfm2"), 2, 1, **CHAIN)
    loop = DecodingLoop.over(program, GREEDY, 0)
    kinds = iter([PassKind(2, 1), PassKind(2, 1), PLAIN] * 24)
    loop.policy.choose = lambda *_: next(kinds)
    assert finished(loop, [prompt], [30]) == [greedy(target, prompt, 30)]


def test_a_sequence_that_joins() -> None:
    draft = recurrent("jamba")
    program = program_of(model("llama-gqa"), draft, 2, 2, **WHOLE)
    loop = DecodingLoop.over(program, SAMPLED, 0)
    first, second, third = sequences_of([*PROMPTS[:2], prompt_of(30)], [6, 40, 20])
    with compared(program, draft) as chains:
        loop.begin([first, second])
        while first.finish_reason is None:
            loop.step()
        loop.add(third)
        while loop.running:
            loop.step()
    assert [len(s.new) for s in (first, second, third)] == [6, 40, 20]
    assert len(chains) > 20


def test_prompts_are_read_once() -> None:
    """A later prompt continues from the whole chunks of an earlier one, with the same bits."""
    draft = recurrent("qwen3.5")
    made = [program_of(model("llama-gqa"), draft, 2, 3, **CHAIN) for _ in range(2)]
    first, fresh = (reads(program) for program in made)
    assert first == fresh > 0
    decoded(made[0], PROMPTS, NEW, SAMPLED)
    assert reads(made[0]) == 0, "rewinding needs no forward"
    longer = [[*prompt, *prompt_of(7)] for prompt in PROMPTS]
    with _Operators() as seen:
        made[0].drafter.start(longer)
    assert 0 < seen.names.count("aten.convolution") < first
    made[1].drafter.start([prompt_of(9)] * 3)
    made[1].drafter.start(longer)
    for a, b in zip(*(program.drafter.window.states.buffers for program in made), strict=True):
        assert torch.equal(a, b)
    again = TreeDrafter(made[0].drafter.draft, made[0].config)
    again.bind(made[0].state)
    again.take_over(made[0].drafter)
    with _Operators() as seen:
        again.start(longer)
    assert seen.names.count("aten.convolution") == 0


def test_trial_runs_leave_the_states_of_prompts() -> None:
    draft = recurrent("qwen3.5")
    program = program_of(draft, draft, 2, 3, **WHOLE)
    decoded(program, PROMPTS, [5] * 3, SAMPLED)
    with program.trial(100) as begin:
        begin(False)
        generator = torch.Generator().manual_seed(0)
        for name in ("draft", "target", "draft"):
            program.run(name, generator)
    with compared(program, draft):
        _, loop = decoded(program, PROMPTS, [20] * 3, SAMPLED, again=True)
    assert loop.levels[-1].accepted == loop.levels[-1].proposed


CASES: dict[str, tuple[str, int, int, dict[str, Any], Sequence[int]]] = {
    "qwen3.5, same family": ("qwen3.5", 2, 2, {"tree": "chain:2"}, ()),
    "granite-4, same family": ("granite-4", 2, 2, {"tree": "chain:1"}, ()),
    "qwen3.5": ("", 2, 3, {"tree": "chain:2"}, ()),
    "a tree": ("", 2, 2, {"tree": "static:0;1;1.0"}, ()),
    "lfm2, a best-first tree": ("lfm2", 2, 2, {"tree": "best-first:2,1"}, ()),
    "between plain passes": ("", 2, 3, {"tree": "chain:1"}, (1, 0)),
    "rounds": ("", 3, 2, {"tree": "chain:1", "gamma": 2, "rounds": 2, "runner_ups": False}, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_distribution_of_generated_tokens(case: str) -> None:
    """Every draw is enumerated; target and draft are unrelated, and the window is smaller than the prompt."""
    family, levels, tokens, options, plan = CASES[case]
    own = family or "qwen3.5"
    draft = recurrent(own, seed=5, vocab_size=3, **DENSE.get(own, {}))
    target = recurrent(own, seed=1, vocab_size=3, **DENSE.get(own, {})) if family else stranger(3, 0)
    prompt, sampled = prompt_of(37, 3), ProbsFromLogits.at(1.0)
    generations = Generations(target, draft, levels, prompt, **options)
    made = generations.distribution(sampled, tokens, 1 if levels == 3 else None, plan)
    assert len(made) == 3**tokens
    assert total_variation(made, target_distribution(target, sampled, prompt, tokens)) < 10 * NOISE


@pytest.mark.parametrize("tree", ["chain:3", "best-first:3,2"])
@pytest.mark.parametrize("family", ["qwen3.5", "granite-4", "jamba", "lfm2"])
def test_drafting_never_waits_for_the_device(family: str, tree: str) -> None:
    """A CUDA graph can therefore capture it; it writes to the same buffers in each call."""
    program = program_of(model("llama-gqa"), recurrent(family), 3, 2, **CHAIN | {"tree": tree})
    program.prepare(GREEDY)
    program.prefill(PROMPTS[:2])
    generator = torch.Generator().manual_seed(0)
    program.run("draft", generator)
    window = program.drafter.window
    before = [t.data_ptr() for t in window.states.buffers]
    with plain_torch_modes(program.device), _Operators() as seen:
        program.run("draft", generator)
    assert not {"aten._local_scalar_dense", "aten.nonzero"} & set(seen.names)
    assert before == [t.data_ptr() for t in window.states.buffers]


def test_another_vocabulary() -> None:
    draft = recurrent("lfm2", vocab_size=80)
    config = HierarchyConfig.from_options(tree="chain:3", rounds=1, window=8, prefill_chunk=16)
    target = model("llama-gqa")
    drafter = TreeDrafter(HFModel(draft), config, TokenMap.padded(64, 80))
    program = DecodingProgram(HFModel(target), drafter, config, 1, 150, 2)
    assert decoded(program, PROMPTS[:1], [20])[0] == [reference(target, PROMPTS[0], 20)]


def test_by_the_engine() -> None:
    """By default it drafts a chain; turns of a session, and prompts in a batch."""
    target, draft = recurrent("qwen3.5"), perturbed(recurrent("qwen3.5"), 0.02)
    engine = triforce_tree.load(target, draft, advanced={"rounds": 1, "window": 16})
    assert engine.config.tree == "chain:5"
    session = engine.session(PROMPTS[0])
    for turn in (None, [1, 2, 3], prompt_of(20)):
        asked = [*session.tokens, *(turn or ())]
        session.generate(turn, max_new_tokens=12, do_sample=False)
        assert session.tokens == [*asked, *greedy(target, asked, 12)]
    out = engine.generate(PROMPTS, max_new_tokens=12, do_sample=False)
    texts = [row[len(row) - 12 :] for row in out.sequences.tolist()]
    assert texts == [greedy(target, prompt, 12) for prompt in PROMPTS]
    assert out.levels[-1].accepted > 0
    one, same, other = (
        engine.generate(PROMPTS[0], max_new_tokens=12, do_sample=True, seed=s).sequences for s in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("family", ["qwen3.5", "granite-4", "jamba", "lfm2"])
def test_the_memory_plan_counts_the_states(family: str) -> None:
    program = program_of(model("llama-gqa"), recurrent(family), 3, 2, **CHAIN)
    decoded(program, PROMPTS[:2], [9, 9])
    drafter, window = program.drafter, program.drafter.window
    limits = pass_limits(program.config, 3)
    [planned] = drafter.buffer_bytes(2, 200, limits).values()
    buffers = [*window.states.buffers, *window.drafted.buffers]
    copies = 3 * sum(part.nbytes for b in range(2) for part in window.copy(b, 0))
    used = sum(t.nbytes for t in buffers) + copies
    assert 0.95 * used < planned < 1.6 * used
