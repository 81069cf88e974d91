"""Which adapters of peft can be decoded here. Importing this module imports neither torch nor peft."""

from collections.abc import Mapping
from typing import Any

_OWN_GENERATE = "use the model's own generate()"
# Methods whose layers compute something else for a token when other tokens are in the forward.
_OF_WHOLE_PROMPTS = {
    "LILY": "which weighs its experts by all tokens of a forward",
    "POLY": "whose layers ask for the number of a task with each prompt",
    "SHADOW": "which runs a second network beside the layers",
    "XLORA": "which weighs its adapters by the hidden states of all tokens of a forward",
}


def undecodable(config: Mapping[str, Any]) -> str | None:
    """Returns why an adapter of peft cannot be decoded, as the end of a sentence; None if it can be.

    An adapter can be decoded if the layers compute each token from the hidden states of this token and from
    keys and values of tokens of the text.

    Args:
        config: the fields of its configuration.
    """
    kind = config.get("peft_type")
    kind = str(getattr(kind, "value", kind))
    if "num_virtual_tokens" in config:
        return f"is of the method {kind}, which adds to the prompt; {_OWN_GENERATE}"
    if kind in _OF_WHOLE_PROMPTS:
        return f"is of the method {kind}, {_OF_WHOLE_PROMPTS[kind]}; {_OWN_GENERATE}"
    if config.get("alora_invocation_tokens"):
        return (
            "is active only after certain tokens of the prompt (alora_invocation_tokens), which is not "
            f"supported; {_OWN_GENERATE}"
        )
    return None
