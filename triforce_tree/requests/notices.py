"""Warnings about settings that make a generation slower."""

import logging
from collections.abc import Iterable

from transformers import GenerationConfig, LogitsProcessor

from triforce_tree.runtime.distributed import is_first_rank

_LOG = logging.getLogger(__name__)

# Options of GenerationConfig by the classes that carry them out; all of these read the tokens so far.
_OPTIONS = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "TopHLogitsWarper": "top_h",
    "WatermarkLogitsProcessor": "watermarking_config",
}


def cost_of_processors(
    processors: Iterable[LogitsProcessor], config: GenerationConfig, batch: int, on_gpu: bool
) -> str | None:
    """Returns a sentence that says which settings make a generation slower and why, or None if none do.

    Args:
        processors: logits processors that read the previous tokens.
        config: the options of the generation, whose values the sentence names.
        batch: number of sequences.
        on_gpu: whether stages would otherwise be CUDA graphs.
    """
    settings = []
    for processor in processors:
        kind = type(processor).__name__
        name = _OPTIONS.get(kind, kind)
        value = getattr(config, name, None)
        settings.append(name if value is None else f"{name}={value!r}"[:80])
    effects = []
    if on_gpu:
        effects.append(
            "drafting and acceptance are direct calls that wait for the GPU, instead of CUDA graphs"
        )
    if batch > 1:
        effects.append(f"the {batch} sequences of the batch are decoded one by one")
    if not settings or not effects:
        return None
    reads = "reads" if len(settings) == 1 else "read"
    return f"{', '.join(settings)} {reads} the tokens so far: {' and '.join(effects)}; the text is the same"


class Notices:
    """Logs warnings, each of them once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, sentence: str | None) -> None:
        """Logs a warning, unless it is None or was logged before."""
        if sentence is not None and sentence not in self._logged and is_first_rank():
            self._logged.add(sentence)
            _LOG.warning("%s", sentence)
