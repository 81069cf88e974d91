"""Which stages a program has."""

from typing import TYPE_CHECKING

from triforce_tree.decoding.stages import (
    ChainVerifyStage,
    DraftStage,
    PlainStage,
    RetrievalVerifyStage,
    Stage,
    TreeVerifyStage,
)
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.verifier import Verifier

if TYPE_CHECKING:
    from triforce_tree.decoding.program import DecodingProgram


def stages_of(program: "DecodingProgram", to_probs: DeviceProbs) -> dict[str, Stage]:
    """The stages of a program for one kind of sampling, by name."""
    state, vocabulary = program.state, program.target.vocab_size
    stages: dict[str, Stage] = {}
    if program.drafter is not None:
        draft = DraftStage(program.drafter, to_probs, state, vocabulary)
        stages["draft"] = draft
        nodes = draft.tree.nodes
        view = program.retrieval_view or program.gathered_view
        if view is not None:
            verifier = Verifier(program.retrieval_model, to_probs, state, nodes, vocabulary)
            for name, choosing in (("retrieval_refresh", True), ("retrieval", False)):
                stages[name] = RetrievalVerifyStage(draft, verifier, view, program.runner_ups, choosing)
            stages["target"] = ChainVerifyStage(
                program.full,
                program.full_view,
                program.retrieval_view,
                to_probs,
                state,
                vocabulary,
                program.runner_ups,
            )
        if view is None or program.two_levels:
            stages["target_tree" if view is not None else "target"] = TreeVerifyStage(
                draft, Verifier(program.full, to_probs, state, nodes, vocabulary), program.full_view
            )
    stages["plain"] = PlainStage(program.full, program.cache.token_view, to_probs, state, vocabulary)
    return stages
