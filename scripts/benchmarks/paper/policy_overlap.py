"""Overlap of level 1 with the target under several retrieval policies, all on the same KV slots."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.paper import policies
from triforce_tree.check import overlap
from triforce_tree.config import RetrievalConfig, load_arguments
from triforce_tree.decoding import forced_tokens
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.engine import Engine
from triforce_tree.kv.tree_attention_view import PagedRetrievalView
from triforce_tree.verify.sampling import ProbsFromLogits

# Every view's chunks divide the pages of one store.
_PAGE = 16
RECENT = RetrievalConfig().recent


@dataclass(frozen=True)
class Policy:
    """A line of the table.

    Attributes:
        name: as the table shows it.
        select: makes the function that selects; None: the default.
        chunk: tokens.
        variance: see ``RetrievalConfig.key_variance``.
        own_query: whether each token selects by its own query, and not by that of its forward's root.
    """

    name: str
    select: Callable[..., Any] | None = None
    chunk: int = 8
    variance: bool = False
    own_query: bool = False


POLICIES = (
    Policy("StreamingLLM", lambda received: policies.newest),
    Policy("H2O", lambda received: policies.HeavyHitters(received, 8)),
    Policy("TriForce: mean keys, one build", lambda received: policies.OneBuild()),
    Policy("Quest", lambda received: policies.Bounds()),
    Policy("mean keys"),
    Policy("mean keys", chunk=16),
    Policy("mean keys", chunk=4),
    Policy("means and variances", chunk=16, variance=True),
    Policy("means and variances", variance=True),
    Policy("means and variances", chunk=4, variance=True),
    Policy("Top-K of all keys", chunk=1),
    Policy("means and variances, own query", variance=True, own_query=True),
    Policy("Top-K of all keys, own query", chunk=1, own_query=True),
)


def views(
    program: DecodingProgram,
    budget: int,
    chosen: Sequence[Policy],
    received: Sequence[Tensor] | None,
    recent: int = RECENT,
) -> Iterator[tuple[Policy, PagedRetrievalView]]:
    """Returns a view of the program's store for each policy."""
    nodes = program.shapes[0].nodes
    for policy in chosen:
        config = RetrievalConfig(
            budget, policy.chunk, recent, key_variance=policy.variance,
            select_chunks=policy.select(received) if policy.select else None,
        )  # fmt: skip
        store = program.store.in_pages(policy.chunk)
        view = PagedRetrievalView(store, nodes, config, program.max_draft_tokens + 1, list(range(nodes)))
        view.update_chunk_means(torch.zeros(1, dtype=torch.int64, device=program.device), view.chunks)
        yield policy, view


@torch.no_grad()
def measure(
    engine: Engine,
    tokens: Sequence[int],
    prompt: int,
    budget: int,
    chosen: Sequence[Policy],
    received: Sequence[Tensor] | None,
    recent: int = RECENT,
) -> list[list[float]]:
    """Returns for each policy the overlap at every token after the prompt.

    Args:
        tokens: a text, given to all levels.
        prompt: how many of them are prefilled.
        budget, recent: of every policy's retrieval cache, in tokens.
        received: of these ``prompt`` tokens by :func:`policies.received_attention`, for H2O.
    """
    at, to_probs = prompt, ProbsFromLogits.at(1.0)
    options = {"levels": 3, "budget": max(budget, 2 * _PAGE + RECENT), "recent": RECENT}
    options["chunk"] = _PAGE
    options["budget"] = -(-options["budget"] // _PAGE) * _PAGE
    found: list[list[float]] = [[] for _ in chosen]
    made = engine.with_options(**load_arguments(options))
    text = list(tokens)
    with made.program([text[:at]], len(tokens) - at, to_probs) as program:
        program.prefill([text[:at]], None)
        of_policies = list(views(program, budget, chosen, received, recent))
        while at < len(tokens):
            stop = min(at + program.max_draft_tokens + 1, len(tokens))
            chain = tokens[at - 1 : stop - 1]
            forced_tokens.offer(program, tokens[:at], chain[1:])
            level_1 = []
            for policy, view in of_policies:
                count = 1 if policy.own_query else overlap.LEVEL_1_STEP
                level_1.append(to_probs(forced_tokens.retrieval_logits(program, chain, count, view), list))
            target = to_probs(forced_tokens.target_logits(program, chain), list)
            for values, q in zip(found, level_1, strict=True):
                values += torch.minimum(q, target).sum(-1).tolist()
            root = program.state.length.clone()
            forced_tokens.commit(program, tokens[at:stop])
            for policy, view in of_policies:
                view.update_chunk_means(root // policy.chunk, (stop - at) // policy.chunk + 2)
            at = stop
    return found
