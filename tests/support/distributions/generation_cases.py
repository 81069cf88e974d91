"""Generations that are small enough to enumerate."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.distributions.block_folders import DFLASH2, block, spark_folder, speculators_folder
from tests.support.distributions.enumeration import total_variation
from tests.support.distributions.generation_distributions import Generations, stranger, target_distribution
from tests.support.distributions.head_folders import eagle, medusa, mtp
from tests.support.models.families import perturbed, prompt_of, with_rounded_kv
from tests.support.models.own_drafters import DrawnThenFixed, FixedSiblings, FixedThenDrawn, TableDraws
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.verify.sampling import ProbsFromLogits


@dataclass(frozen=True)
class Case:
    """One enumeration.

    Attributes:
        levels: 1, 2 or 3.
        vocabulary: tokens.
        tokens: new tokens.
        passes: of level 2, see ``Generations.distribution``.
        options: of ``HierarchyConfig``.
        processors: of the logits.
        layers: of the target.
        plan: draft rounds before each pass of level 2, or kinds of passes; empty for those of the options.
        drafter: makes level 0; None for a model.
        likeness: relative perturbation of the target's weights that makes the draft; None for an unrelated
            draft.
        token_map: an unrelated draft's token ids for the target's.
        mask_token: of a draft model that predicts several tokens at once.
    """

    levels: int
    vocabulary: int
    tokens: int
    passes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    processors: tuple[Any, ...] = ()
    layers: int = 1
    plan: tuple[int | PassKind, ...] = ()
    drafter: Callable[[], Drafter] | None = None
    likeness: float | None = None
    token_map: TokenMap | None = None
    mask_token: int | None = None

    @property
    def to_probs(self) -> ProbsFromLogits:
        return ProbsFromLogits(LogitsProcessorList(self.processors))

    @property
    def prompt(self) -> list[int]:
        """A prompt that is longer than every cache but the full one."""
        return prompt_of(41, self.vocabulary)

    def generations(self, device: str = "cpu", **how: Any) -> Generations:
        """Returns the case's :class:`Generations`; ``how``: its other arguments."""
        target = stranger(self.vocabulary, 0, self.layers)
        draft: Any
        if self.drafter is not None:
            draft = self.drafter()
        elif self.token_map is not None:
            largest = torch.cat([self.token_map.inputs, self.token_map.proposals]).max()
            draft = stranger(int(largest) + 1, 3).to(device)
        elif self.likeness is None:
            draft = stranger(self.vocabulary, 3).to(device)
        else:
            draft = perturbed(target, self.likeness).to(device)
        if self.mask_token is not None:
            draft.config.pard_token = self.mask_token
        how = {**self.options, "tokens": self.token_map, **how}
        made = Generations(target.to(device), draft, self.levels, self.prompt, **how)
        if self.options.get("kv_bits") == 8:
            made.target = with_rounded_kv(target)
        return made

    def distance(self, generations: Generations) -> float:
        """Returns the total variation between the generated distribution and the target's own."""
        made = generations.distribution(self.to_probs, self.tokens, self.passes, self.plan)
        expected = target_distribution(generations.target, self.to_probs, self.prompt, self.tokens)
        return total_variation(made, expected)


def _chain(length: int) -> dict[str, Any]:
    return {"tree": f"chain:{length}", "runner_ups": False}


def _tree(shape: str) -> dict[str, Any]:
    return {"tree": shape, "runner_ups": False}


HOT, TOP_K, TOP_P = TemperatureLogitsWarper(1.5), TopKLogitsWarper(2), TopPLogitsWarper(0.8)
PROCESSORS: dict[str, tuple[Any, ...]] = {
    "cold": (TemperatureLogitsWarper(0.6),),
    "top-k": (TemperatureLogitsWarper(1.3), TOP_K),
    "top-p": (TOP_P,),
    "all": (HOT, TopKLogitsWarper(3), TopPLogitsWarper(0.9)),
}


BOTH = {"tree": "chain:1", "runner_ups": True}
# Vocabularies that are padded to different sizes; different ones, where the draft reads two of the target's
# tokens as one, lacks one of them, and has two of its own.
TOKENS = {
    "narrower draft": TokenMap.padded(4, 3),
    "wider draft": TokenMap.padded(4, 6),
    "other tokens": TokenMap(torch.tensor([4, 0, 0, 2]), torch.tensor([4, 0, -1, 2])),
}

CASES: dict[str, Case] = {
    "plain": Case(1, 3, 2),
    # Level 0 below level 2: several passes, then single passes of larger trees.
    "chain": Case(2, 3, 2, None, _chain(2)),
    "chain, longer than needed": Case(2, 2, 3, None, _chain(3)),
    "chain, four tokens": Case(2, 4, 1, None, _chain(2)),
    "siblings": Case(2, 3, 2, None, _tree("static:2")),
    "four siblings": Case(2, 4, 1, None, _tree("static:3")),
    "static": Case(2, 3, 2, 1, _tree("static:0;1;0.0")),
    "static, deep": Case(2, 2, 4, 1, _tree("static:0;1;0.0;0.1;1.0;0.0.0")),
    "sequoia": Case(2, 3, 3, 1, _tree("sequoia:3x2")),
    "best-first": Case(2, 3, 3, 1, _tree("best-first:2,2")),
    "best-first, several passes": Case(2, 2, 3, None, _tree("best-first:2,2")),
    "best-first, four tokens": Case(2, 4, 2, 1, _tree("best-first:2,1")),
    # Level 1 between them.
    "hierarchy": Case(3, 3, 2, None, {**_chain(1), "refresh": 1}),
    "hierarchy, refresh 0": Case(3, 2, 3, 1, {**_chain(1), "refresh": 0, "rounds": 2}),
    "hierarchy, refresh 2": Case(3, 2, 4, 1, {**_chain(1), "refresh": 2, "rounds": 3}),
    "hierarchy, chain": Case(3, 2, 2, None, {**_chain(2), "refresh": 0}),
    "hierarchy, siblings": Case(3, 3, 2, 1, _tree("static:0;1")),
    "hierarchy, four tokens": Case(3, 4, 2, 1, _chain(1)),
    "gamma 1": Case(3, 2, 2, None, {**_tree("static:0;1"), "gamma": 1}),
    "gamma 1, two layers": Case(3, 2, 2, None, {**_chain(2), "gamma": 1}, layers=2),
    # With a runner-up for every token of the chain.
    "runner-ups": Case(3, 3, 2, 1, {**BOTH}),
    "runner-ups, two layers, refresh 0": Case(3, 2, 2, None, {**BOTH, "refresh": 0, "gamma": 2}, layers=2),
    "runner-ups, two layers, refresh 2": Case(3, 2, 3, 1, {**BOTH, "refresh": 2, "rounds": 3}, layers=2),
    "runner-ups, chain": Case(3, 2, 2, None, {"tree": "chain:2", "runner_ups": True, "gamma": 2}, layers=2),
    "runner-ups, best-first": Case(3, 2, 3, 1, {"tree": "best-first:2,2", "runner_ups": True, "gamma": 2}),
    "runner-ups, two rounds": Case(3, 2, 3, 1, {**BOTH, "refresh": 1, "rounds": 2}),
    "gamma beyond the sequence": Case(3, 2, 2, 1, {**BOTH, "gamma": 4, "rounds": 2}),
    # A tree of the draft at the end of the chain.
    "tail": Case(3, 3, 2, None, {**_chain(1), "tail_tree": True, "gamma": 1}),
    "tail, two layers": Case(3, 2, 3, 1, {**_chain(1), "tail_tree": True, "gamma": 2}, layers=2),
    "tail, siblings": Case(3, 3, 2, 1, {**_tree("static:0;1"), "tail_tree": True, "gamma": 1}),
    "tail, best-first": Case(3, 2, 3, 1, {**_tree("best-first:2,1"), "tail_tree": True, "gamma": 2}),
    "tail, runner-ups": Case(3, 2, 3, 1, {**BOTH, "tail_tree": True, "gamma": 2}),
    "tail, two rounds": Case(3, 2, 4, 1, {**_chain(1), "tail_tree": True, "rounds": 2, "gamma": 3}),
    # A draft that is often accepted, and a vocabulary of which few tokens have a probability above 0.
    "fifty tokens": Case(
        3,
        50,
        2,
        1,
        _tree("best-first:2,1"),
        (TemperatureLogitsWarper(1.3), TopKLogitsWarper(3)),
        likeness=0.1,
    ),
    # A draft model of another vocabulary.
    **{
        f"{name}, {how}": Case(levels, 4, tokens, passes, options, processors, token_map=ids)
        for name, ids in TOKENS.items()
        for how, levels, tokens, passes, options, processors in (
            ("chain", 2, 2, None, _chain(1), ()),
            # As many siblings as the target has tokens.
            ("siblings", 2, 1, None, _tree("static:4"), ()),
            ("best-first", 2, 2, 1, _tree("best-first:2,1"), PROCESSORS["all"]),
            ("runner-ups", 3, 2, 1, BOTH, PROCESSORS["top-k"]),
        )
    },
    "narrower draft, all its tokens forbidden": Case(
        2,
        4,
        2,
        1,
        _tree("best-first:2,1"),
        (SuppressTokensLogitsProcessor([0, 1]),),
        token_map=TokenMap.padded(4, 2),
    ),
    # The target with its keys and values in 8 bits; none is within 2e-4 of a step of the middle of two
    # steps, so that fp32 rounds as fp64 does.
    "8-bit keys and values": Case(
        3, 3, 2, 1, {"tree": "static:0;1", "runner_ups": True, "kv_bits": 8}, layers=2
    ),
    # Autoregressive passes between those that verify drafts.
    "drafting off and on": Case(2, 2, 4, None, _chain(1), plan=(1, 0, 1, 0)),
    "levels change": Case(
        3, 2, 4, None, {**BOTH, "gamma": 2, "rounds": None}, plan=(PassKind(3, 1), PassKind(2, 1), PLAIN)
    ),
    "two levels first": Case(
        3, 2, 3, None, {**BOTH, "gamma": 2, "rounds": None}, plan=(PassKind(2, 1), PassKind(3, 1))
    ),
    # Trees of several shapes, in any order.
    "shapes change": Case(
        2,
        3,
        3,
        None,
        {**_tree("chain:1"), "other_trees": ("static:0;1", "best-first:2,1"), "rounds": None},
        plan=(PassKind(2, 1, 1), PassKind(2, 1), PassKind(2, 1, 2)),
    ),
    "shapes change, deep after flat": Case(
        2,
        2,
        4,
        None,
        {**_tree("best-first:2"), "other_trees": ("chain:3",), "rounds": None},
        plan=(PassKind(2, 1, 1), PassKind(2, 1), PLAIN),
    ),
    "shapes change, hierarchy": Case(
        3,
        2,
        3,
        None,
        {**BOTH, "gamma": 2, "other_trees": ("static:0;1",), "rounds": None},
        plan=(PassKind(3, 1, 1), PassKind(2, 1, 1), PassKind(3, 1)),
    ),
    # Matched tokens in the place of a tree, before and after passes with trees.
    "matched tokens": Case(
        2,
        3,
        3,
        None,
        {**_chain(1), "other_trees": ("lookup:2",), "rounds": None},
        plan=(PassKind(2, 1, 1), PassKind(2, 1), PLAIN),
    ),
    "matched tokens, two lengths": Case(
        2,
        3,
        3,
        None,
        {**_chain(1), "other_trees": ("lookup:1", "lookup:3"), "rounds": None},
        plan=(PassKind(2, 1, 1), PassKind(2, 1, 2), PassKind(2, 1)),
    ),
    "matched tokens, hierarchy": Case(
        3,
        2,
        4,
        None,
        {**BOTH, "gamma": 2, "other_trees": ("static:0;1", "lookup:3"), "rounds": None},
        plan=(PassKind(2, 1, 2), PassKind(3, 1), PassKind(2, 1, 1)),
    ),
    "hierarchy off and on": Case(3, 2, 3, None, {**BOTH, "gamma": 2}, plan=(0, 1, 0)),
    # Drafters without a model.
    "lookup": Case(2, 3, 3, drafter=partial(SuffixMatching, 3)),
    "lookup, two tokens": Case(2, 2, 4, drafter=partial(SuffixMatching, 2)),
    "lookup, hierarchy": Case(3, 3, 2, options={"runner_ups": False}, drafter=partial(SuffixMatching, 2)),
    "lookup, runner-ups": Case(
        3, 3, 2, 1, {"runner_ups": True, "gamma": 2}, drafter=partial(SuffixMatching, 1)
    ),
    "lookup, two rounds": Case(
        3, 2, 3, 1, {"runner_ups": True, "rounds": 2, "refresh": 0}, drafter=partial(SuffixMatching, 2)
    ),
    "lookup off and on": Case(2, 2, 4, plan=(1, 0, 1), drafter=partial(SuffixMatching, 2)),
    **{
        f"{name}, {levels} levels": Case(
            levels, 3, tokens, passes, {"runner_ups": False}, drafter=partial(kind, tree, 3)
        )
        for name, kind, tree in (
            ("fixed siblings", FixedSiblings, "static:0;1;2;0.0;0.1;1.0"),
            ("drawn by a table", TableDraws, "static:0;1;0.0"),
            ("drawn below fixed", FixedThenDrawn, "static:0;1;0.0;0.1"),
            ("drawn, then fixed", DrawnThenFixed, "static:1;0.0"),
        )
        for levels, tokens, passes in ((2, 3, 1), (3, 2, 1))
    },
    "fixed siblings, several passes": Case(2, 3, 3, drafter=partial(FixedSiblings, "static:0;1;0.0;0.1", 3)),
    "fixed siblings, all": Case(
        2, 4, 2, 1, {}, PROCESSORS["all"], drafter=partial(FixedSiblings, "static:0;1;2;0.0;0.1", 4)
    ),
    "drawn by a table, several passes": Case(2, 3, 2, drafter=partial(TableDraws, "static:2", 3)),
    "drawn by a table, all": Case(
        2, 4, 2, 1, {}, PROCESSORS["all"], drafter=partial(TableDraws, "static:0;1;0.0", 4)
    ),
    "drawn, then fixed, several passes": Case(2, 3, 3, drafter=partial(DrawnThenFixed, "static:0;1", 3)),
    "drawn, then fixed, all": Case(
        2, 4, 2, 1, {}, PROCESSORS["all"], drafter=partial(DrawnThenFixed, "static:2;0.0", 4)
    ),
    "drawn, then fixed, runner-ups": Case(
        3, 2, 3, 1, {"runner_ups": True, "gamma": 2}, drafter=partial(DrawnThenFixed, "static:0;1", 2)
    ),
    **{
        f"mask tokens, {how}": Case(levels, 3, 2, 1, options, mask_token=1)
        for how, levels, options in (
            ("chain", 2, _chain(2)),
            ("best-first", 2, _tree("best-first:2,2")),
            ("hierarchy", 3, _tree("static:0;1")),
        )
    },
    # Drafters that read the target's hidden states; EAGLE-3 and blocks with a window much shorter than
    # the prompt, EAGLE-3 also with a draft vocabulary that lacks some of the target's tokens.
    **{
        f"{name}, {how}": Case(levels, vocabulary, tokens, passes, options, processors, 2, plan, drafter)
        for how, levels, vocabulary, tokens, passes, tree, options, processors, plan in (
            ("chain", 2, 3, 2, None, "chain:2", {}, (), ()),
            ("siblings, all", 2, 4, 2, 1, "static:0;1;0.0", {}, PROCESSORS["all"], ()),
            ("best-first", 2, 3, 2, 1, "best-first:2,2", {}, (), ()),
            ("hierarchy", 3, 3, 2, 1, "static:0;1", {"runner_ups": True}, (), ()),
            ("hierarchy, two rounds", 3, 2, 3, 1, "chain:1", {"rounds": 2, "gamma": 2}, (), ()),
            ("off and on", 2, 2, 4, None, "chain:1", {}, (), (1, 0, 1)),
            (
                "matched tokens",
                2,
                3,
                3,
                None,
                "chain:1",
                {"other_trees": ("lookup:2",), "rounds": None},
                (),
                (PassKind(2, 1, 1), PassKind(2, 1), PLAIN),
            ),
            (
                "matched tokens, hierarchy",
                3,
                2,
                4,
                None,
                "chain:1",
                {"other_trees": ("lookup:3",), "rounds": None, "gamma": 2, "runner_ups": False},
                (),
                (PassKind(2, 1, 1), PassKind(3, 1)),
            ),
        )
        for name, drafter in (
            ("medusa", partial(medusa, stranger(vocabulary, 0, 2), tree, heads=2)),
            ("eagle", partial(eagle, stranger(vocabulary, 0, 2), tree, draft_vocabulary=vocabulary - 1)),
            (
                "p-eagle",
                partial(eagle, stranger(vocabulary, 0, 2), tree, ptd_token_id=1, num_hidden_layers=2),
            ),
            ("eagle 3.1", partial(eagle, stranger(vocabulary, 0, 2), tree, fc_norm=True, norm_output=True)),
            ("block", partial(block, stranger(vocabulary, 0, 2), tree, inputs=(0,))),
            ("mtp", partial(mtp, stranger(vocabulary, 0, 2), tree)),
            ("two mtp layers", partial(mtp, stranger(vocabulary, 0, 2), tree, 2)),
            (
                "DSpark",
                partial(
                    block, stranger(vocabulary, 0, 2), tree, folder=spark_folder, inputs=(0,), kind="rnn"
                ),
            ),
            (
                "DSpark of speculators",
                partial(
                    block,
                    stranger(vocabulary, 0, 2),
                    tree,
                    folder=speculators_folder,
                    inputs=(1,),
                    drafted=vocabulary - 1,
                    kind="vanilla",
                ),
            ),
            (
                # Some tokens are never proposed.
                "DFlash2",
                partial(
                    block,
                    stranger(vocabulary, 0, 2),
                    tree,
                    inputs=(0,),
                    is_causal=False,
                    dflash={**DFLASH2, "selector_top_k": max(1, vocabulary - 2)},
                ),
            ),
        )
    },
    **{
        f"{name}, {how}": Case(levels, 4 if how == "all" else 3, 2, 1, options, processors)
        for how, processors in PROCESSORS.items()
        for name, levels, options in (
            ("best-first", 2, _tree("best-first:2,1")),
            ("hierarchy", 3, _tree("static:0;1")),
            ("runner-ups", 3, BOTH),
        )
    },
}
