"""Draft models that predict several tokens at once from mask tokens (PARD, arXiv 2504.18583)."""

from typing import Any

from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.models.hf_model import HFModel


def mask_token(draft: HFModel, tokens: TokenMap | None) -> int | None:
    """Returns the id of a draft model's mask token (``pard_token`` in its configuration), as the target names
    it; None for an ordinary draft model.

    Args:
        tokens: maps the target's token ids to the draft's; None if these are equal.

    Raises:
        ValueError: the draft model cannot draft with its mask token.
    """
    config: Any = draft.model.config
    mask = getattr(config, "pard_token", None)
    if getattr(config, "spd_type", "pard") == "pard2" or getattr(config, "pard2", False):
        raise ValueError(
            f"the draft {draft.name} is a PARD-2 model, which reads hidden states of its target; this is not "
            "supported, give a PARD model"
        )
    if mask is None:
        return None
    if not isinstance(mask, int) or not 0 <= mask < draft.vocab_size:
        raise ValueError(
            f"pard_token={mask!r} of the draft {draft.name} must be one of its {draft.vocab_size} tokens; "
            "download its config.json again"
        )
    if draft.states is not None:
        raise ValueError(f"the draft {draft.name} has a pard_token and recurrent layers; not supported")
    if tokens is None:
        return mask
    ids = (tokens.inputs == mask).nonzero()
    if not len(ids):
        raise ValueError(
            f"pard_token={mask} of the draft {draft.name} stands for no token of the target; give a draft of "
            "the target's tokenizer"
        )
    return int(ids[0])
