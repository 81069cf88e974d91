"""Warnings about the cost of logits processors and stopping criteria."""

import logging
from collections.abc import Iterable

import torch
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


class CostNotices:
    """Logs warnings about the cost of logits processors and stopping criteria, each warning once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(
        self,
        processors: Iterable[LogitsProcessor],
        config: GenerationConfig,
        batch: int,
        device: torch.device,
    ) -> None:
        """Log the warning of :func:`cost_of_processors` for this device, unless it was logged before."""
        self._say(cost_of_processors(processors, config, batch, on_gpu=device.type == "cuda"))

    def tell_in_step(self, why: str) -> None:
        """Log that nothing is drafted and why, unless this was logged before."""
        self._say(
            f"nothing is drafted, so that logits processors and stopping criteria are called as by "
            f"model.generate: {why}"
        )

    def _say(self, said: str | None) -> None:
        if said is not None and said not in self._told and is_first_rank():
            self._told.add(said)
            _LOG.warning("%s", said)
