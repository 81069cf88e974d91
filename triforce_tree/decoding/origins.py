"""Names what first proposed each token that a decoding loop commits."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import ChainVerifyStage, RetrievalVerifyStage
from triforce_tree.drafters.suffix_matching import SuffixMatching

MATCHED = SuffixMatching.name
"""The origin of matched tokens."""
_RETRIEVAL, _TARGET = "retrieval", "target"


@dataclass(frozen=True)
class _Verified:
    """What a verifying stage accepted.

    It holds no buffers of the program, whose memory may be needed for the next one.

    Attributes:
        path, counts: int64 ``[B, D + 1]`` and ``[B]``, as in ``Acceptance``.
        proposer: what proposed the tree: the drafter's name, or ``MATCHED``.
        level_one: whether level 1 verified.
        chain, tail_start: for level 2 over a chain the most tokens of the chain, and the first node of the
            tail; ``chain`` is 0 for any other tree.
    """

    path: Tensor
    counts: Tensor
    proposer: str
    level_one: bool
    chain: int = 0
    tail_start: int = 0

    def names(self, nodes: Sequence[int], chain: Sequence[str]) -> list[str]:
        """Returns what proposed the accepted nodes; ``chain`` names the tokens of the chain."""
        if not self.chain:
            return [self.proposer] * len(nodes)
        names: list[str] = []
        for node in nodes:
            if node >= self.tail_start:
                names.append(self.proposer)
            else:
                # Nodes between the chain and the tail are runner-ups, which the retrieval level drew.
                names.append(chain[node - 1] if node <= self.chain else _RETRIEVAL)
        return names


class Origins:
    """Names what first proposed each token that a loop commits. It is the loop's ``after_stage``.

    A token is the drafter's if all levels that judged it accepted it, or ``MATCHED`` if a chain of matched
    tokens proposed it. It is the retrieval level's if that level added it, runner-ups included,
    and the target accepted it. The last token of every pass is the target's own.

    Args:
        loop: the decoding loop.
    """

    def __init__(self, loop: DecodingLoop) -> None:
        self._loop = loop
        self._program: Callable[[], DecodingProgram | None] = lambda: None
        self._verified: list[_Verified] = []

    def __call__(self, stage: str) -> None:
        # Stages of other shapes of trees: ``draft/1``.
        name, _, number = stage.partition("/")
        if name == "draft":
            return
        program = self._loop.program
        if program is not self._program():
            # A pass that ran out of memory is repeated by another program.
            self._program, self._verified = weakref.ref(program), []
        judged, acceptance = program.stage(stage), program.verifier(stage).acceptance
        # Later stages write into the same buffers.
        path, counts = acceptance.path.clone(), acceptance.counts.clone()
        drafter = program.drafter.name if program.drafter is not None else ""
        proposer = MATCHED if program.shapes[int(number or 0)].matched else drafter
        level_one = isinstance(judged, RetrievalVerifyStage)
        verified = _Verified(path, counts, proposer, level_one)
        if isinstance(judged, ChainVerifyStage):
            tail = judged.laid_out.tail_start
            verified = replace(verified, chain=judged.state.max_draft_tokens, tail_start=tail)
        self._verified.append(verified)

    def take(self) -> list[list[str]]:
        """Returns the names of the tokens that were committed since the last call, by batch index.

        It waits for the device. A name is ``MATCHED``, or that of a level as in
        :class:`~triforce_tree.runtime.stats.LevelStats`. The last pass may have committed more tokens than a
        sequence was to have, and those of an index without a running sequence have no meaning.
        """
        verified, self._verified = self._verified, []
        if not verified:
            return []
        # All tables are copied to the host at once.
        tables = [torch.cat([each.counts[:, None], each.path], 1) for each in verified]
        flat = torch.cat([table.flatten() for table in tables]).tolist()
        names: list[list[str]] = []
        for b in range(len(tables[0])):
            at, chain, own = 0, list[str](), list[str]()
            for each, table in zip(verified, tables, strict=True):
                width = table.shape[1]
                count, _, *nodes = flat[at + b * width : at + (b + 1) * width]
                at += table.numel()
                found = each.names(nodes[: count - 1], chain)
                if each.level_one:
                    chain += [*found, _RETRIEVAL]
                else:
                    own += [*found, _TARGET]
                    chain = []
            names.append(own)
        return names
