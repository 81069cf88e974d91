"""Where each setting of an explanation comes from."""

from collections.abc import Collection

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.planning.device_defaults import gains_from_few_bits, retrieval_step
from triforce_tree.planning.profiles import Profile

NAMES = ("levels", "gamma", "tree", "budget", "chunk", "recent", "retrieval_weight_bits", "kv_bits")
"""Settings that an explanation gives reasons for."""


def reasons(
    program: DecodingProgram,
    asked: HierarchyConfig,
    given: Collection[str],
    profile: Profile | None,
    prompt_tokens: int,
    temperature: float,
) -> dict[str, str]:
    """Why each setting of :data:`NAMES` has its value, in a few words.

    Args:
        program: made with the settings.
        asked, given: the engine's own settings, and the names of those that a user gave.
        profile: the engine's.
    """
    wanted, final, target = asked.as_options(), program.config.as_options(), program.target
    planned = program.offloaded is not None or target.streamed is not None
    entry = profile.nearest(prompt_tokens, temperature) if profile is not None and not planned else None
    measured = entry.options_for(given) if entry is not None else {}
    device = "GPU" if program.device.type == "cuda" else "CPU"
    found = {}
    for name in NAMES:
        if name in given and wanted[name] == final[name]:
            why = "given"
        elif entry is not None and name in measured:
            why = f"measured by tune for {entry.context:,} tokens, temperature {entry.temperature:g}"
        elif name == "levels":
            why = f"up to {program.levels} of them, chosen pass by pass by measured times and acceptance"
        elif name == "retrieval_weight_bits" and not planned:
            why = _bits(program)
        elif planned:
            why = "chosen by the memory plan"
        elif name in ("budget", "chunk") and device == "GPU":
            least, *_ = retrieval_step(prompt_tokens, target.heads.group)
            why = f"default on a GPU for prompts of {least:,} tokens and more (docs/defaults.md)"
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
