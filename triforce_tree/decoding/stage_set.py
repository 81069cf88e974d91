"""Names the stages of a program, and makes them."""

from triforce_tree.decoding.buffers import Buffers
from triforce_tree.decoding.stages import (
    ChainVerifyStage,
    DraftStage,
    PlainStage,
    RetrievalVerifyStage,
    Stage,
    TreeVerifyStage,
)
from triforce_tree.trees.device_shapes import pass_limits
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.verifier import Verifier


def stage_name(name: str, shape: int) -> str:
    """Returns the name of a stage with trees of one shape: ``draft``, or ``draft/1`` for shape 1."""
    return f"{name}/{shape}" if shape else name


def chain_nodes(program: Buffers) -> int:
    """Returns the tokens per sequence in the target's forward over a chain of full length."""
    return pass_limits(program.config, program.levels).chain_nodes(program.runner_ups)


def drafted(program: Buffers, levels: int, rounds: int, shape: int) -> tuple[int, int]:
    """Returns the forwards of the drafter in a pass, and the tokens that it proposes to each sequence.

    Args:
        levels, rounds, shape: the kind of the pass, see ``PassKind``.
    """
    assert program.drafter is not None
    trees = [program.shapes[shape]] * rounds
    if levels == 3 and program.tail_tree:
        trees.append(program.shapes[0])
    # A deterministic drafter proposes a whole tree in one forward, and matched tokens take no forward.
    one = program.drafter.deterministic
    forwards = sum(0 if tree.matched else 1 if one else len(tree.widths) for tree in trees)
    return forwards, sum(tree.nodes - 1 for tree in trees)


def stages_of(program: Buffers, to_probs: DeviceProbs) -> dict[str, Stage]:
    """Returns the stages of a program for one kind of sampling, by name, with trees of the first shape."""
    state, vocabulary = program.state, program.target.vocab_size
    stages: dict[str, Stage] = {}
    if program.drafter is not None:
        stages |= tree_stages(program, to_probs, 0)
        if program.levels == 3:
            tail = None
            if program.tail_tree:
                tail = DraftStage(program.drafter, to_probs, state, vocabulary, probs=state.chain_probs)
            stages["target"] = ChainVerifyStage(
                program.full,
                program.full_view,
                program.retrieval,
                to_probs,
                state,
                vocabulary,
                program.runner_ups,
                tail,
            )
    stages["plain"] = PlainStage(program.full, program.cache.token_view, to_probs, state, vocabulary)
    return stages


def tree_stages(program: Buffers, to_probs: DeviceProbs, shape: int) -> dict[str, Stage]:
    """Returns the stages that propose and verify trees of one shape."""
    assert program.drafter is not None
    state, vocabulary = program.state, program.target.vocab_size
    draft = DraftStage(program.drafter, to_probs, state, vocabulary, shape)
    stages: dict[str, Stage] = {"draft": draft}
    nodes = draft.tree.nodes
    view = program.retrieval
    if view is not None and not program.shapes[shape].matched:
        if shape:
            view = view.resized(nodes, draft.tree.depths.tolist())
        verifier = Verifier(program.retrieval_model, to_probs, state, nodes, vocabulary)
        for name, choosing in (("retrieval_refresh", True), ("retrieval", False)):
            stages[name] = RetrievalVerifyStage(draft, verifier, view, program.runner_ups, choosing)
    if view is None or program.two_levels:
        verifier = Verifier(program.full, to_probs, state, nodes, vocabulary)
        stages["target_tree" if view is not None else "target"] = TreeVerifyStage(
            draft, verifier, program.full_view
        )
    return {stage_name(name, shape): stage for name, stage in stages.items()}
