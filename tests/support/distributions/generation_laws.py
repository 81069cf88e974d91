"""The exact distribution of what a whole cycle generates, with every draw enumerated.

The sequences of a batch follow different scripts side by side: a batch is as many runs of one generation.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, TypeVar

import torch
from enumerated_noise import EnumeratedNoise, enumerated
from enumeration import Law, Script, Walk, summed
from families import tiny
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.prefill import prefill
from triforce_tree.models.hf_model import HFModel
from triforce_tree.verify.sampling import ProbsFromLogits

Result = TypeVar("Result")
MOST_RUNS, MOST_NEW = 100_000, 16
# Caches far smaller than the prompt.
SMALL = {"gamma": 3, "rounds": 1, "budget": 8, "chunk": 2, "recent": 4, "sinks": 1, "window": 8}


def stranger(vocabulary: int, seed: int, layers: int = 1) -> PreTrainedModel:
    """A tiny model; those of different seeds have nothing in common."""
    return tiny(
        "llama",
        seed,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )


class Generations:
    """Every way that a cycle can continue one prompt.

    Args:
        target: the model.
        draft: another one, or any drafter; may be None for one level.
        levels: 1, 2 or 3.
        prompt: token ids.
        batch: runs side by side.
        operators, noise: see :class:`enumerated_noise.EnumeratedNoise`.
        options: of :class:`HierarchyConfig`, instead of ``SMALL``.

    Attributes:
        runs: of the last enumeration.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None,
        levels: int,
        prompt: Sequence[int],
        batch: int = 32,
        operators: bool = False,
        noise: type[EnumeratedNoise] = EnumeratedNoise,
        **options: Any,
    ) -> None:
        self.target, self.prompt, self.batch = target, list(prompt), batch
        config = HierarchyConfig.from_options(**{**SMALL, **options})
        self.walks = [Walk() for _ in range(batch)]
        wrapped = HFModel(target)
        drafter = TreeDrafter(HFModel(draft), config) if isinstance(draft, PreTrainedModel) else draft
        if drafter is not None:
            config = replace(config, tree=drafter.tree)
        self.program = DecodingProgram(
            wrapped,
            drafter,
            config,
            batch,
            len(prompt) + MOST_NEW,
            levels,
            noise=enumerated(self.walks, operators, noise),
        )
        with wrapped.active():
            prefill(wrapped, self.program.store, 0, self.prompt[:-1], 64, None)
        self.program.store.kv[:, :, 1:] = self.program.store.kv[:, :, :1]
        self.program.update_chunk_means()
        if isinstance(self.program.drafter, TreeDrafter):
            _remember_windows(self.program.drafter)

    def to_probs(
        self,
        to_probs: ProbsFromLogits,
        ending: Ending | int,
        passes: int | None = None,
        plan: Sequence[int] = (),
    ) -> Law:
        """Probability of each text that may follow the prompt.

        Args:
            to_probs: logits to probabilities.
            ending: where texts end, in the first place after how many tokens.
            passes: of level 2, after which the target itself continues texts that are still too short; None:
                as many as the texts take.
            plan: rounds of drafting before each pass, over and over; empty for those of the configuration.
        """
        ending = Ending(ending) if isinstance(ending, int) else ending
        texts = summed(self.outcomes(lambda runs: self._generated(runs, to_probs, ending, passes, plan)))
        return texts if passes is None else self._continued(texts, to_probs, ending.max_new_tokens)

    def outcomes(self, run: Callable[[int], Sequence[Result]]) -> Iterator[tuple[Result, float]]:
        """Result and probability of every way that ``run`` can go.

        Args:
            run: does one run in each sequence of the batch, of which only the first so many matter, and
                returns a result of each.
        """
        scripts: list[Script] = [()]
        self.runs = 0
        while scripts:
            now, scripts = scripts[-self.batch :], scripts[: -self.batch]
            for b in range(self.batch):
                self.walks[b] = Walk(now[b]) if b < len(now) else Walk()
                self.walks[b].over = b >= len(now)
            results = run(len(now))
            for walk, result in zip(self.walks, results[: len(now)], strict=False):
                yield result, walk.probability
                scripts += walk.alternatives()
            self.runs += len(now)
            assert self.runs <= MOST_RUNS, f"more than {MOST_RUNS} runs; make the case smaller"

    def _generated(
        self, runs: int, to_probs: ProbsFromLogits, ending: Ending, passes: int | None, plan: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """The new texts of as many runs."""
        prompts = [self.prompt] * self.batch
        decoder = Decoder(self.program, to_probs, 0)
        if plan:
            rounds = cycle(plan)
            decoder.controller.rounds = lambda: next(rounds)
        self.program.rewind(prompts)
        endings = [ending if b < runs else Ending(1) for b in range(self.batch)]
        texts: list[list[int]] = [[] for _ in prompts]
        for blocks in islice(decoder.decode(prompts, endings), passes):
            rows = zip(self.walks, texts, blocks, decoder.finish_reasons, strict=True)
            for walk, text, block, reason in rows:
                text += block
                walk.over = walk.over or reason is not None
        return [tuple(text) for text in texts]

    def _continued(self, texts: Law, to_probs: ProbsFromLogits, count: int) -> Law:
        """Texts of ``count`` tokens: what is missing follows the target's own distribution."""
        return summed(
            ((*text, *more), mass * chance)
            for text, mass in texts.items()
            for more, chance in target_law(
                self.target, to_probs, [*self.prompt, *text], count - len(text)
            ).items()
        )


def _remember_windows(growth: TreeDrafter) -> None:
    """Draft windows that were computed once are copied: all runs begin with the same one."""
    feed, known = growth._feed, dict[tuple[int, ...], Tensor]()

    def remembered(b: int, tokens: list[int]) -> None:
        rows = growth.store.kv[:, :, b, :, : len(tokens)]
        key = tuple(tokens)
        if key in known:
            rows.copy_(known[key])
        else:
            feed(b, tokens)
            known[key] = rows.clone()

    growth._feed = remembered


@torch.no_grad()
def target_law(model: PreTrainedModel, to_probs: ProbsFromLogits, prompt: Sequence[int], count: int) -> Law:
    """The model's own distribution of the next ``count`` tokens, from plain forwards in float64."""
    exact = copy.deepcopy(model).cpu().double()
    texts, joint = torch.tensor([list(prompt)]), torch.ones(1, dtype=torch.float64)
    for _ in range(count):
        scores = exact(texts, use_cache=False).logits[:, -1]
        for processor in to_probs.processors:
            scores = processor(texts, scores)
        vocabulary = scores.shape[1]
        chances = scores.softmax(-1)
        if to_probs.greedy:
            chances = torch.nn.functional.one_hot(scores.argmax(-1), vocabulary).double()
        more = torch.arange(vocabulary).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(vocabulary, 0), more], 1)
        joint = (joint[:, None] * chances).flatten()
        texts, joint = texts[joint > 0], joint[joint > 0]
    return {tuple(t[len(prompt) :]): chance for t, chance in zip(texts.tolist(), joint.tolist(), strict=True)}
