"""A drafter of one's own: propose that the text goes on as it did after the same token before."""

from pydoc_data.topics import topics

import triforce_tree
from triforce_tree.decoder import Ending
from triforce_tree.sampling import TokenLaw
from triforce_tree.stats import LevelStats
from triforce_tree.token_tree import Context, TokenTree, chain


class Echo:
    """Deterministic given the context, so it reports no laws: honest by construction."""

    def __init__(self) -> None:
        self.stats = [LevelStats("echo")]

    def prefill(self, context: Context) -> None: ...

    def commit(self, context: Context) -> None: ...

    def propose(self, context: Context) -> TokenTree:
        tokens, last = list(context), context[-1]
        at = next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == last), len(tokens))
        return chain([last, *tokens[at + 1 : at + 5]])


engine = triforce_tree.load(levels=2)
prompt = engine.tokenizer(topics["import"])["input_ids"]
with engine.hierarchy.active():
    decoder = engine.hierarchy.decoder(TokenLaw(greedy=True), 0, len(prompt), 64, frozenset())
    decoder.drafter = Echo()
    for tokens in decoder.decode(decoder.prefill(prompt), Ending(max_new_tokens=64)):
        print(engine.tokenizer.decode(tokens), end="", flush=True)
print("\n", decoder.levels[-1])
