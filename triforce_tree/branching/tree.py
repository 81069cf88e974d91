"""A text that branches: every node stores its keys and values once, and all leaves are decoded together."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce_tree.branching.decoding import Leaf, decode
from triforce_tree.branching.node import Node
from triforce_tree.branching.options import check_engine, prepared_request
from triforce_tree.branching.pages import page_slots, slot_bytes
from triforce_tree.branching.scoring import fill_logprobs
from triforce_tree.branching.slots import TreeSlots
from triforce_tree.requests.inputs import Inputs, check_tokens, prompt_of
from triforce_tree.requests.kept_state import why_in_step
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.tokenized_texts import text_ids
from triforce_tree.runtime.stats import Progress
from triforce_tree.text.new_text import new_text
from triforce_tree.text.vocabulary import Vocabulary
from triforce_tree.verify.draws import sequence_seed

RESERVE = 16_384
"""KV slots after the prompt that a tree has by default."""


@dataclass(frozen=True)
class Branch:
    """The result of :meth:`TextTree.generate` for one leaf.

    Attributes:
        node: the leaf.
        tokens: the new token ids, an EOS token included.
        text: what they add to the leaf's text, without special tokens and the EOS token; None without a
            tokenizer.
        logprobs: the log-probability of each new token under the target's raw logits, which no sampling
            option changes.
        finish_reason: "eos", "stop" or "length".
    """

    node: Node
    tokens: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: str


class TextTree:
    """A tree of texts. Its root begins with a prompt, and each node continues its parent's text.

    A node without children can be extended by given or by generated tokens; :meth:`fork` gives it children.
    The keys and values of a node's tokens are computed when they are first needed, and stored once for all
    texts that go through the node; :meth:`prune` frees them. All leaves of a call are decoded together: a
    forward computes one token of each, with one attention call per layer that reads every node once (DeFT,
    arXiv 2404.00242). Nothing is drafted.

    Args:
        engine: its target and tokenizer are used.
        prompt: one text: text, token ids or messages.
        max_bytes: memory for the keys and values of the whole tree, allocated at once; by default enough for
            the prompt and ``RESERVE`` more tokens.
        progress: called with the number of prompt tokens of each chunk as it is prefilled.

    Attributes:
        root: the node that begins with the prompt.
        max_bytes: the bytes of memory for keys and values.
        decode_seconds: the seconds of the last :meth:`generate`, without the preparation of its options.

    Raises:
        TreeFullError: ``max_bytes`` does not hold the prompt.
        UnsupportedModelError: the target has recurrent layers, whose states cannot be shared.
        ValueError: the prompt is bad, the engine offloads its cache or keeps it in 8 bits, or there are
            several ranks.
    """

    def __init__(
        self,
        engine: LoadedEngine,
        prompt: Inputs,
        max_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_engine(engine)
        target = engine.target
        tokens = prompt_of(target, engine.tokenizer, prompt)
        self._engine, self._target, self._prompt_tokens = engine, target, len(tokens)
        self._check_length(0, 1)
        bytes_of_slot = slot_bytes(target)
        if max_bytes is not None and max_bytes < bytes_of_slot:
            raise ValueError(
                f"max_bytes={max_bytes} holds no token, whose keys and values take {bytes_of_slot} bytes; "
                "leave it out, or give more"
            )
        slots = len(tokens) + RESERVE if max_bytes is None else max_bytes // bytes_of_slot
        self.root, self.decode_seconds = Node(None, tokens), 0.0
        with engine.generation():
            self._slots = TreeSlots(engine, slots // page_slots(target))
            self.max_bytes = self._slots.pages.count * self._slots.pages.page_bytes
            self._choose_rope()
            self._function = target.function_key()
            self._slots.fill({self.root: len(tokens) - 1}, progress)

    def fork(self, node: Node, n: int = 2) -> list[Node]:
        """Returns ``n`` new children of a node, without tokens. A node may be forked several times.

        Raises:
            ValueError: ``n`` is less than 1, or the node is not in the tree.
        """
        if n < 1:
            raise ValueError(f"n={n} must be at least 1")
        self._check_nodes([node])
        children = [Node(node) for _ in range(n)]
        node.children += children
        return children

    def extend(self, node: Node, tokens: str | Sequence[int]) -> Node:
        """Appends tokens, or a text without special tokens, to a node without children. Returns the node.

        Raises:
            ValueError: it has children, or a token is not in the vocabulary.
            TreeFullError: there are too few KV slots for the tokens.
        """
        self._check_nodes([node], leaves=True)
        if isinstance(tokens, str):
            if self._engine.tokenizer is None:
                raise ValueError("a text needs a tokenizer: load(..., tokenizer=...)")
            tokens = text_ids(self._engine.tokenizer, tokens, add_special_tokens=False)
        new = [int(token) for token in tokens]
        if new:
            check_tokens([new], self._target.vocab_size)
            self._check_length(node.stop, len(new))
            self._slots.pages.reserve({node: len(node.tokens) + len(new)})
            node.append(new)
        return node

    def generate(
        self,
        nodes: Node | Sequence[Node],
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> list[Branch]:
        """Continues leaves, all together, each by exactly the target's distribution after its text.

        Args:
            nodes: leaves, which are extended in place.
            max_new_tokens: most new tokens of each leaf; the default is that of :meth:`Engine.generate`.
            seed: leaf number i has the text that :meth:`Engine.generate` gives it alone with
                ``seed=[verify.draws.sequence_seed(seed, i)]``. By default the seed is drawn from torch's
                global generator.
            options: of :meth:`Engine.generate`: temperature, top_k, top_p, do_sample, eos_token_id,
                stop_strings, logits_processor, ...; each means what it does for the leaf's text alone.

        Returns:
            One result per node, in the order of ``nodes``.

        Raises:
            ValueError: a node has children or was given twice, an option is not supported, or logits are NaN.
            TreeFullError: there are too few KV slots for so many tokens of every leaf. Nothing was generated.
        """
        given = [nodes] if isinstance(nodes, Node) else list(nodes)
        self._check_nodes(given, leaves=True)
        own_seed = checked("seed", seed)
        if own_seed is None:
            own_seed = int(torch.randint(2**62, (), device="cpu"))
        options = {**options, "max_new_tokens": max_new_tokens}
        stops = {node.stop for node in given}
        requests = {stop: prepared_request(self._engine, stop, options) for stop in stops}
        for stop, request in requests.items():
            if request.outputs:
                raise ValueError(
                    "output_scores and output_logits are not supported for leaves of a tree; read the "
                    "logprobs of nodes, or use score"
                )
            if len(given) > 1 and (why := why_in_step(request)) is not None:
                raise ValueError(
                    f"{len(given)} leaves cannot be generated in one call: {why}; generate them one by one"
                )
            self._check_length(stop, request.new_tokens)
        leaves = []
        for number, node in enumerate(given):
            request = requests[node.stop]
            leaf_seed = sequence_seed(own_seed, number)
            sequence = request.sequence(node.text_tokens, request.new_tokens, number, leaf_seed)
            leaves.append(Leaf(node, sequence, request.to_probs))
        begun = time.perf_counter()
        with self._computing():
            decode(self._slots, leaves)
        self.decode_seconds = time.perf_counter() - begun
        tokenizer = self._engine.tokenizer
        vocabulary = None if tokenizer is None else Vocabulary(tokenizer)
        return [_branch(leaf, vocabulary) for leaf in leaves]

    def score(self, nodes: Node | Sequence[Node]) -> list[Tensor]:
        """Returns the log-probabilities of the nodes' own tokens after all earlier tokens, under the target's
        raw logits.

        Returns:
            fp32 ``[tokens of the node]`` for each, in host memory; 0 for the first token of the whole text,
            which nothing predicts.

        Raises:
            ValueError: a node is not in the tree, or logits are NaN.
            TreeFullError: there are too few KV slots for the tokens that the scores depend on.
        """
        given = [nodes] if isinstance(nodes, Node) else list(nodes)
        self._check_nodes(given)
        with self._computing():
            if self.root in given:
                self.root.logprobs[0] = 0.0
            fill_logprobs(self._slots, given)
        return [torch.tensor(node.logprobs, dtype=torch.float32, device="cpu") for node in given]

    def prune(self, node: Node) -> None:
        """Removes a node and its descendants, and frees their keys and values.

        Raises:
            ValueError: the node is the root, or not in the tree.
        """
        self._check_nodes([node])
        if node.parent is None:
            raise ValueError("the root cannot be pruned; close the tree instead")
        self._slots.release(node)

    def text(self, node: Node) -> str:
        """Returns the whole text up to the end of a node, without special tokens.

        Raises:
            ValueError: there is no tokenizer.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise ValueError("a text needs a tokenizer: load(..., tokenizer=...)")
        return str(tokenizer.decode(node.text_tokens, skip_special_tokens=True))

    @property
    def leaves(self) -> list[Node]:
        """Returns the nodes without children, in depth-first order."""
        found, stack = [], [self.root]
        while stack:
            node = stack.pop()
            stack += reversed(node.children)
            if not node.children:
                found.append(node)
        return found

    @property
    def used_bytes(self) -> int:
        """Returns the bytes of the pages that nodes own; at most ``max_bytes``."""
        pages = self._slots.pages
        return (pages.count - pages.free) * pages.page_bytes

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self._engine.generation():
            self._choose_rope()
            if self._target.function_key() != self._function:
                raise ValueError(
                    "the target's weights have changed since the tree was made, and its keys and values are "
                    "those of the old ones; make another tree"
                )
            yield

    def _choose_rope(self) -> None:
        if self._target.length_rope is not None:
            self._target.length_rope.choose_for_texts([self._prompt_tokens])

    def _check_length(self, tokens: int, new: int) -> None:
        """Raises ValueError where a text of ``tokens + new`` exceeds the model's positions."""
        prompt = self._prompt_tokens
        self._target.check_length(prompt, max(0, tokens - prompt) + new)

    def _check_nodes(self, nodes: Sequence[Node], leaves: bool = False) -> None:
        for node in nodes:
            if not isinstance(node, Node):
                raise ValueError(f"{node!r} is no node; give tree.root, or what fork returned")
            if not node.alive or node.path[0] is not self.root:
                raise ValueError(f"{node} is not in this tree: it was pruned, or belongs to another tree")
            if leaves and node.children:
                raise ValueError(
                    f"{node} has children, which continue its text as it is; fork it, and use the new child"
                )
        if leaves and len(set(nodes)) < len(nodes):
            raise ValueError("a node was given twice; fork it, and give its children")


def _branch(leaf: Leaf, vocabulary: Vocabulary | None) -> Branch:
    sequence = leaf.sequence
    new, text = sequence.new, None
    if vocabulary is not None:
        text = new_text(vocabulary, sequence.prompt, new, sequence.ending.stop_tokens)
    logprobs = [value for value in leaf.node.logprobs[-len(new) :] if value is not None]
    return Branch(leaf.node, new, text, logprobs, str(sequence.finish_reason))
