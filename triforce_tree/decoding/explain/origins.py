"""Which level proposed each token of a text."""

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import ChainVerifyStage, RetrievalVerifyStage


class OriginTally:
    """Names the level that first proposed each committed token of one sequence.

    Call it after each stage, before the next one runs; it waits for the device. A token of the drafter's that
    both upper levels accepted is the drafter's; one that the retrieval level added, runner-ups included, and
    the target accepted is the retrieval level's; the last token of every pass is the target's own.

    Args:
        program: of one sequence.

    Attributes:
        names: of levels as in :class:`~triforce_tree.runtime.stats.LevelStats`, one for each token committed
            so far. The last pass may have committed more tokens than the sequence was to have.
    """

    def __init__(self, program: DecodingProgram) -> None:
        self._program = program
        self._drafter = program.drafter.name if program.drafter is not None else ""
        self._chain: list[str] = []
        self.names: list[str] = []

    def __call__(self, stage: str) -> None:
        # Stages of other shapes of trees: ``draft/1``.
        if stage.partition("/")[0] == "draft":
            return
        judged = self._program.stage(stage)
        acceptance = self._program.acceptance(stage)
        count = int(acceptance.counts[0])
        if isinstance(judged, RetrievalVerifyStage):
            self._chain += [self._drafter] * (count - 1) + ["retrieval"]
            return
        if isinstance(judged, ChainVerifyStage):
            nodes = acceptance.path[0, 1:count].tolist()
            longest = judged.state.max_draft_tokens
            # Nodes after those of the chain are runner-ups, which the retrieval level drew.
            self.names += [self._chain[n - 1] if n <= longest else "retrieval" for n in nodes]
        else:
            self.names += [self._drafter] * (count - 1)
        self.names.append("target")
        self._chain = []
