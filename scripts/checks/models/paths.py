"""Runs a tiny model on every path of the engine, and compares its greedy text with transformers' own."""

import copy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import triforce_tree
from scripts.checks.models.build import build, new_tokens_of, prompt_of
from scripts.checks.models.classes import families
from scripts.checks.models.outcomes import CRASHES, DIFFERS, EQUAL, NOT_BUILT, REFUSED, SKIPPED
from triforce_tree.check.ties import first_difference
from triforce_tree.config import load_arguments
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.models.indexers import indexers
from triforce_tree.models.recurrent.mixers import mixers

PACKAGE = str(Path(triforce_tree.__file__).parent)
NEW_TOKENS = 24
# Longer than every window, chunk and original length of the tiny models; no multiple of anything.
PROMPTS = (171, 103, 139)
# Caches far smaller than the prompts; rounds are fixed, as the policy would not draft with tiny models.
OPTIONS: dict[str, Any] = {
    "gamma": 3, "budget": 48, "chunk": 4, "recent": 16, "sinks": 2, "window": 24, "prefill_chunk": 40,
    "rounds": 2,
}  # fmt: skip
TREE = {"tree": "best-first:3,2,1", "runner_ups": True}
_NOISE = 0.05  # of a draft's weights, relative to the target's: proposals are accepted and rejected


@dataclass(frozen=True)
class Way:
    """One way through the engine.

    Attributes:
        options: of ``load``.
        drafts: whether the draft is a model of the same family; else there is none.
        prompts: sequences in one batch.
        gpu: whether it needs a CUDA device.
    """

    options: dict[str, Any]
    drafts: bool = True
    prompts: int = 1
    gpu: bool = False


PATHS: dict[str, Way] = {
    "1 level": Way({"levels": 1}, drafts=False),
    "2 levels": Way({"levels": 2}),
    "3 levels": Way({"levels": 3}),
    "lookup": Way({"levels": 2}, drafts=False),
    "batch": Way({"levels": 2}, prompts=len(PROMPTS)),
    "offloaded": Way({"levels": 3, "offload": True}),
    "streamed": Way({"levels": 3, "offload_weights": True}),
    "captured": Way({"levels": 3}, gpu=True),
}


@dataclass(frozen=True)
class Outcome:
    outcome: str
    reason: str = ""


class Trial:
    """A model and its draft on every path.

    Args:
        model: of the class; it is not changed.
        device: where all paths run.
    """

    def __init__(self, model: PreTrainedModel, device: str) -> None:
        self.model, self.device = model.to(device), device
        self._expected: dict[int, list[int]] = {}
        if device == "cuda" and getattr(model.config, "_experts_implementation", None) == "grouped_mm":
            # Torch's grouped products on a GPU take no matrices as small as these; load chooses anew.
            model.set_experts_implementation("eager")

    @cached_property
    def two_levels(self) -> bool:
        """Returns whether there are at most two levels: layers keep recurrent state, or have an indexer."""
        return bool(mixers(self.model)) or bool(indexers(self.model))

    @cached_property
    def draft(self) -> PreTrainedModel:
        """Returns a copy with noise on its weights; a Llama where the family cannot draft."""
        if indexers(self.model):
            return build(families()["LlamaForCausalLM"]).to(self.device)
        other = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in other.parameters():
                noise = torch.randn(weight.shape, generator=generator).to(weight.device)
                weight += _NOISE * weight.abs().mean() * noise
        return other

    def expected(self, length: int) -> list[int]:
        """Returns the new tokens after the prompt of ``length`` tokens, by transformers alone."""
        if length not in self._expected:
            self._expected[length] = new_tokens_of(self.model, prompt_of(length), NEW_TOKENS)
        return self._expected[length]

    def refusal(self) -> Outcome | None:
        """Returns why the class cannot be tried, or None: what ``load`` raises without a draft, unless a
        decoder cannot be run by transformers either.
        """
        found = _raised(lambda: triforce_tree.load(self.model, levels=1))
        if found is None or self.model.config.is_encoder_decoder:
            return found
        return self._failure(PROMPTS[:1]) or found

    def _failure(self, lengths: Sequence[int]) -> Outcome | None:
        """Returns why transformers' own generate fails on text alone; None if it does not."""
        try:
            for length in lengths:
                self.expected(length)
        except Exception as error:
            return Outcome(NOT_BUILT, f"transformers' own generate fails on text alone ({said(error)})")
        return None

    def run(self, name: str) -> Outcome:
        """Returns the outcome of one path."""
        path = PATHS[name]
        if path.gpu and self.device != "cuda":
            return Outcome(SKIPPED, "needs a CUDA device")
        lengths = PROMPTS[: path.prompts]
        if (failure := self._failure(lengths)) is not None:
            return failure
        expected, found = [self.expected(length) for length in lengths], list[Outcome]()

        def decode() -> None:
            found.append(self._decode(path, lengths, expected))

        return _raised(decode) or found[0]

    def _decode(self, path: Way, lengths: Sequence[int], expected: list[list[int]]) -> Outcome:
        streams = path.options.get("offload_weights", False)
        # Streamed weights are moved out of the model.
        target = copy.deepcopy(self.model) if streams else self.model
        options = {**OPTIONS, **path.options, **(TREE if path.drafts else {})}
        if self.two_levels and (path.gpu or len(path.options) > 1):
            options["levels"] = 2  # what else is refused of the path, beside three levels
        engine = triforce_tree.load(target, self.draft if path.drafts else None, **load_arguments(options))
        prompts = [prompt_of(length) for length in lengths]
        out = engine.generate(
            prompts if len(prompts) > 1 else prompts[0], max_new_tokens=NEW_TOKENS, do_sample=False
        )
        start = max(lengths)
        for sequence, prompt, theirs in zip(out.sequences.tolist(), prompts, expected, strict=True):
            ours = sequence[start : start + NEW_TOKENS]
            if ours != theirs:
                difference = first_difference(engine, prompt, ours, theirs)
                if difference is None or not difference.tie:
                    at = common_prefix(ours, theirs)
                    return Outcome(DIFFERS, f"from new token {at} on, after {len(prompt)} tokens")
        if path.gpu:
            with engine.program(prompts, NEW_TOKENS, None) as program:
                models = [program.full] if self.two_levels else [program.full, program.retrieval_model]
                if not all(model.capturable for model in models):
                    return Outcome(REFUSED, "equal, but its forwards run step by step")
        return Outcome(EQUAL)


def _raised(call: Callable[[], Any]) -> Outcome | None:
    """Returns what a call raised: a refusal is a ValueError of our own code; all else is a crash."""
    try:
        call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = isinstance(error, ValueError) and last.filename.startswith(PACKAGE)
        where = "" if ours else f" at {Path(last.filename).name}:{last.lineno}"
        return Outcome(REFUSED if ours else CRASHES, said(error, named=not ours) + where)
    return None


def said(error: Exception, named: bool = True) -> str:
    """Returns an error in one line."""
    text = " ".join(str(error).split())
    return (f"{type(error).__name__}: {text}" if named else text)[:400]
