"""Models with recurrent layers: states carried through prefill, passes, rejected tokens and batches."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import triforce_tree
from tests.support.distributions.enumeration import NOISE, total_variation
from tests.support.distributions.generation_distributions import Generations, stranger, target_distribution
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import GREEDY, SAMPLED, decoded, finished
from tests.support.models.recurrent_families import RECURRENT, Foreknowledge, ForeknownPath, recurrent
from triforce_tree import UnsupportedModelError
from triforce_tree.check import losslessness as check
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter
from triforce_tree.kernels.recurrent import linear_recurrence
from triforce_tree.kv import recurrent_states
from triforce_tree.kv.recurrent_states import ProposedPass, RecurrentStates, TokenPass, TreePass
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.running_forward import ScanInputs
from triforce_tree.models.step_model import step_model
from triforce_tree.planning.memory_layout import Workload, on_device
from triforce_tree.planning.memory_map import Machine, Sizes
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime.devices import plain_torch_modes
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")
PROMPTS = [prompt_of(length) for length in (41, 57, 23)]
NEW = 24
ONE_PER_KIND = ["qwen3.5", "granite-4", "jamba", "lfm2"]
# Without experts, which torch multiplies in single precision only.
DENSE = {"granite-4": {"num_local_experts": 0}, "jamba": {"num_experts": 1}}

model = cache(recurrent)


@cache
def expected(family: str) -> list[list[int]]:
    return [greedy(model(family), prompt, NEW) for prompt in PROMPTS]


def mistakes(prompt: list[int], every: int) -> set[int]:
    return {at for at in range(len(prompt), len(prompt) + NEW) if (at * 7) % every == 0}


def program(
    target: PreTrainedModel, levels: int, drafter: Drafter | None = None, batch: int = 1, chunk: int = 16
) -> DecodingProgram:
    options = {"rounds": 1, "prefill_chunk": chunk, "tree": drafter.tree if drafter else "chain:1"}
    config = HierarchyConfig.from_options(**options)
    return DecodingProgram(HFModel(target), drafter, config, batch, 150, levels)


@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_text_of_every_family(family: str) -> None:
    """Prompts in several chunks; plain decoding; and chains of which some are rejected, others accepted."""
    target = model(family)
    assert len(set(expected(family)[0])) > 8, "a model that repeats itself would hide a wrong state"
    assert decoded(program(target, 1), PROMPTS[:1], [NEW])[0] == expected(family)[:1]
    known = [p + e for p, e in zip(PROMPTS, expected(family), strict=True)]
    # Different mistakes in each sequence: the numbers of accepted tokens differ within a pass.
    wrong = [mistakes(p, every) for p, every in zip(PROMPTS, (3, 4, 5), strict=True)]
    new, loop = decoded(program(target, 2, Foreknowledge(known, wrong, 4), 3), PROMPTS, [NEW] * 3)
    assert new == expected(family)
    assert NEW < loop.levels[-1].accepted < loop.levels[-1].proposed - NEW


@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_text_by_trees(family: str) -> None:
    """Each node begins from its parent's state; states after many passes are those of a prefill."""
    target = model(family)
    known = [p + e for p, e in zip(PROMPTS, expected(family), strict=True)]
    used = program(target, 2, ForeknownPath(known), 3)
    new, loop = decoded(used, PROMPTS, [NEW] * 3)
    assert new == expected(family)
    judged = loop.levels[-1]
    assert 0.4 * judged.proposed < judged.accepted < judged.proposed
    fresh = program(target, 1, batch=3)
    fresh.prepare(GREEDY)
    fresh.prefill([used.state.sequence(b) for b in range(3)])
    for ours, theirs in zip(used.states.buffers, fresh.states.buffers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_a_batch_of_one_token_a_pass_and_sequences_that_end_early(family: str) -> None:
    new, _ = decoded(program(model(family), 1, batch=3), PROMPTS, [NEW, 5, 17])
    assert new == [text[:n] for text, n in zip(expected(family), (NEW, 5, 17), strict=True)]


@pytest.mark.parametrize("family", ONE_PER_KIND)
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_a_prompt(family: str, chunk: int) -> None:
    assert (
        decoded(program(model(family), 1, chunk=chunk), PROMPTS[:1], [12])[0][0] == expected(family)[0][:12]
    )


@pytest.mark.parametrize("family", ["granite-4", "jamba"])
def test_drafting_off_and_on(family: str) -> None:
    """Passes of one token, committed at once, between those that verify a chain."""
    known = [PROMPTS[0] + expected(family)[0]]
    plan = program(model(family), 2, Foreknowledge(known, [mistakes(PROMPTS[0], 3)], 3))
    loop = DecodingLoop.over(plan, GREEDY, 0)
    kinds = iter([PassKind(2, 1), PLAIN, PLAIN, PassKind(2, 1), PassKind(2, 1), PLAIN] * NEW)
    loop.policy.choose = lambda *_: next(kinds)
    [new] = finished(loop, PROMPTS[:1], [NEW])
    assert new == expected(family)[0]


@pytest.mark.parametrize("family", ONE_PER_KIND)
def test_nothing_but_accepted_tokens_changes_the_states(family: str) -> None:
    """After many passes, nearly all of whose chains are rejected, the states are those of a prefill."""
    target, text = model(family), [*PROMPTS[0], *expected(family)[0]]
    drafter = Foreknowledge([text], [set(range(len(text))) - {50, 51, 57}], 4)
    used = program(target, 2, drafter)
    before = [t.data_ptr() for t in used.states.buffers]
    [new], loop = decoded(used, PROMPTS[:1], [NEW])
    assert new == expected(family)[0]
    assert loop.levels[-1].accepted == 3
    length = int(used.state.length[0])
    fresh = program(target, 1)
    fresh.prepare(GREEDY)
    fresh.prefill([text[: length + 1]])
    for ours, theirs in zip(used.states.buffers, fresh.states.buffers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert before == [t.data_ptr() for t in used.states.buffers]


def test_rewinding_feeds_the_prompt_again() -> None:
    target = model("granite-4")
    used = program(target, 1)
    decoded(used, PROMPTS[:1], [9])
    assert decoded(used, PROMPTS[:1], [NEW], again=True)[0] == expected("granite-4")[:1]


@pytest.mark.parametrize(
    "family, levels, tokens, tree",
    [
        ("qwen3.5", 1, 3, "chain:1"),
        ("granite-4", 1, 3, "chain:1"),
        ("jamba", 1, 3, "chain:1"),
        ("qwen3.5", 2, 2, "chain:2"),
        ("granite-4", 2, 2, "chain:2"),
        ("qwen3.5", 2, 2, "static:0;1;1.0"),
        ("lfm2", 2, 2, "best-first:2,1"),
    ],
)
def test_the_distribution_of_generated_tokens(family: str, levels: int, tokens: int, tree: str) -> None:
    """Every draw is enumerated, with a draft that is unrelated to the target."""
    target, prompt = recurrent(family, vocab_size=3, **DENSE.get(family, {})), prompt_of(21, 3)
    draft = stranger(3, 3) if levels == 2 else None
    generations = Generations(target, draft, levels, prompt, tree=tree)
    sampled = ProbsFromLogits.at(1.0)
    made = generations.distribution(sampled, tokens)
    assert len(made) == 3**tokens
    assert total_variation(made, target_distribution(target, sampled, prompt, tokens)) < 10 * NOISE


def test_by_the_engine_with_a_draft_model_and_with_prompt_lookup() -> None:
    target = model("qwen3.5")
    for draft in (None, tiny("llama")):
        engine = triforce_tree.load(target, draft, advanced={"rounds": 1})
        assert engine.levels(10_000) == 2
        out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, len(PROMPTS[0]) :].tolist() == expected("qwen3.5")[0]
        first, same, other = (
            engine.generate(PROMPTS[0], max_new_tokens=8, do_sample=True, seed=s).sequences for s in (1, 1, 2)
        )
        assert torch.equal(first, same)
        assert not torch.equal(first, other)


def test_trees_by_the_engine() -> None:
    target = model("qwen3.5")
    engine = triforce_tree.load(target, tiny("llama"), tree="best-first:3,2,1", advanced={"rounds": 1})
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert [row[len(row) - NEW :] for row in out.sequences.tolist()] == expected("qwen3.5")
    engine = triforce_tree.load(target, tiny("llama"))
    assert engine.config.tree == "chain:5"


def test_the_users_model_is_unchanged() -> None:
    target = recurrent("granite-4")
    decoded(program(target, 1), PROMPTS[:1], [4], SAMPLED)
    assert not any("forward" in vars(module) for module in target.modules())
    assert greedy(target, PROMPTS[0], NEW) == expected("granite-4")[0]


def test_what_is_not_possible_is_refused_with_the_reason() -> None:
    target = model("granite-4")
    with pytest.raises(ValueError, match=r"levels=3 is not possible with GraniteMoeHybrid.*use levels=2"):
        triforce_tree.load(target, levels=3)


def test_a_mixer_whose_forward_was_replaced_is_refused() -> None:
    target = recurrent("lfm2")
    convolution = next(m for m in target.modules() if type(m).__name__ == "Lfm2ShortConv")
    convolution.forward = convolution.forward
    with pytest.raises(UnsupportedModelError, match="forward of a Lfm2ShortConv was replaced"):
        HFModel(target)


def test_a_wrong_state_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_states.PromptPass, "keep", lambda self, number, state: None)
    with pytest.raises(UnsupportedModelError, match="would not be decoded as by transformers"):
        triforce_tree.load(perturbed(model("granite-4"), 0.01))


class _Waits(TorchDispatchMode):
    """Records operators that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", RECURRENT)
def test_a_pass_never_waits_for_the_device(family: str) -> None:
    """A CUDA graph can therefore capture the forward, of one sequence or several, and the commit."""
    target = HFModel(model(family))
    step, states = step_model(target, False), RecurrentStates(target.states, 2, target.device, target.dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()

    proposed, tokens, tree = ProposedPass(states), torch.randint(64, (2, 5)), TreePass(states, 5, 5)
    with plain_torch_modes(target.device), _Waits() as waits:
        step(tokens, torch.arange(5).expand(2, -1), attend, states=proposed)
        proposed.commit(torch.tensor([2, 5]))
        step(tokens[:, :1], torch.tensor([[2], [5]]), attend, states=TokenPass(states))
        tree.begin(0, torch.ones(2, 5, 5, dtype=torch.bool).tril())
        step(tokens, torch.arange(5).expand(2, -1), attend, states=tree)
        tree.accept(torch.tensor([[0, 2, -1], [0, 1, 4]]))
    assert waits.found == []


def test_what_a_commit_reads_are_copies() -> None:
    """torch.compile reuses the memory of a pass's tensors, those that it was given by us included."""
    target = HFModel(model("qwen3.5"))
    states = RecurrentStates(target.states, 1, target.device, target.dtype)
    for state in states.buffers:
        state.normal_()
    proposed, (heads, values, keys) = ProposedPass(states), target.states.recurrences[0]
    channels, columns = target.states.convolutions[0]
    new = torch.randn(1, channels, 3)
    expected = torch.cat([states.convolutions[0], new], 2)[:, :, 2 : 2 + columns]
    rows = [torch.randn(1, 3, heads, size) for size in (keys, keys, values)]
    decay, beta = -torch.rand(1, 3, heads, 1), torch.rand(1, 3, heads)
    two = torch.tensor([2])
    after = states.recurrences[0].clone()
    linear_recurrence(after, *rows, decay, None, beta, two, None)
    inputs, out = proposed.convolve(0, new, columns), proposed.recur(0, ScanInputs(*rows, decay, None, beta))
    for tensor in (new, inputs, out, *rows, decay, beta):
        tensor.fill_(torch.nan)
    proposed.commit(two)
    assert torch.equal(states.convolutions[0], expected)
    assert torch.equal(states.recurrences[0], after)


@pytest.mark.parametrize("levels", [1, 2])
def test_check_starts_every_draw_from_the_same_states(levels: int) -> None:
    engine = triforce_tree.load(model("granite-4"), tiny("llama"), tree="chain:2", advanced={"rounds": 1})
    [result] = check.sampling_checks(engine, PROMPTS[:1], 40, levels)
    assert result.passed


@pytest.mark.parametrize("family", ONE_PER_KIND)
def test_the_memory_plan_counts_the_states(family: str) -> None:
    target, batch = HFModel(model(family)), 3
    buffers = RecurrentStates(target.states, batch, target.device, target.dtype).buffers
    sizes = Sizes.of(target, None, HierarchyConfig())
    assert sizes.layers == len(target.kv_shapes) < target.layers
    assert batch * sizes.states == sum(t.numel() * t.element_size() for t in buffers)
    machine, workload = Machine(1 << 40, 1 << 40, 1e9, 1e12), Workload(batch, 100, 10)
    plan = on_device(sizes, machine, HierarchyConfig(levels=2), workload)
    assert plan.device["recurrent states"] == batch * sizes.states


@pytest.mark.gpu
@pytest.mark.parametrize("family", RECURRENT)
def test_captured_passes_on_a_gpu(family: str) -> None:
    """Greedy text in fp32, by CUDA graphs and compiled layers, with ragged numbers of accepted tokens."""
    target = recurrent(family).cuda()
    texts = [greedy(target, prompt, NEW) for prompt in PROMPTS]
    assert decoded(program(target, 1, batch=3), PROMPTS, [NEW] * 3)[0] == texts
    known = [p + e for p, e in zip(PROMPTS, texts, strict=True)]
    wrong = [mistakes(p, every) for p, every in zip(PROMPTS, (3, 4, 5), strict=True)]
    new, loop = decoded(program(target, 2, Foreknowledge(known, wrong, 4), 3), PROMPTS, [NEW] * 3)
    assert new == texts
    assert loop.levels[-1].accepted > NEW
    engine = triforce_tree.load(target, tiny("llama").cuda(), tree="chain:3", advanced={"rounds": 1})
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPTS[0]) :].tolist() == texts[0]
