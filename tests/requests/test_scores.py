"""``output_scores``, ``output_logits`` and ``logprobs``: the target's own at every emitted token."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import triforce_tree
from tests.support.models.api_cases import EXPECTED, PROMPT, SMALL, SMALL_LOOKUP, TARGET, small_engine
from tests.support.models.families import VOCABULARY, perturbed, prompt_of
from tests.support.models.offloaded_engine import PROMPT as LONG_PROMPT
from tests.support.models.offloaded_engine import engine as offloaded_engine
from tests.support.models.offloaded_engine import models
from tests.support.models.own_drafters import FixedSiblings
from tests.support.models.program_cases import SMALL as PASSES
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.requests.scores import EmittedScores
from triforce_tree.verify.verifier import Verifier

ASKED: dict[str, Any] = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
NEW = 20
OTHER = prompt_of(30)
PADDED = torch.tensor([PROMPT, [0] * (len(PROMPT) - len(OTHER)) + OTHER])
MASK = torch.tensor([[1] * len(PROMPT), [0] * (len(PROMPT) - len(OTHER)) + [1] * len(OTHER)])


@cache
def engine(levels: int, drafter: str) -> Engine:
    if drafter == "model":
        return triforce_tree.load(TARGET, perturbed(TARGET, 0.1), levels=levels, **load_arguments(SMALL))
    own: Any = FixedSiblings("static:0;1;0.0", VOCABULARY) if drafter == "own" else drafter
    return triforce_tree.load(TARGET, drafter=own, levels=levels, **load_arguments(SMALL_LOOKUP))


ENGINES = pytest.mark.parametrize(
    ("levels", "drafter"),
    [(1, "model"), (2, "model"), (3, "model"), (2, "lookup"), (3, "lookup"), (3, "own")],
)


def same(ours: tuple[Tensor, ...] | None, theirs: tuple[Tensor, ...]) -> None:
    assert ours is not None
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.shape == other.shape
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other, atol=2e-5, rtol=2e-5)


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "suppressed": {"suppress_tokens": EXPECTED[:3]},
    "penalties": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "ends": {"min_new_tokens": 4, "eos_token_id": EXPECTED[1:3]},
}


@cache
def greedy(name: str) -> tuple[dict[str, Any], Any]:
    """Options, and what transformers generates with them."""
    whole = torch.ones(1, len(PROMPT), dtype=torch.int64)
    own = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": whole, **GREEDY[name], **ASKED}
    return own, TARGET.generate(torch.tensor([PROMPT]), **own)


@ENGINES
@pytest.mark.parametrize("options", GREEDY)
def test_greedy_scores_are_transformers_own(levels: int, drafter: str, options: str) -> None:
    own, theirs = greedy(options)
    ours = engine(levels, drafter).generate(PROMPT, **own)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    same(ours.scores, theirs.scores)
    same(ours.logits, theirs.logits)
    if GREEDY[options]:
        assert not torch.equal(ours.scores[0], ours.logits[0])


@cache
def batch(penalty: float | None) -> tuple[dict[str, Any], Any]:
    """Options with which the first sequence ends within a block of accepted tokens; transformers' output."""
    own = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "attention_mask": MASK}
    own["repetition_penalty"] = penalty
    plain = TARGET.generate(PADDED, **own)[:, len(PROMPT) :]
    own["eos_token_id"] = next(t for t in plain[0, 3:].tolist() if t not in plain[1])
    return own, TARGET.generate(PADDED, **own, **ASKED)


@ENGINES
@pytest.mark.parametrize("penalty", [None, 1.7], ids=["together", "one by one"])
def test_a_batch(levels: int, drafter: str, penalty: float | None) -> None:
    own, theirs = batch(penalty)
    ours = engine(levels, drafter).generate(PADDED, logprobs=True, **own, **ASKED)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    last = ours.new_tokens[0]
    assert 3 < last < ours.new_tokens[1] == NEW
    for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        same(tuple(row[1:] for row in mine), tuple(row[1:] for row in other))
        same(tuple(row[:1] for row in mine[:last]), tuple(row[:1] for row in other[:last]))
        # transformers goes on to compute logits after a sequence has ended.
        assert all(not row[0].any() for row in mine[last:])
    assert ours.logprobs.shape == (2, NEW)
    assert (ours.logprobs[0, last:] == 0).all()
    assert (ours.logprobs[0, :last] < 0).all()


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3, "max_new_tokens": NEW}
WARPERS = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]


def by_forward(sequences: Tensor, new: int, processors: LogitsProcessorList) -> tuple[list[Tensor], ...]:
    """Logits and scores of the last ``new`` tokens ``[1, W + N]``, by one forward of the target."""
    with torch.no_grad():
        logits = TARGET(sequences).logits[:, -new - 1 : -1]
    at = sequences.shape[1] - new
    rows = [logits[:, n] for n in range(new)]
    return rows, [processors(sequences[:, : at + n], row.clone()) for n, row in enumerate(rows)]


@ENGINES
@pytest.mark.parametrize("penalty", [None, 1.3])
def test_sampled_scores_are_those_of_a_forward_over_the_text(
    levels: int, drafter: str, penalty: float | None
) -> None:
    processors = LogitsProcessorList(WARPERS)
    if penalty is not None:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
    # Releases of transformers differ in whether a penalty counts padding: here it is a token of the prompt.
    out = engine(levels, drafter).generate(
        [PROMPT, OTHER], repetition_penalty=penalty, pad_token_id=OTHER[0], logprobs=True, **SAMPLED, **ASKED
    )
    for b, prompt in enumerate((PROMPT, OTHER)):
        text = torch.tensor([[*prompt, *out.sequences[b, len(PROMPT) :].tolist()]])
        logits, scores = by_forward(text, NEW, processors)
        same(tuple(row[b : b + 1] for row in out.logits), tuple(logits))
        same(tuple(row[b : b + 1] for row in out.scores), tuple(scores))
        expected = torch.stack(logits, 1)[0].log_softmax(-1).gather(1, text[0, -NEW:, None])[:, 0]
        torch.testing.assert_close(out.logprobs[b], expected, atol=2e-5, rtol=2e-5)


def test_transformers_turns_scores_into_log_probabilities() -> None:
    """The log-probabilities by which tokens were drawn, where ``logprobs`` has those of the raw logits."""
    out = engine(3, "model").generate(PROMPT, logprobs=True, **{**SAMPLED, "top_k": 0, "top_p": 1.0}, **ASKED)
    drawn = TARGET.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert drawn.shape == (1, NEW)
    raw = TARGET.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    torch.testing.assert_close(raw, out.logprobs)
    assert not torch.allclose(drawn, raw)


def test_one_of_them_may_be_asked_for_in_a_configuration(caplog: pytest.LogCaptureFixture) -> None:
    out = small_engine().generate(PROMPT, generation_config={"output_logits": True, "max_new_tokens": 3})
    assert (len(out.logits), out.scores, out.logprobs) == (3, None, None)
    assert not caplog.records, "transformers' warning that they are ignored would be wrong"


@pytest.mark.parametrize("penalty", [None, 1.2], ids=["together", "one-by-one"])
def test_a_list_says_which_prompts_get_log_probabilities(penalty: float | None) -> None:
    how: dict[str, Any] = {"max_new_tokens": 3, "repetition_penalty": penalty}
    out = small_engine().generate([PROMPT, OTHER], logprobs=[False, True], **how)
    assert (out.logprobs != 0).any(1).tolist() == [False, True]
    assert small_engine().generate([PROMPT, OTHER], logprobs=[False, None], **how).logprobs is None


def test_nothing_is_read_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Verifier, count: int) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(Verifier, "emitted_logits", fail)
    out = small_engine().generate(PROMPT, max_new_tokens=5, do_sample=False)
    assert (out.logits, out.scores, out.logprobs) == (None, None, None)


def test_through_transformers_own_generate() -> None:
    run = triforce_tree.custom_generate(perturbed(TARGET, 0.1), levels=3, **load_arguments(SMALL))
    own = {"do_sample": False, "max_new_tokens": NEW, **ASKED}
    ours = TARGET.generate(torch.tensor([PROMPT]), custom_generate=run, **own)
    same(ours.scores, TARGET.generate(torch.tensor([PROMPT]), **own).scores)


@pytest.fixture(scope="module")
def of_long_prompt() -> Any:
    own = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones(1, len(LONG_PROMPT))}
    return models()[0].generate(torch.tensor([LONG_PROMPT]), **own, **ASKED)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_offloaded(levels: int, of_long_prompt: GenerateOutput) -> None:
    out = offloaded_engine(levels=levels).generate(LONG_PROMPT, do_sample=False, max_new_tokens=NEW, **ASKED)
    assert out.memory is not None
    same(out.scores, of_long_prompt.scores)
    same(out.logits, of_long_prompt.logits)


@pytest.mark.parametrize("failures", [{2}, {1, 4}])
def test_memory_that_runs_out_loses_no_score(
    monkeypatch: pytest.MonkeyPatch, of_long_prompt: GenerateOutput, failures: set[int]
) -> None:
    add, calls = EmittedScores.add, 0

    def failing(self: EmittedScores, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in failures:
            raise torch.OutOfMemoryError("no more")
        add(self, *args)

    monkeypatch.setattr(EmittedScores, "add", failing)
    out = offloaded_engine().generate(
        LONG_PROMPT, do_sample=False, max_new_tokens=NEW, logprobs=True, **ASKED
    )
    assert out.sequences.tolist() == of_long_prompt.sequences.tolist()
    same(out.scores, of_long_prompt.scores)
    assert out.logprobs.shape == (1, NEW)
    assert out.levels[-1].emitted == NEW


@pytest.mark.parametrize("count", [2, 8, 11])
def test_criteria_do_not_see_a_pass_that_is_repeated(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Memory runs out in the second pass, after its tokens were asked about."""
    seen: list[list[int]] = []

    class Stop(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            seen.append(input_ids[0].tolist())
            return torch.tensor([input_ids.shape[1] >= len(LONG_PROMPT) + count])

    add, passes = EmittedScores.add, []

    def failing(self: EmittedScores, *args: Any) -> None:
        passes.append(len(args[0][0][1]))
        if len(passes) == 2:
            raise torch.OutOfMemoryError("no more")
        add(self, *args)

    monkeypatch.setattr(EmittedScores, "add", failing)
    target = models()[0]
    # A draft that is always right: passes bring several tokens.
    own = {**PASSES, "tree": "chain:5", "window": 200, "levels": 2, "offload": True}
    out = triforce_tree.load(target, copy.deepcopy(target), **load_arguments(own)).generate(
        LONG_PROMPT, do_sample=False, max_new_tokens=NEW, logprobs=True, stopping_criteria=[Stop()]
    )
    text = out.sequences[0].tolist()
    assert (out.new_tokens, out.finish_reason) == (count, "stop")
    assert max(passes) > 1
    assert all(tokens == text[: len(tokens)] for tokens in seen)
    assert [len(tokens) - len(LONG_PROMPT) for tokens in seen] == list(range(1, count + 1))


def test_results_stay_where_the_prompt_is() -> None:
    out = small_engine().generate(torch.tensor([PROMPT]), max_new_tokens=3, logprobs=True, **ASKED)
    assert {out.scores[0].device, out.logits[0].device, out.logprobs.device} == {out.sequences.device}


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7}], ids=["captured", "direct calls"])
def test_scores_of_captured_stages(levels: int, options: dict[str, Any]) -> None:
    """They are read from the buffers of CUDA graphs, after each replay."""
    target = copy.deepcopy(TARGET).cuda()
    own = {"do_sample": False, "max_new_tokens": NEW, **options, **ASKED}
    whole = torch.ones(1, len(PROMPT), dtype=torch.int64, device="cuda")
    theirs = target.generate(torch.tensor([PROMPT], device="cuda"), attention_mask=whole, **own)
    ours = triforce_tree.load(
        target, perturbed(target, 0.1), levels=levels, **load_arguments(SMALL)
    ).generate(PROMPT, **own)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for mine, other in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        assert len(mine) == len(other) == NEW
        assert mine[0].device == ours.sequences.device
        torch.testing.assert_close(torch.cat(mine), torch.cat(other), atol=1e-3, rtol=1e-3)
