"""Sampling options for leaves of a tree, prepared by transformers as for each of their texts alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.generation.checkpoint_settings import without_settings
from triforce_tree.generation.options import ending_of
from triforce_tree.generation.request import Job, Request
from triforce_tree.verify.sampling import ProbsFromLogits, Stream, derived

if TYPE_CHECKING:
    from triforce_tree.engine import Engine


@dataclass(frozen=True)
class LeafOptions:
    """Of a text of one length.

    Attributes:
        to_probs: logits to distributions.
        job: all that transformers prepared.
        criteria: its stopping criteria.
    """

    to_probs: ProbsFromLogits
    job: Job
    criteria: StoppingCriteriaList

    def ending(self, device: torch.device) -> Ending:
        """When a leaf ends; each needs its own, which follows its text."""
        return ending_of(self.job.config, self.criteria, self.job.input_ids.shape[1], device)


def leaf_options(engine: "Engine", length: int, options: dict[str, Any]) -> LeafOptions:
    """What transformers' ``generate`` makes of options for a text of ``length`` tokens.

    Processors and criteria depend on the length of a text, not on its tokens, when they are made.

    Raises:
        ValueError: an option that is not supported, as of :meth:`Engine.generate`.
    """
    target, own = engine.hierarchy.target, dict(options)
    config, processors, criteria, strings = (
        own.pop(name, None)
        for name in ("generation_config", "logits_processor", "stopping_criteria", "stop_strings")
    )
    request = Request.read(
        target, engine.tokenizer, [0] * length, None, None, config, processors, criteria, strings, own
    )
    found: list[LeafOptions] = []

    def prepared(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_inputs: Any,
    ) -> Tensor:
        job = Job.read(
            target, input_ids, logits_processor, stopping_criteria, generation_config, model_inputs
        )
        found.append(LeafOptions(job.to_probs, job, stopping_criteria))
        return input_ids

    without_settings(target.model).generate(
        request.prompts.ids.to(target.device), attention_mask=request.prompts.mask.to(target.device),
        generation_config=request.config, logits_processor=request.processors,
        stopping_criteria=request.criteria, custom_generate=prepared, **request.options,
    )  # fmt: skip
    [made] = found
    if made.job.outputs:
        raise ValueError(
            "output_scores and output_logits are not supported for leaves of a tree; read the logprobs of "
            "nodes, or use score"
        )
    return made


class Draws:
    """Random numbers of one leaf, which depend on its seed alone and not on the other leaves.

    Args:
        seed: of the call.
        number: of the leaf in it.
    """

    def __init__(self, seed: int, number: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(derived(seed, Stream.ROW, number)))

    def next(self) -> float:
        """The next one, in [0, 1)."""
        # The largest double below 1 times a sum may round to the sum.
        return min(self._generator.random(), 1 - 2.0**-40)


def drawn(scores: Tensor, draws: Sequence[Draws] | None) -> list[int]:
    """One token for each row of processed logits, fp32 ``[N, V]``: the most probable without ``draws``."""
    if draws is None:
        best: list[int] = scores.argmax(-1).tolist()
        return best
    # The inverse of the cumulated probabilities, summed in fp64: a token of probability 0 is never drawn.
    cumulated = scores.softmax(-1).double().cumsum(-1)
    numbers = torch.tensor([[own.next()] for own in draws], dtype=torch.float64, device=scores.device)
    tokens: list[int] = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)[:, 0].tolist()
    return tokens
