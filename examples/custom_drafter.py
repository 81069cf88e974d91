"""A drafter of your own: it proposes after each token the one that followed its last occurrence.

``triforce_tree.drafters.base.Drafter`` describes the attributes and methods.
"""

from itertools import pairwise
from pydoc_data.topics import topics

import triforce_tree


class Bigrams(triforce_tree.Drafter):
    """Proposals are a function of the committed tokens: deterministic, so no distributions are reported."""

    name = "bigrams"  # in statistics
    tree = "chain:4"  # a tree of at most 4 proposed tokens, one below the other
    deterministic = True

    def start(self, sequences):
        """New prompts: remember for each token the one that followed it last."""
        self.followers = [dict(pairwise(sequence)) for sequence in sequences]
        self.known = [len(sequence) for sequence in sequences]

    def prepare(self, sequences, resumed):
        """The sequences have grown: add the new pairs of tokens."""
        for b, sequence in enumerate(sequences):
            if sequence is not None:  # it has not ended
                self.followers[b].update(pairwise(sequence[self.known[b] - 1 :]))
                self.known[b] = len(sequence)

    def propose(self, state, tree, sampler):
        """Writes the newest token as the root and up to four tokens after it; -1 marks unused nodes."""
        tree.tokens.fill_(-1)
        for b, newest in enumerate(state.newest.tolist()):
            chain = [newest]
            while len(chain) < tree.nodes and chain[-1] in self.followers[b]:
                chain.append(self.followers[b][chain[-1]])
            tree.tokens[b, : len(chain)] = tree.tokens.new_tensor(chain)


engine = triforce_tree.load(drafter=Bigrams(), levels=2)
out = engine.generate("\n\n".join(topics.values())[:20_000], max_new_tokens=128)
print(out.text)
for level in out.levels:
    # The drafter proposes only, and has no rate.
    rate = "" if level.acceptance_rate is None else f", {level.acceptance_rate:.0%} accepted"
    print(f"{level.name}: {level.forwards} passes{rate}")
