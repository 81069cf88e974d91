"""Where each setting of an explanation comes from."""

from collections.abc import Collection

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.planning.device_defaults import gains_from_few_bits, retrieval_step

NAMES = ("levels", "gamma", "tree", "budget", "chunk", "recent", "retrieval_weight_bits", "kv_bits")
"""Settings that an explanation gives reasons for."""


def reasons(
    program: DecodingProgram,
    asked: HierarchyConfig,
    given: Collection[str],
    prompt_tokens: int,
) -> dict[str, str]:
    """Why each setting of :data:`NAMES` has its value, in a few words.

    Args:
        program: made with the settings.
        asked, given: the engine's own settings, and the names of those that a user gave.
    """
    wanted, final, target = asked.as_options(), program.config.as_options(), program.target
    planned = program.offloaded is not None or target.streamed is not None
    device = "GPU" if program.device.type == "cuda" else "CPU"
    found = {}
    for name in NAMES:
        if name in given and wanted[name] == final[name]:
            why = "given"
        elif name == "levels":
            why = f"up to {program.levels} of them, chosen pass by pass by measured times and acceptance"
        elif name == "retrieval_weight_bits" and not planned:
            why = _bits(program)
        elif planned:
            why = "chosen by the memory plan"
        elif name in ("budget", "chunk") and device == "GPU":
            least, *_ = retrieval_step(prompt_tokens, target.heads.group)
            why = f"default on a GPU for prompts of {least:,} tokens and more"
        elif name in ("budget", "chunk"):
            why = f"expected to be the fastest on a CPU for prompts of {prompt_tokens:,} tokens"
        else:
            why = f"default on a {device}"
        found[name] = why
    return found


def _bits(program: DecodingProgram) -> str:
    """Of level 1's weights, where nothing but the machine decides."""
    if program.levels < 3:
        return "without a retrieval level nothing is read with them"
    if program.config.retrieval_weight_bits == 8:
        return "8 bits are read faster, and there is memory for the copy"
    if not gains_from_few_bits(program.target):
        return "fewer bits would not make this model's layers faster"
    return "a copy in 8 bits would leave too little memory"
