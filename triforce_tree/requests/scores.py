"""The target's distributions at emitted tokens: raw logits, processed scores and log-probabilities.

They are computed from the logits of the forward that verified each token, so they need no extra forward.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from typing import Any

import torch
from torch import Tensor

from triforce_tree.decoding.loop import Fresh
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.kernels.probs.masked import mask_logits
from triforce_tree.requests.request import Request
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.verify.sampling import ProbsFromLogits


class EmittedScores:
    """Collects the requested logits, scores and log-probabilities of emitted tokens, pass by pass.

    Logits and scores each take 4 V bytes per emitted token: 0.5 MB if V is 128,256.

    Args:
        request: requests the values. Its processors turn logits into scores, and its prompts are the first
            sequences; :meth:`begin` adds more.
        on_host: whether the values are kept and returned in host memory. Otherwise they are kept on the
            target's device, and returned on the device of the given prompts.
    """

    def __init__(self, request: Request, on_host: bool) -> None:
        self._device = torch.device("cpu") if on_host else request.input_ids.device
        self._returned = torch.device("cpu") if on_host else request.given_ids.device
        # Maps a name to a list for each sequence, with a tensor [V] or [] for each token.
        self._values: dict[str, list[list[Tensor]]] = {name: [] for name in ("logits", "scores", "logprobs")}
        self._wanted: list[frozenset[str]] = []
        self._texts: list[Tensor] = []
        for sequence in request.sequences:
            self.begin(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Adds a sequence, whose number is the next one."""
        for kept in self._values.values():
            kept.append([])
        self._wanted.append(sequence.outputs)
        self._texts.append(id_tensor(sequence.prompt))

    def add(self, fresh: Fresh, logits_of: Callable[[int], Tensor]) -> None:
        """Adds the tokens of a pass. If memory runs out, none of them is added.

        Args:
            fresh: the sequences that got new tokens, and these tokens.
            logits_of: returns the logits that the first n tokens were chosen by, fp32 ``[B, n, V]``.
        """
        fresh = [(sequence, new) for sequence, new in fresh if self._wanted[sequence.number]]
        if not fresh:
            return
        logits = logits_of(max(len(new) for _, new in fresh))
        parts: list[tuple[list[Tensor], Tensor]] = []
        texts: dict[int, Tensor] = {}
        for sequence, new in fresh:
            number, own = sequence.number, logits[sequence.index, : len(new)]
            known = self._texts[number].to(logits.device)
            text = texts[number] = torch.cat([known, torch.tensor(new, device=logits.device)])
            words = None
            wanted = self._wanted[number]
            if "scores" in wanted and sequence.matcher is not None:
                words = sequence.matcher.masks_of_newest(new, own.shape[1]).to(own.device)
            for name in wanted:
                kept = self._values[name]
                result = self._result(name, own, text, words, sequence.to_probs)
                parts.append((kept[number], result.to(self._device)))
        for own_values, part in parts:
            own_values += part.unbind()
        for number, text in texts.items():
            self._texts[number] = text

    def keep(self, number: int, values: Mapping[str, Tensor]) -> None:
        """Adds the values of a sequence's new tokens that were computed elsewhere, ``[n, V]`` or ``[n]``."""
        for name in self._wanted[number]:
            self._values[name][number] += values[name].to(self._device).unbind()

    def _result(
        self,
        name: str,
        logits: Tensor,
        text: Tensor,
        words: Tensor | None,
        to_probs: ProbsFromLogits | None,
    ) -> Tensor:
        """Returns ``[n, V]`` or ``[n]``: the values of the last n tokens of ``text``, which were chosen by
        ``logits`` ``[n, V]`` with the sampling options ``to_probs`` under the masks ``words`` of a grammar.
        """
        count = len(logits)
        if name == "logprobs":
            return logits.log_softmax(-1).gather(1, text[-count:, None])[:, 0]
        # A copy: a view would keep the rows of all other sequences, and processors may write into it.
        logits = logits.clone()
        if name == "logits":
            return logits
        if words is not None:
            logits = mask_logits(logits, words)
        assert to_probs is not None, "sequences of a request have sampling options"
        return to_probs.scores(logits, lambda: [text[: n - count] for n in range(count)])

    def newest(self, b: int, count: int) -> dict[str, list[Tensor]]:
        """Returns the requested values of the last ``count`` tokens of sequence b, by name: one tensor
        ``[V]`` or ``[]`` per token.
        """
        return {name: self._values[name][b][len(self._values[name][b]) - count :] for name in self._wanted[b]}

    def results(self, numbers: Sequences[int]) -> dict[str, Any]:
        """Returns the output fields of these sequences by name, and removes the values of these sequences."""
        found: dict[str, Any] = {
            name: tuple(each.to(self._returned) for each in by_position([kept[n] for n in numbers]))
            for name, kept in self._values.items()
            if any(name in self._wanted[n] for n in numbers)
        }
        for n in numbers:
            self._texts[n] = self._texts[n][:0]
        if "logprobs" in found:
            nothing = torch.zeros(len(numbers), 0, device=self._returned)
            found["logprobs"] = torch.stack(found["logprobs"], 1) if found["logprobs"] else nothing
        return found


def by_position(values: Sequences[list[Tensor]]) -> tuple[Tensor, ...]:
    """Returns ``[B, ...]`` for every position of the longest sequence; shorter sequences are filled with 0.

    ``values``, indexed by sequence and position, is emptied on the way, so that at most one position is in
    memory twice.
    """
    zero = next((torch.zeros_like(own[0]) for own in values if own), None)
    for own in values:
        own.reverse()
    positions = []
    while zero is not None and any(values):
        positions.append(torch.stack([own.pop() if own else zero for own in values]))
    return tuple(positions)
