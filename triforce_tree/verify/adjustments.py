"""Changes of scores before the temperature applies: biases, forbidden tokens and penalties.

Each sequence of a batch has its own, in buffers on the device. What depends on the preceding tokens is
computed for every node of a tree from the tokens up to that node.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from triforce_tree.runtime.devices import overwrite, sent
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.verify.paths import NodePaths
from triforce_tree.verify.sampling_options import SamplingKind, SamplingOptions, words_of

# This id stands for any token, and for the absence of a token.
_ANY = -2


class Adjustments:
    """Adjusts the scores of the nodes of B trees.

    Args:
        kind: the adjustments that there are.
        batch: B.
        vocabulary: V.
        device: device of the scores.
        masked: whether a grammar may have forbidden tokens before.
    """

    def __init__(
        self, kind: SamplingKind, batch: int, vocabulary: int, device: torch.device, masked: bool = False
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        self._kind, self._masked = kind, masked
        if kind.biased or kind.words[0]:
            self._bias, self._stops = zeros(vocabulary), zeros(vocabulary, dtype=torch.bool)
            self._least_tokens = zeros(dtype=torch.int64)
        if kind.words[0]:
            words, length = kind.words
            self._before, self._last = (zeros(words, n, dtype=torch.int64) for n in (length - 1, 1))
            self._word_bias = zeros(words)
        if kind.penalized:
            self._in_prompt, self._counts = zeros(vocabulary, dtype=torch.bool), zeros(vocabulary)
            self._repetition, self._frequency, self._presence = (zeros(1, 1) for _ in range(3))

    def begin(self, index: int, options: SamplingOptions, tokens: Sequence[int]) -> None:
        """Sets the options of the sequence at a batch index.

        Args:
            tokens: all committed tokens of the sequence.
        """
        kind = self._kind
        if kind.biased or kind.words[0]:
            own = self._bias[index].zero_()
            single = [(words[0], bias) for words, bias in options.biases if len(words) == 1]
            # As in transformers, tokens outside of the vocabulary may be forbidden.
            single = [(token, bias) for token, bias in single if 0 <= token < len(own)]
            biases = sent(torch.tensor([bias for _, bias in single], device="cpu"), own.device)
            own.scatter_add_(0, id_tensor([token for token, _ in single], own.device), biases)
            stops = [token for token in options.stops if 0 <= token < len(own)]
            self._stops[index].zero_().index_fill_(0, id_tensor(stops, own.device), True)
            # An assignment of a number would wait for the device.
            self._least_tokens[index].fill_(options.least_tokens)
        if kind.words[0]:
            self._begin_words(index, options)
        if kind.penalized:
            numbers = options.repetition, options.frequency, options.presence
            for buffer, number in zip(
                (self._repetition, self._frequency, self._presence), numbers, strict=True
            ):
                buffer[index].fill_(number)
            self._counts[index].zero_()
            in_prompt = self._in_prompt[index].zero_()
            for known in (sorted(options.padding), tokens[options.repeated_from : options.new_from]):
                in_prompt.index_fill_(0, id_tensor(known, self._counts.device), True)
            self.committed([(index, tokens[options.new_from :])])

    def _begin_words(self, index: int, options: SamplingOptions) -> None:
        own = self._before[index], self._last[index], self._word_bias[index]
        before, last, biases = (torch.zeros_like(part, device="cpu") for part in own)
        before.fill_(_ANY)
        for place, (words, bias) in enumerate(words_of(options)):
            before[place, 1 - len(words) :] = torch.tensor(words[:-1], device="cpu")
            last[place], biases[place] = words[-1], bias
        for part, new in zip(own, (before, last, biases), strict=True):
            overwrite(part, new)

    def committed(self, new: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Counts the tokens that a pass has added to the sequences at these batch indices."""
        if not self._kind.penalized:
            return
        rows = [(index, token) for index, tokens in new for token in tokens]
        if rows:
            places = sent(torch.tensor(rows, device="cpu"), self._counts.device)
            ones = torch.ones(len(rows), device=self._counts.device)
            self._counts.index_put_((places[:, 0], places[:, 1]), ones, accumulate=True)

    def __call__(self, scores: Tensor, paths: NodePaths) -> Tensor:
        """Returns the adjusted scores, fp32 ``[B, F, V]``, of the nodes at the ends of ``paths``."""
        kind = self._kind
        if kind.biased or kind.words[0]:
            biased = scores + self._biases(scores, paths)
            if self._masked:
                # Where the options forbid all that a grammar allows, as the end of its text, the grammar
                # decides: softmax of a row without a token would be NaN.
                empty = biased.amax(-1, keepdim=True) == -torch.inf
                biased = torch.where(empty, scores, biased)
            scores = biased
        if kind.penalized:
            tokens, used = paths.uncommitted()
            counts = self._counts[:, None].expand_as(scores)
            counts = counts.scatter_add(2, tokens.clamp_min(0), used.to(counts.dtype))
            seen = (counts > 0) | self._in_prompt[:, None]
            penalty = self._repetition
            repeated = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(seen, repeated, scores)
            scores = scores - self._frequency * counts - self._presence * (counts > 0)
        return scores

    def _biases(self, scores: Tensor, paths: NodePaths) -> Tensor:
        """Returns what is added to the scores, ``[B, F or 1, V]``."""
        early = paths.lengths < self._least_tokens[:, None]
        bias = self._bias[:, None].masked_fill(self._stops[:, None] & early[..., None], -torch.inf)
        if not self._kind.words[0]:
            return bias
        newest, before = paths.newest(self._before.shape[2]), self._before[:, None]
        complete = ((newest[:, :, None] == before) | (before == _ANY)).all(-1)
        added = torch.where(complete, self._word_bias[:, None], 0.0)
        last = self._last[..., 0][:, None].expand_as(added)
        return bias.expand_as(scores).scatter_add(2, last, added)
