"""Expected acceptance of heads and of the embedded draft on held-out text, and tokens a pass of an engine."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

import triforce_tree
from scripts.train_pair.distill import SINKS as DRAFT_SINKS
from scripts.train_pair.heads.networks import EagleHead, MedusaHeads
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import PAIR
from triforce_tree.models.hidden_states import hidden_states

# Tokens of context of the draft that are not its own window's newest.
_DRAFT_WINDOW = 384


def states(target: PreTrainedModel, tokens: Tensor, features: tuple[int, ...]) -> dict[int, Tensor]:
    """Hidden states ``[B, L, H]`` of int64 ``[B, L]``: those of ``features``, and after the final norm."""
    last = target.config.num_hidden_layers
    with hidden_states(target, target.model.layers, (*features, last)) as hidden:
        target.model(tokens, use_cache=False)
    return dict(hidden)


def overlap(target: PreTrainedModel, final: Tensor, made: Tensor) -> Tensor:
    """``[N]`` sums of min(p, q): of the target's final states and of a head's ``[N, H]``."""
    head = target.lm_head.weight
    p, q = (F.linear(x.to(head.dtype), head).float().softmax(-1) for x in (final, made))
    return torch.minimum(p, q).sum(-1)


@torch.no_grad()
def by_depth(
    heads: MedusaHeads | EagleHead,
    target: PreTrainedModel,
    text: Tensor,
    context: int,
    windows: int,
    new: int,
    sinks: int,
    window: int,
) -> list[float]:
    """Mean sum of min(p, q) of each depth, given that the text itself was proposed up to there.

    Args:
        text: int64 ``[L]``, read as a ring.
        context: tokens before the first position.
        windows, new: of the text, at even distances, and positions of each.
        sinks, window: of the drafter's cache; a context must fill it.
    """
    sums = torch.zeros(heads.depths)
    for number in range(windows):
        start = number * len(text) // windows
        tokens = text[(start + torch.arange(context + new + heads.depths)) % len(text)][None].to(
            target.device
        )
        found = states(target, tokens, heads.features)
        final = found[target.config.num_hidden_layers][0]
        first = context - window - 1
        part = [*range(sinks), *range(max(sinks, first), context + new)]
        hidden = [found[layer][:, part].float() for layer in heads.features]
        rows = slice(len(part) - new, len(part))
        # Position i predicts token i + d + 2, which the target predicts from position i + d + 1.
        made = heads(tokens[:, part], hidden, window, rows)
        for depth, x in enumerate(made[: heads.depths]):
            # The last positions lack tokens of deeper pairs.
            count = new - heads.depths
            right = final[context + depth + 1 : context + depth + 1 + count]
            sums[depth] += overlap(target, right, x[0, :count]).mean().cpu()
    return [round(float(x) / windows, 4) for x in sums]


@torch.no_grad()
def draft_overlap(target: PreTrainedModel, text: Tensor, context: int, windows: int, new: int) -> float:
    """The same of the embedded draft on sinks and a window; for it every depth is alike."""
    draft = LlamaForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32).to(target.device).eval()
    total = 0.0
    for number in range(windows):
        start = number * len(text) // windows
        tokens = text[(start + torch.arange(context + new)) % len(text)][None].to(target.device)
        p = target(tokens, logits_to_keep=new, use_cache=False).logits[0].float().softmax(-1)
        seen = torch.cat([tokens[:, :DRAFT_SINKS], tokens[:, max(DRAFT_SINKS, context - _DRAFT_WINDOW) :]], 1)
        q = draft(seen, logits_to_keep=new, use_cache=False).logits[0].float().softmax(-1)
        total += float(torch.minimum(p, q).sum(-1).mean())
    return round(total / windows, 4)


def engine_figures(folder: Path, text: list[int], context: int, new: int, device: str) -> dict[str, Any]:
    """Mean tokens of a target pass with the saved heads and with the draft, and whether texts are equal."""
    found: dict[str, Any] = {}
    prompt = text[:context]
    expected = None
    for name, how in (
        ("plain", {"levels": 1}),
        ("heads", {"levels": 2, "drafter": folder, "rounds": 1}),
        ("draft", {"levels": 2, "rounds": 1}),
    ):
        engine = triforce_tree.load(device=device, dtype=torch.float32, **load_arguments(how))
        out = engine.generate(prompt, max_new_tokens=new, do_sample=False)
        tokens = out.sequences[0, context:].tolist()
        expected = expected or tokens
        found[f"{name}_tokens_per_pass"] = round(len(tokens) / max(1, out.levels[-1].forwards), 3)
        found[f"{name}_equal"] = tokens == expected
    return found
