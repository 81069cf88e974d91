"""Rotary frequencies that depend on the length: one set per sequence, the same as transformers chooses."""

import copy
import inspect
from functools import wraps

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import triforce_tree
from tests.support.models.families import (
    FAMILIES_BY_LENGTH,
    SMALL_SETTINGS,
    greedy,
    perturbed,
    prompt_of,
    tiny,
    without_tree,
)
from tests.support.models.program_cases import decoded, program_of
from triforce_tree.config import load_arguments
from triforce_tree.decoding import hierarchy
from triforce_tree.loading import load_guard
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.models.model_copy import shallow_copy

ORIGINAL = 64
NEW = 14
LONGROPE = [family for family in FAMILIES_BY_LENGTH if family != "llama-dynamic"]
PATHS = {
    "autoregressive": {"levels": 1},
    "draft": {"levels": 2},
    "hierarchy": {"levels": 3},
    "hierarchy with runner-ups": {"levels": 3, "runner_ups": True},
    "offloaded": {"levels": 3, "offload": True, "runner_ups": True},
    "streamed weights": {"levels": 2, "offload_weights": True},
}
CASES = [("phi3-longrope", path) for path in PATHS]
CASES += [(family, path) for family in [*LONGROPE[1:], "llama-dynamic"] for path in ("hierarchy", "draft")]


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[PreTrainedModel, PreTrainedModel]]:
    targets = {family: tiny(family) for family in FAMILIES_BY_LENGTH}
    return {family: (target, perturbed(target, 0.05)) for family, target in targets.items()}


def generated(target: PreTrainedModel, draft: PreTrainedModel | None, prompt: list[int], new: int, **options):
    settings = SMALL_SETTINGS if draft else without_tree(SMALL_SETTINGS)
    engine = triforce_tree.load(target, draft, **load_arguments({**settings, **options}))
    out = engine.generate(prompt, max_new_tokens=new, do_sample=False)
    engine.close()
    return out.sequences[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family, path", CASES)
def test_short_and_long_sequences_equal_the_targets_own(family: str, path: str, models) -> None:
    target, draft = models[family]
    if path == "streamed weights":
        target, draft = copy.deepcopy(target), copy.deepcopy(draft)
    # Beyond the original length in several chunks, one token beyond it, and the longest that stays below.
    lengths = (150, ORIGINAL + 1, ORIGINAL - NEW + 1) if family == "phi3-longrope" else (150, 51)
    for length in lengths:
        prompt = prompt_of(length)
        assert generated(target, draft, prompt, NEW, **PATHS[path]) == greedy(models[family][0], prompt, NEW)
        if path == "streamed weights":
            target, draft = copy.deepcopy(models[family][0]), copy.deepcopy(models[family][1])


def test_without_one_choice_the_output_differs(models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LengthRope, "of", classmethod(lambda cls, model: None))
    monkeypatch.setattr(hierarchy, "compare_at_load", lambda target: load_guard.GuardReport(()))
    for family in LONGROPE:
        target, _ = models[family]
        assert generated(target, None, prompt_of(150), NEW) != greedy(target, prompt_of(150), NEW), family


@pytest.mark.parametrize("prompt, new, most_new", [(ORIGINAL, 2, 1), (40, 26, 25), (1, 100, 64)])
def test_a_sequence_that_would_cross_the_original_length_is_refused(models, prompt, new, most_new) -> None:
    target, draft = models["phi3-longrope"]
    engine = triforce_tree.load(target, draft, **load_arguments(SMALL_SETTINGS))
    message = (
        rf"{prompt} prompt tokens \+ {new} new ones exceed {ORIGINAL}.*Phi3ForCausalLM.*longrope.*"
        rf"max_new_tokens<={most_new}, or give a prompt of more than {ORIGINAL} tokens"
    )
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt_of(prompt), max_new_tokens=new)
    expected = greedy(target, prompt_of(prompt), most_new)
    assert generated(target, draft, prompt_of(prompt), most_new) == expected


def test_a_batch_that_needs_both_sets_is_generated_one_by_one(models) -> None:
    target, draft = models["phi3-longrope"]
    prompts = [prompt_of(90), prompt_of(45)]
    expected = [greedy(target, prompt, NEW) for prompt in prompts]
    engine = triforce_tree.load(target, draft, **load_arguments({**SMALL_SETTINGS, "levels": 2}))
    ids = torch.zeros(2, 90, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, 90 - len(prompt) :], mask[i, 90 - len(prompt) :] = torch.tensor(prompt), 1
    out = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert [sequence[90:].tolist() for sequence in out.sequences] == expected
    with pytest.raises(ValueError, match=r"90 tokens lie on both sides of 64.*one by one"):
        program_of(target, draft, 2, 2).prefill(prompts)


def test_one_program_decodes_long_and_short_sequences_in_turn(models) -> None:
    target, draft = models["phi4-mini"]
    program = program_of(target, draft, 3)
    for length in (90, 45, 100):
        assert decoded(program, [prompt_of(length)], [NEW])[0] == [greedy(target, prompt_of(length), NEW)]


def test_the_target_may_be_its_own_draft(models) -> None:
    target, _ = models["phi3-longrope"]
    for window in (6, 100):  # the draft's positions need the short set, and the long one
        for prompt in (prompt_of(50), prompt_of(150)):
            assert generated(target, target, prompt, NEW, window=window) == greedy(target, prompt, NEW)


def test_the_models_rotary_module_is_unchanged(models) -> None:
    target, draft = models["phi3-longrope"]
    generated(target, draft, prompt_of(150), NEW)
    rotary = target.model.rotary_emb
    assert not rotary._forward_hooks
    assert not rotary._forward_pre_hooks
    positions = torch.arange(3)[None]
    assert rotary(torch.zeros(1), positions)[0].shape[1] == 3


def test_drafts_of_either_kind_are_accepted(models) -> None:
    for family in ("phi3-longrope", "llama-dynamic"):
        target, draft = models[family]
        engine = triforce_tree.load(
            target, draft, **load_arguments({**SMALL_SETTINGS, "levels": 2, "window": 60, "rounds": 1})
        )
        out = engine.generate(prompt_of(150), max_new_tokens=40, do_sample=False)
        assert out.levels[1].accepted > 3, family


def test_rotary_modules_that_wait_for_the_host_are_found(models) -> None:
    waits = {family: HFModel(target).length_rope.waits_for_host for family, (target, _) in models.items()}
    assert [family for family in waits if waits[family]] == ["phimoe"]
    assert HFModel(tiny("llama")).length_rope is None


def choose_on_the_host(target: PreTrainedModel, patch: pytest.MonkeyPatch, scaling: float = 1.0) -> None:
    """Makes longrope choose on the host as in transformers 5.17; scale the long tables by ``scaling``."""
    rotary = target.model.rotary_emb
    plain = inspect.unwrap(type(rotary).forward)
    inverse, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, "cpu", seq_len=ORIGINAL + 1)

    @wraps(plain)
    def forward(self, x, position_ids):
        long = bool(position_ids.max() + 1 > ORIGINAL)
        self.inv_freq = (inverse if long else self.original_inv_freq).clone()
        return tuple(table * (scaling if long else 1.0) for table in plain(self, x, position_ids))

    patch.setattr(type(rotary), "forward", forward)


def test_a_choice_on_the_host_is_replaced_by_buffers(models, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = models["phi3-longrope"]
    choose_on_the_host(target, monkeypatch)
    rope = LengthRope.of(target)
    assert not rope.waits_for_host
    attached = shallow_copy(target)
    rope.attach(attached)
    rotary, original = attached.model.rotary_emb, copy.deepcopy(target.model.rotary_emb)
    hidden, address = torch.zeros(1), rotary.inv_freq.data_ptr()
    for long in (True, False, True):
        rope.choose(long)
        start = ORIGINAL if long else 0
        positions = torch.arange(start, start + 3)[None]
        for ours, theirs in zip(rotary(hidden, positions), original(hidden, positions), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert rotary.inv_freq.data_ptr() == address
    for length in (150, 51):
        tokens = generated(target, draft, prompt_of(length), NEW, **PATHS["hierarchy"])
        assert tokens == greedy(target, prompt_of(length), NEW)


def test_a_choice_that_buffers_cannot_replace_stays_on_the_host(
    models, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models["phi3-longrope"]
    choose_on_the_host(target, monkeypatch, scaling=1.2)
    assert LengthRope.of(target).waits_for_host
    for length in (150, 51):
        tokens = generated(target, draft, prompt_of(length), NEW)
        assert tokens == greedy(target, prompt_of(length), NEW)
