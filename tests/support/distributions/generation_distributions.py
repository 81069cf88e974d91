"""The exact distribution of the tokens that a decoding program generates, with every draw enumerated.

The sequences of a batch follow different scripts: a batch holds that many runs of one generation.
"""

import copy
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.distributions.enumerated_noise import EnumeratedNoise, enumerated
from tests.support.distributions.enumeration import Distribution, Script, Walk, summed
from tests.support.distributions.languages import Language
from tests.support.models.families import tiny
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.draft_level import DraftLevel
from triforce_tree.drafters.matching import MatchingDrafter
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.kv.prefill import prefill
from triforce_tree.models.hf_model import HFModel
from triforce_tree.policy.passes import PassKind
from triforce_tree.verify.sampling import ProbsFromLogits

Result = TypeVar("Result")
MOST_RUNS, MOST_NEW = 100_000, 16
# Caches far smaller than the prompt.
SMALL = {"gamma": 3, "rounds": 1, "budget": 8, "chunk": 2, "recent": 4, "sinks": 1, "window": 8}


def stranger(vocabulary: int, seed: int, layers: int = 1) -> PreTrainedModel:
    """Returns a tiny model; models of different seeds are unrelated."""
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
    """Enumerates all continuations of one prompt that a decoding program can generate.

    Args:
        target: the model.
        draft: another model, or any drafter; may be None for one level.
        levels: 1, 2 or 3.
        prompt: token ids.
        batch: runs in parallel.
        tokens: the draft model's token ids for the target's.
        operators, noise: see :class:`enumerated_noise.EnumeratedNoise`.
        languages: of the runs in turn, None for none; all of them follow the first in an enumeration.
        neighbours: sampling options of further sequences of the batch, which continue the prompt as well and
            take the first of their possible draws.
        options: of :class:`HierarchyConfig`, which override ``SMALL``.

    Attributes:
        runs: of the last enumeration.
        chooser: makes what chooses the passes of a loop; only with a batch of one, since its sequences
            would choose together. None for a plan.
    """

    chooser: Callable[[DecodingLoop], Callable[[], PassKind]] | None = None

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None,
        levels: int,
        prompt: Sequences[int],
        batch: int = 32,
        tokens: TokenMap | None = None,
        operators: bool = False,
        noise: type[EnumeratedNoise] = EnumeratedNoise,
        languages: Sequences[Language | None] = (),
        neighbours: Sequences[ProbsFromLogits] = (),
        **options: Any,
    ) -> None:
        self.languages = languages
        self.target, self.prompt, self.batch = target, list(prompt), batch
        self.neighbours = list(neighbours)
        config = HierarchyConfig.from_options(**{**SMALL, **options})
        self.walks = [Walk() for _ in range(batch + len(neighbours))]
        for walk in self.walks[batch:]:
            walk.over = True
        batch = len(self.walks)
        wrapped = HFModel(target)
        level = DraftLevel(wrapped, HFModel(draft) if isinstance(draft, PreTrainedModel) else draft, tokens)
        config = level.with_trees(config)
        drafter = level.drafter(config)
        self.program = DecodingProgram(
            wrapped,
            drafter,
            config,
            batch,
            len(prompt) + MOST_NEW,
            levels,
            noise=enumerated(self.walks, operators, noise),
        )
        if config.rounds is None:
            # The stages are those of a choice while decoding; the passes are given.
            self.program.config = replace(self.program.config, rounds=1)
        with wrapped.active():
            features = self.program.state.features
            backend = self.program.cache.backend
            cache = backend.prompt_cache(0, self.program.states, 0)
            prefill(wrapped, cache, self.prompt[:-1], 64, None, 0, features)
            self.program.store.fed(0, len(self.prompt) - 1)
        for buffer in features.buffers if features is not None else ():
            buffer[1:] = buffer[:1]
        for group in self.program.store.groups:
            for slots in group.parts:
                slots[:, 1:] = slots[:, :1]
        # Slots of which the cache knows nothing are cleared when stages are captured.
        for b in range(batch):
            backend.cached.fed(b, self.prompt, 0)
        self._states = [state[:1].clone() for state in self._recurrent()]
        self.program.cache.means.update_all()

    def distribution(
        self,
        to_probs: ProbsFromLogits,
        ending: Ending | int,
        passes: int | None = None,
        plan: Sequences[int | PassKind] = (),
    ) -> Distribution:
        """Returns the probability of each continuation of the prompt.

        Args:
            to_probs: logits to probabilities.
            ending: where sequences end; an int is the number of new tokens.
            passes: of level 2, after which sequences that are still too short are continued by the target's
                own distribution; None for as many as the sequences take.
            plan: draft rounds before each pass, or kinds of passes, repeated; empty for those of the
                configuration.
        """
        if isinstance(ending, int):
            ends = frozenset({self.languages[0].end}) if self.languages and self.languages[0] else frozenset()
            ending = Ending(ending, ends)
        probs = summed(self.outcomes(lambda runs: self.generated(runs, to_probs, ending, passes, plan)))
        return probs if passes is None else self._extended(probs, to_probs, ending)

    def outcomes(self, run: Callable[[int], Sequences[Result]]) -> Iterator[tuple[Result, float]]:
        """Returns result and probability of every possible run of ``run``.

        Args:
            run: does one run in each sequence of the batch and returns the results; only its argument's many
                first sequences are used.
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

    def generated(
        self,
        runs: int,
        to_probs: ProbsFromLogits,
        ending: Ending,
        passes: int | None = None,
        plan: Sequences[int | PassKind] = (),
    ) -> list[tuple[int, ...]]:
        """Returns the new tokens of each sequence, the first ``runs`` of which are used."""
        loop = DecodingLoop.over(self.program, to_probs, 0)
        if plan:
            kinds = cycle(
                kind if isinstance(kind, PassKind) else PassKind(self.program.levels if kind else 1, kind)
                for kind in plan
            )
            loop.policy.choose = lambda *_: self._with_matches(next(kinds), loop)
        if self.chooser is not None:
            loop.policy.choose = self.chooser(loop)
        for state, after_prompt in zip(self._recurrent(), self._states, strict=True):
            state.copy_(after_prompt.expand_as(state))
        if self.program.states is not None:
            self.program.states.lengths = [len(self.prompt) - 1] * len(self.walks)
        endings = [ending if b < runs else Ending(1) for b in range(self.batch)]
        # Sequences that are not used have the other languages.
        first, *others = self.languages or (None,)
        beside = cycle(others or [first])
        languages = [first if b < runs else next(beside) for b in range(self.batch)]
        sequences = [
            Sequence(self.prompt, own, matcher=language and language.matcher(), to_probs=to_probs)
            for own, language in zip(endings, languages, strict=True)
        ]
        sequences += [Sequence(self.prompt, ending, to_probs=own) for own in self.neighbours]
        loop.begin(sequences, cached=True)
        for _ in islice(loop.decode(), passes):
            for walk, sequence in zip(self.walks, sequences, strict=True):
                walk.over = walk.over or sequence.finish_reason is not None
        return [tuple(sequence.new) for sequence in sequences]

    def _with_matches(self, kind: PassKind, loop: DecodingLoop) -> PassKind:
        """Returns a pass of a plan; all matched tokens are proposed where it verifies such."""
        drafter = self.program.drafter
        if self.program.shapes[kind.shape].matched:
            assert isinstance(drafter, MatchingDrafter)
            matches = drafter.match(
                [s and s.tokens if s is None or s.finish_reason is None else None for s in loop.sequences]
            )
            most = self.program.shapes[kind.shape].depth
            drafter.take(matches, [most if match and match.common else 0 for match in matches])
        return kind

    def _recurrent(self) -> list[Tensor]:
        return [] if self.program.states is None else self.program.states.buffers

    def _extended(self, probs: Distribution, to_probs: ProbsFromLogits, ending: Ending) -> Distribution:
        """Continuations up to the ending: missing tokens follow the target's own distribution."""
        language = self.languages[0] if self.languages else None
        if language is not None:
            to_probs = language.masking(to_probs, len(self.prompt))
        whole: list[tuple[tuple[int, ...], float]] = []
        for tokens, mass in probs.items():
            if tokens[-1] in ending.stop_tokens:
                whole.append((tokens, mass))
                continue
            left = ending.max_new_tokens - len(tokens)
            text = [*self.prompt, *tokens]
            for more, chance in target_distribution(self.target, to_probs, text, left).items():
                new = (*tokens, *more)
                whole.append((new if language is None else language.cut(new), mass * chance))
        return summed(whole)


@torch.no_grad()
def target_distribution(
    model: PreTrainedModel, to_probs: ProbsFromLogits, prompt: Sequences[int], count: int
) -> Distribution:
    """Returns the model's own distribution of the next ``count`` tokens, from plain forwards in float64."""
    exact = copy.deepcopy(model).cpu().double()
    sequences, joint = torch.tensor([list(prompt)]), torch.ones(1, dtype=torch.float64)
    for _ in range(count):
        scores = exact(sequences, use_cache=False).logits[:, -1]
        for processor in to_probs.processors:
            scores = processor(sequences, scores)
        vocabulary = scores.shape[1]
        probs = scores.softmax(-1)
        if to_probs.greedy:
            probs = torch.nn.functional.one_hot(scores.argmax(-1), vocabulary).double()
        more = torch.arange(vocabulary).repeat(len(sequences))[:, None]
        sequences = torch.cat([sequences.repeat_interleave(vocabulary, 0), more], 1)
        joint = (joint[:, None] * probs).flatten()
        sequences, joint = sequences[joint > 0], joint[joint > 0]
    new = (tuple(sequence[len(prompt) :]) for sequence in sequences.tolist())
    return dict(zip(new, joint.tolist(), strict=True))
