"""A drafter of one's own: propose that each token is followed by what followed it the last time."""

from itertools import pairwise
from pydoc_data.topics import topics

import triforce_tree


class Bigrams:
    """Deterministic given the text, so it reports no probabilities: honest by construction."""

    name, tree, features = "bigrams", "chain:4", ()
    deterministic, capturable = True, False  # it looks at the text on the host

    def bind(self, state):
        pass

    def start(self, texts):
        self.followers = [dict(pairwise(text)) for text in texts]
        self.seen = [len(text) for text in texts]

    def prepare(self, texts, resumed):
        for b, text in enumerate(texts):
            if text is not None:
                self.followers[b].update(pairwise(text[self.seen[b] - 1 :]))
                self.seen[b] = len(text)

    def propose(self, state, tree, sampler):
        tree.tokens.fill_(-1)
        for b, token in enumerate(state.newest.tolist()):
            chain = [token]
            while len(chain) < tree.nodes and chain[-1] in self.followers[b]:
                chain.append(self.followers[b][chain[-1]])
            tree.tokens[b, : len(chain)] = tree.tokens.new_tensor(chain)


engine = triforce_tree.load(drafter=Bigrams(), levels=2)
out = engine.generate("\n\n".join(topics.values())[:20_000], max_new_tokens=128)
print(out.text)
for level in out.levels:
    print(level.name, level.forwards, level.acceptance_rate, level.mean_accepted_length)
