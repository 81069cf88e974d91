"""A draft's window after tokens that were committed without a tree, beside a plain forward of the draft."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models.families import prompt_of
from tests.support.models.program_cases import SAMPLED, program_of
from triforce_tree.decoding.program import DecodingProgram

# Tokens of each sequence before and after: few new ones; none; of one that has ended; of one that is shorter
# than what a tree processes again, and of one that stays so; new tokens for one forward of the whole batch,
# for two, and for one forward of the sequence; a window that is recomputed because it has no slots left.
LENGTHS = [(43, 46), (61, 61), (90, None), (3, 12), (3, 4), (70, 86), (30, 55), (20, 60), (60, 140)]
SINKS, WINDOW, REFEED = 2, 30, 5
TEXT = prompt_of(140)


def begun(target: PreTrainedModel, draft: PreTrainedModel, before: list[int]) -> DecodingProgram:
    """Returns a program whose drafter has begun texts of these lengths."""
    program = program_of(target, draft, 2, len(before), sinks=SINKS, window=WINDOW)
    program.prepare(SAMPLED)
    assert program.drafter is not None
    program.drafter.start([TEXT[:length] for length in before])
    return program


@torch.no_grad()
def check_windows(
    target: PreTrainedModel, draft: PreTrainedModel, atol: float, keeps_all: bool = True
) -> None:
    """Checks what the draft proposes after new tokens of ``LENGTHS``, and the keys and values of its window.

    Args:
        keeps_all: whether transformers' cache of the draft keeps all positions.
    """
    program = begun(target, draft, [before for before, _ in LENGTHS])
    state, drafter = program.state, program.drafter
    texts = [None if after is None else TEXT[:after] for _, after in LENGTHS]
    for b, text in enumerate(texts):
        tokens = text or TEXT[: LENGTHS[b][0]]
        state.tokens[b, : len(tokens)] = torch.tensor(tokens)
        state.length[b] = len(tokens) - 1
    layers = [slots.kv for slots in drafter.window.store.layers.values()]
    ended = [b for b, text in enumerate(texts) if text is None]

    def held(b: int) -> list[Tensor]:
        return [part[b, :, : SINKS + WINDOW].clone() for kv in layers for part in kv]

    before = [held(b) for b in ended]
    drafter.prepare(texts, True)
    for b, parts in zip(ended, before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(held(b), parts, strict=True))
    windows = [[part.clone() for part in kv] for kv in layers]
    program.run("draft", torch.Generator(program.device).manual_seed(0))
    probs, kinds = program.stage("draft").tree.probs, set()
    for b, text in enumerate(texts):
        if text is None:
            continue
        dropped = int(drafter.window.dropped[b])
        kinds.add((dropped > 0) - (dropped < 0))
        visible = [*text[:SINKS], *text[SINKS + dropped :]] if dropped > 0 else [text[0]] * -dropped + text
        out = draft(torch.tensor([visible], device=program.device), use_cache=True)
        expected = (out.logits[0, -1].float() / 0.8).softmax(-1)
        torch.testing.assert_close(probs[b, 0], expected, atol=atol, rtol=1e-4)
        # Trees write the newest tokens themselves.
        count = len(visible) - REFEED if dropped >= 0 else 0
        for layer, window in enumerate(windows if keeps_all else ()):
            cached = out.past_key_values.layers[layer]
            for own, other in zip(window, (cached.keys, cached.values), strict=True):
                torch.testing.assert_close(own[b, :, :count], other[0, :, :count], atol=atol, rtol=1e-4)
    assert kinds == {-1, 0, 1}
