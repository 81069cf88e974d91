"""Logits for given tokens are those that the stages compute while decoding."""

import pytest
import torch

from scripts.train_pair.given import forced_tokens
from tests.support.models.families import prompt_of
from tests.support.models.program_cases import GREEDY, SMALL, draft_of, model, program_of
from triforce_tree.check.ties import target_logits
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

pytestmark = [pytest.mark.usefixtures("poisoned_empty"), pytest.mark.filterwarnings("error")]
PROMPT = prompt_of(90)


class Nothing(Drafter):
    """A drafter that proposes no token, so that each forward of level 1 appends one."""

    name = "nothing"
    tree = "chain:1"
    deterministic = capturable = True

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens[:, 0] = state.newest
        tree.tokens[:, 1] = -1


def one_by_one(refresh: int) -> DecodingProgram:
    config = HierarchyConfig.from_options(**{**SMALL, "tree": "chain:1", "gamma": 6, "refresh": refresh})
    return DecodingProgram(HFModel(model("llama-gqa")), Nothing(), config, 1, 150, 3)


def draft_chain(program: DecodingProgram, rounds: int) -> tuple[list[int], torch.Tensor]:
    """The chain that level 1 accepts in so many rounds, and its logits of each token."""
    generator, logits = torch.Generator(), []
    for number in range(rounds):
        name = "retrieval_refresh" if program.config.retrieval.chooses(number) else "retrieval"
        for stage in ("draft", name):
            program.run(stage, generator)
        acceptance = program.stage(name).verifier.acceptance
        logits += [acceptance.scores[0, node] for node in acceptance.path[0].tolist() if node >= 0]
    root = int(program.state.length)
    return program.state.tokens[0, root : int(program.state.end) + 1].tolist(), torch.stack(logits)


@pytest.mark.parametrize("refresh", [0, 1, 2])
def test_level_1_retrieves_and_sees_what_it_does_while_decoding(refresh: int) -> None:
    program = one_by_one(refresh)
    program.prepare(GREEDY)
    program.prefill([PROMPT])
    chain, expected = draft_chain(program, 6)
    assert len(chain) == 7
    program.rewind([PROMPT])
    forced_tokens.offer(program, PROMPT, chain[1:6])
    ours = forced_tokens.retrieval_logits(program, chain[:6], 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    if refresh == 1:
        # Refreshing matters: chunks retrieved for the first root alone give other logits.
        once = one_by_one(0)
        once.prepare(GREEDY)
        once.prefill([PROMPT])
        assert not torch.allclose(forced_tokens.retrieval_logits(once, chain[:6], 1), expected, atol=1e-3)


def test_forwards_of_several_tokens_are_those_of_trees() -> None:
    target = model("llama-gqa")
    program = program_of(target, target, 3, gamma=9, refresh=0, window=200, budget=40)
    program.prepare(GREEDY)
    program.prefill([PROMPT])
    chain, expected = draft_chain(program, 4)
    assert len(chain) > 6
    for step in (1, 3, 9):
        program.rewind([PROMPT])
        ours = forced_tokens.retrieval_logits(program, chain[:-1], step)
        torch.testing.assert_close(ours, expected[: len(chain) - 1], atol=2e-5, rtol=1e-4)


def test_committed_tokens_are_those_of_a_longer_prompt() -> None:
    more = prompt_of(13)
    programs = [
        program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, gamma=9, window=200) for _ in range(2)
    ]
    for program, prompt in zip(programs, (PROMPT, [*PROMPT, *more[:10]]), strict=True):
        program.prepare(GREEDY)
        program.prefill([prompt])
    forced, fresh = programs
    sequence = list(PROMPT)
    for part in (more[:6], more[6:10]):
        forced_tokens.offer(forced, sequence, part)
        forced_tokens.draft_probs(forced, len(part), torch.Generator())
        forced_tokens.retrieval_logits(forced, [sequence[-1], *part], 3)
        target_logits(forced, [sequence[-1], *part][: len(part)])
        forced_tokens.commit(forced, part)
        sequence += part
    for program in programs:
        forced_tokens.offer(program, sequence, more[10:])
    generator = torch.Generator()
    for level in (
        lambda program: forced_tokens.draft_probs(program, 2, generator),
        lambda program: forced_tokens.retrieval_logits(program, [sequence[-1], *more[10:]], 3),
        lambda program: target_logits(program, [sequence[-1], *more[10:]]),
    ):
        torch.testing.assert_close(level(forced), level(fresh), atol=2e-5, rtol=1e-3)


@torch.no_grad()
def test_a_window_of_the_whole_sequence_gives_the_drafts_own_probs() -> None:
    draft, coming = draft_of("llama-gqa"), prompt_of(4)
    program = program_of(model("llama-gqa"), draft, 3, window=200)
    program.prepare(GREEDY)
    program.prefill([PROMPT])
    forced_tokens.offer(program, PROMPT, coming)
    found = forced_tokens.draft_probs(program, 5, torch.Generator())
    expected = draft(torch.tensor([[*PROMPT, *coming]])).logits[0, -5:].softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
    assert int(program.state.chain) == 0


@torch.no_grad()
def test_the_drafter_sees_the_last_committed_token_in_every_block() -> None:
    """A block commits one token more than it offers, as a verification does."""
    draft, coming = draft_of("llama-gqa"), prompt_of(12)
    program = program_of(model("llama-gqa"), draft, 3, window=200)
    program.prepare(GREEDY)
    program.prefill([PROMPT])
    expected = draft(torch.tensor([[*PROMPT, *coming]])).logits[0, len(PROMPT) - 1 :].softmax(-1)
    sequence = list(PROMPT)
    for first in (0, 4, 8):
        forced_tokens.offer(program, sequence, coming[first : first + 3])
        found = forced_tokens.draft_probs(program, 4, torch.Generator())
        torch.testing.assert_close(found, expected[first : first + 4], atol=1e-5, rtol=1e-3)
        forced_tokens.commit(program, coming[first : first + 4])
        sequence += coming[first : first + 4]


def test_a_deterministic_drafter_has_no_probs() -> None:
    program = one_by_one(1)
    program.prepare(GREEDY)
    program.prefill([PROMPT])
    assert forced_tokens.draft_probs(program, 3, torch.Generator()) is None
