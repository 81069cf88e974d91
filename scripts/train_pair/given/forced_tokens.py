"""Computes the distributions of the draft and of level 1 for given tokens instead of drawn ones.

The models, views and kernels are those of decoding. A pass consists of :func:`offer`; then of
:func:`draft_probs`, :func:`retrieval_logits` and ``check.ties.target_logits`` in this order, because each
overwrites the KV slots of the level below; then of :func:`commit`. A drafter does not read tokens that were
committed in passes without :func:`draft_probs`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triforce_tree.check.ties import chain_of
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import DraftStage
from triforce_tree.kernels.attention.plan import pack_mask


def offer(program: DecodingProgram, text: Sequence[int], coming: Sequence[int]) -> None:
    """Writes the next tokens after a sequence, without committing them.

    Args:
        program: a program whose cache holds one sequence.
        text: all tokens of the sequence.
        coming: the next tokens; at most as many as a draft chain holds.
    """
    state, root = program.state, len(text) - 1
    # The root is written too: after a commit it is a given token, which no stage has written.
    given = torch.tensor([text[-1], *coming], dtype=torch.int64, device=program.device)
    state.tokens[0, root : root + len(given)] = given
    if program.drafter is not None:
        program.drafter.prepare([text], resumed=False)


def draft_probs(program: DecodingProgram, count: int, generator: torch.Generator) -> Tensor | None:
    """Returns the drafter's distributions of the next token after the root and after each offered token.

    Returns:
        fp32 ``[count, V]``, after the root and the first ``count - 1`` tokens; None for a deterministic
        drafter.
    """
    stage, state = program.stage("draft"), program.state
    assert isinstance(stage, DraftStage)
    if stage.drafter.deterministic:
        return None
    probs = []
    for offset in range(count):
        state.chain.fill_(offset)
        program.run("draft", generator)
        probs.append(stage.tree.probs[0, 0].clone())
    state.chain.zero_()
    return torch.stack(probs)


def retrieval_logits(program: DecodingProgram, tokens: Sequence[int], step: int) -> Tensor:
    """Returns the logits of level 1, ``[T, V]``, over a chain of T tokens, the first of which is the root.

    Each forward processes a new root and the tokens after it, and attends to earlier tokens through the KV
    slots that level 1 wrote for them. Chunks are selected in the same forwards, by the same queries as in
    decoding.

    Args:
        program: a program of three levels whose cache holds one sequence, which ends with ``tokens[0]``.
        step: tokens of one forward; at most the nodes of the drafter's trees.
    """
    view = program.retrieval
    assert view is not None, "a program of three levels has a retrieval view"
    nodes, device = program.shapes[0].nodes, program.device
    step = min(step, nodes)
    own_bits = pack_mask(torch.eye(nodes, dtype=torch.bool, device=device))
    logits: list[Tensor] = []
    integers: dict[str, Any] = {"dtype": torch.int64, "device": device}
    for number, first in enumerate(range(0, len(tokens), step)):
        part = list(tokens[first : first + step])
        count = len(part)
        tree = chain_of(program, count)
        # Every forward of level 1 has the same number of nodes; no other node attends to the unused ones.
        ids, depths = torch.zeros(1, nodes, **integers), torch.zeros(nodes, **integers)
        words = own_bits[None].clone()
        ids[0, :count], depths[:count] = torch.tensor(part, device=device), tree.depths
        words[:, :count, : tree.mask_words.shape[2]] = tree.mask_words
        root = program.state.length + first
        view.refreshing = view.config.chooses(number)
        if view.refreshing:
            view.refresh(root, program.state.length)
        view.begin(root, words)
        logits.append(program.retrieval_model(ids, root[:, None] + depths, view)[0, :count].clone())
    return torch.cat(logits)


def commit(program: DecodingProgram, tokens: Sequence[int]) -> None:
    """Commits tokens after the root of the last ``target_logits``; the last of them becomes the root."""
    state, count = program.state, len(tokens)
    before = state.length.clone()
    state.length += count
    if program.states is not None:
        program.states.commit(count)
    if program.retrieval is not None:
        chunk = program.retrieval.config.chunk
        program.retrieval.update_chunk_means(before // chunk, count // chunk + 2)
    program.cache.committed([tokens], with_means=program.retrieval is not None)
