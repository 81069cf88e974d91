"""What proposed each token of a text."""

from collections.abc import Sequence

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import ChainVerifyStage, RetrievalVerifyStage
from triforce_tree.drafters.suffix_matching import SuffixMatching

MATCHED = SuffixMatching.name
"""Names matched tokens, in the place of a tree or beside one, as where suffix matching is the drafter."""


class OriginTally:
    """Names what first proposed each committed token of one sequence: a level, or ``MATCHED``.

    Call it after each stage, before the next one runs; it waits for the device. A token of the drafter's that
    all levels which judged it accepted is the drafter's, and a matched one that is no node of its tree
    ``MATCHED``; one that the retrieval level added, runner-ups included, and the target accepted is the
    retrieval level's; the last token of every pass is the target's own.

    Args:
        program: of one sequence.

    Attributes:
        names: ``MATCHED``, or of levels as in :class:`~triforce_tree.runtime.stats.LevelStats`, one for each
            token committed so far. The last pass may have committed more tokens than the sequence was to
            have.
    """

    def __init__(self, program: DecodingProgram) -> None:
        self._program = program
        self._drafter = program.drafter.name if program.drafter is not None else ""
        self._chain: list[str] = []
        self.names: list[str] = []

    def __call__(self, stage: str) -> None:
        # Stages of other shapes of trees: ``draft/1``.
        name, _, number = stage.partition("/")
        if name == "draft":
            return
        judged = self._program.stage(stage)
        acceptance = self._program.acceptance(stage)
        nodes = acceptance.path[0, 1 : int(acceptance.counts[0])].tolist()
        if isinstance(judged, RetrievalVerifyStage):
            self._chain += [*self._of_tree(nodes, int(number or 0)), "retrieval"]
            return
        if isinstance(judged, ChainVerifyStage):
            for node in nodes:
                if (drafted := judged.laid_out.origin(node)) is not None:
                    self.names += self._of_tree([drafted], 0)
                else:
                    # Nodes between the chain and that tree are runner-ups, which the retrieval level drew.
                    chained = node <= judged.state.max_draft_tokens
                    self.names.append(self._chain[node - 1] if chained else "retrieval")
        else:
            self.names += self._of_tree(nodes, int(number or 0))
        self.names.append("target")
        self._chain = []

    def _of_tree(self, nodes: Sequence[int], number: int) -> list[str]:
        """What proposed nodes of a tree of this shape."""
        shape = self._program.shapes[number]
        return [MATCHED if shape.matched or node >= shape.tree_nodes else self._drafter for node in nodes]
