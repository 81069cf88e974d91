"""Through transformers' own ``generate``: the same tokens, and by name what cannot be carried out."""

import pytest
import torch

import triforce_tree
from tests.support.models.api_cases import (
    EXPECTED,
    PROMPT,
    SMALL,
    SMALL_LOOKUP,
    TARGET,
    Collect,
    characters,
    text_of,
)
from tests.support.models.families import greedy, perturbed
from triforce_tree.config import load_arguments


def through_transformers(draft=None, hook: dict | None = None, **kwargs):
    run = triforce_tree.custom_generate(
        draft or perturbed(TARGET, 0.1), levels=3, **load_arguments({**SMALL, **(hook or {})})
    )
    return TARGET.generate(torch.tensor([PROMPT]), custom_generate=run, **kwargs)


def test_custom_generate_gives_the_same_tokens() -> None:
    out = through_transformers(do_sample=False, max_new_tokens=20)
    assert out[0].tolist() == [*PROMPT, *EXPECTED[:20]]
    rich = through_transformers(do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
    assert rich.sequences.tolist() == out.tolist()
    assert rich.levels[-1].emitted == 20
    assert TARGET.config._attn_implementation == "sdpa"


def test_custom_generate_carries_what_transformers_drops() -> None:
    streamer, wanted = Collect(), text_of(EXPECTED[5:6])
    out = through_transformers(
        hook={"streamer": streamer, "tokenizer": characters(), "stop_strings": wanted},
        do_sample=False,
        max_new_tokens=20,
    )
    cut = EXPECTED[: EXPECTED.index(EXPECTED[5]) + 1]
    assert out[0, len(PROMPT) :].tolist() == cut
    assert [t for part in streamer.parts[1:] for t in part] == cut


def test_custom_generate_honours_seeds_and_options() -> None:
    sample = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 15}
    a, b, c = (through_transformers(hook={"seed": seed}, **sample)[0].tolist() for seed in (1, 1, 2))
    assert a == b != c
    penalised = through_transformers(do_sample=False, max_new_tokens=15, repetition_penalty=1.7)
    assert penalised[0, len(PROMPT) :].tolist() == greedy(TARGET, PROMPT, 15, repetition_penalty=1.7)


def test_custom_generate_needs_a_tokenizer_for_stop_strings() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        through_transformers(hook={"stop_strings": "x"}, max_new_tokens=3)


def test_custom_generate_leaves_padding_out() -> None:
    padded = torch.tensor([[0, 0, 0, *PROMPT]])
    mask = torch.tensor([[0, 0, 0, *[1] * len(PROMPT)]])
    run = triforce_tree.custom_generate(levels=3, **load_arguments(SMALL_LOOKUP))
    out = TARGET.generate(
        padded, attention_mask=mask, custom_generate=run, do_sample=False, max_new_tokens=15
    )
    assert out[0].tolist() == [*padded[0].tolist(), *EXPECTED[:15]]


def test_inputs_beside_token_ids_are_refused_by_name() -> None:
    run = triforce_tree.custom_generate(levels=2, **load_arguments(SMALL_LOOKUP))
    with pytest.raises(ValueError, match="inputs_embeds"):
        TARGET.generate(inputs_embeds=torch.randn(1, 5, 32), custom_generate=run, max_new_tokens=3)
