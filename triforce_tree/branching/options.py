"""Sampling options for leaves of a tree, prepared by transformers as for each of their texts alone."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.requests.checkpoint_settings import without_settings
from triforce_tree.requests.inputs import real_rows
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.requests.options import SEVERAL, ending_of
from triforce_tree.requests.request import Job, Request
from triforce_tree.runtime import distributed
from triforce_tree.runtime.devices import sent
from triforce_tree.verify.sampling import ProbsFromLogits, Stream, derived


def check_engine(engine: LoadedEngine) -> None:
    """Raise an error if the engine's settings do not allow a tree."""
    target, config = engine.target, engine.config
    if target.states is not None:
        raise UnsupportedModelError(
            f"{target.name} has recurrent layers, whose states cannot be shared by the branches of a tree"
        )
    if config.kv_bits != 16:
        raise ValueError(f"kv_bits={config.kv_bits} is not supported by a tree; leave it out")
    if config.exact:
        raise ValueError("exact=True is not supported by a tree or beams; leave it out")
    if config.offloads is True or config.streams is True:
        raise ValueError("a tree keeps its keys and values on the device; leave out offload")
    if distributed.current() is not None:
        raise ValueError("a tree runs on one rank; start it without torchrun")


@dataclass(frozen=True)
class LeafOptions:
    """The options of a leaf, for a text of one length.

    Attributes:
        to_probs: logits to distributions.
        job: all that transformers prepared.
        criteria: its stopping criteria.
    """

    to_probs: ProbsFromLogits
    job: Job
    criteria: StoppingCriteriaList

    def ending(self, device: torch.device) -> Ending:
        """Returns the end condition of a leaf. Each leaf needs its own, which follows its text."""
        return ending_of(self.job.config, self.criteria, self.job.input_ids.shape[1], device)


def leaf_options(engine: LoadedEngine, length: int, options: dict[str, Any]) -> LeafOptions:
    """Returns the options that transformers' ``generate`` prepares for a text of ``length`` tokens.

    Processors and criteria depend on the length of a text, not on its tokens, when they are made.

    Raises:
        ValueError: an option that is not supported, as of :meth:`Engine.generate`.
    """
    target, own = engine.target, dict(options)
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


_OF_THE_CALL = ("inputs", "input_ids", "attention_mask", "streamer", "pinned")
OF_ENGINE = ("seed", "logprobs", "progress", "prefix_allowed_tokens_fn", "max_batch", "joining")
"""Keywords of :meth:`Engine.generate` that are no options of transformers."""


@dataclass(frozen=True)
class Given:
    """The prompts of a call.

    Attributes:
        ids, mask: int64 ``[B, W]``, padded on the left.
        rows: the prompts without padding.
        request: the arguments, without those of ``SEVERAL``.
    """

    ids: Tensor
    mask: Tensor
    rows: list[list[int]]
    request: Request


def given_prompts(
    engine: LoadedEngine, inputs: Any, kwargs: Mapping[str, Any]
) -> tuple[Given, dict[str, Any]]:
    """Returns the prompts, and all other keywords of :meth:`Engine.generate` without those of ``SEVERAL``.

    Raises:
        ValueError: as of :meth:`Engine.generate`.
    """
    options = {name: value for name, value in kwargs.items() if name not in (*_OF_THE_CALL, *SEVERAL)}
    config = options.get("generation_config")
    if isinstance(config, Mapping):
        config = {name: value for name, value in config.items() if name not in SEVERAL}
    elif config is not None:
        config = copy.deepcopy(config)
        for name in SEVERAL:
            setattr(config, name, None)
    options["generation_config"] = config
    # Given, so that those of the checkpoint do not count.
    options |= {"num_beams": 1, "num_return_sequences": 1}
    processors, criteria, strings = (
        options.get(name) for name in ("logits_processor", "stopping_criteria", "stop_strings")
    )
    named = ("generation_config", "logits_processor", "stopping_criteria", "stop_strings", *OF_ENGINE)
    request = Request.read(
        engine.target, engine.tokenizer, inputs, kwargs.get("input_ids"),
        kwargs.get("attention_mask"), config, processors, criteria, strings,
        {name: value for name, value in options.items() if name not in named},
    )  # fmt: skip
    padded = request.prompts.left_padded()
    return Given(padded.ids, padded.mask, real_rows(padded.ids, padded.mask), request), options


class Draws:
    """Random numbers of one leaf, which depend on its seed alone and not on the other leaves.

    Args:
        seed: of the call.
        number: of the leaf in it.
    """

    def __init__(self, seed: int, number: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(derived(seed, Stream.ROW, number)))

    def next(self) -> float:
        """Returns the next random number in [0, 1)."""
        # The largest double below 1 times a sum may round to the sum.
        return min(self._generator.random(), 1 - 2.0**-40)


def drawn(scores: Tensor, draws: Sequence[Draws] | None) -> Tensor:
    """Returns one token for each row of processed logits, fp32 ``[N, V]``. Without ``draws`` it is the most
    probable one.

    Returns:
        int64 ``[N]``, on the scores' device.
    """
    if draws is None:
        return scores.argmax(-1)
    # The inverse of the cumulated probabilities, summed in fp64: a token of probability 0 is never drawn.
    cumulated = scores.softmax(-1).double().cumsum(-1)
    given = torch.tensor([[own.next()] for own in draws], dtype=torch.float64, device="cpu")
    numbers = sent(given, scores.device)
    return torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)[:, 0]
