"""Runs one generation by transformers' own loop over plain passes of the target.

Logits processors and stopping criteria that keep state, or that read all sequences of a batch, are called
exactly as by ``model.generate``, because transformers' own loop calls them: once per new token, with all
sequences, their padding, and pad tokens after the end of finished sequences.
"""

import time
from collections.abc import Sequence as Sequences
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from triforce_tree.decoding.plain_passes import PlainPasses
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.grammar.matching import Matcher, words_of
from triforce_tree.kernels.probs.masked import mask_logits
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.requests.endings import answer_of
from triforce_tree.requests.output import GenerateOutput, output_of
from triforce_tree.requests.own_forward import OwnForward, seeded, with_own_forward
from triforce_tree.requests.request import Request
from triforce_tree.requests.scores import EmittedScores
from triforce_tree.runtime import distributed
from triforce_tree.text.vocabulary import Vocabulary
from triforce_tree.verify.checked_processors import CheckedProcessors, Drawable


def decode_in_step(
    request: Request,
    target: HFModel,
    passes: PlainPasses,
    tokenizer: PreTrainedTokenizerBase | None,
    on_host: bool,
) -> GenerateOutput:
    """Decodes the sequences of a request together, as transformers' ``_sample`` does.

    Args:
        passes: plain passes of the target over these prompts.
        tokenizer: decodes the texts of the output.
        on_host: whether logits, scores and log-probabilities are kept and returned in host memory.
    """
    how, sequences = request.how, request.sequences
    processors = CheckedProcessors(request.processors)
    if request.masked:
        processors.insert(0, _GrammarMasks([each.matcher for each in sequences], request.input_ids.shape[1]))
    if not request.to_probs.greedy:
        processors.append(Drawable(request.to_probs.nan_error(request.masked)))
    forward = _Forward(passes, request.to_probs.removes_nan)
    followed = _Followed(request, forward, on_host)
    loop: Any = with_own_forward(target.model)
    start = time.perf_counter()
    how.streamers.begin(request.input_ids, sequences)
    try:
        with seeded(_seed(request), target.device):
            loop._sample(
                request.input_ids, logits_processor=processors, stopping_criteria=followed,
                generation_config=request.config, **{**request.model_inputs, CACHE: forward},
            )  # fmt: skip
        forward.append(followed.tokens)
        passes.ended([sequence.tokens for sequence in sequences])
    except BaseException:
        passes.forget()
        raise
    padding, seconds = request.pad_token, passes.capture_seconds
    texts = None if tokenizer is None else Vocabulary(tokenizer)
    for sequence, reused in zip(sequences, passes.reused or (), strict=True):
        sequence.reused, sequence.prefill_seconds = reused, passes.prefill_seconds
        sequence.decode_seconds = time.perf_counter() - start - passes.prefill_seconds
        if how.joining is not None:
            ids = request.given_ids.new_tensor([sequence.prompt])
            how.joining.ended(sequence.number, output_of(ids, [sequence], padding, texts, seconds, {}))
    scores = {} if followed.scores is None else followed.scores.results(range(len(sequences)))
    return output_of(request.given_ids, sequences, padding, texts, seconds, scores)


def check_in_step(target: HFModel, request: Request, why: str) -> None:
    """Raises ValueError if these prompts cannot be decoded together; ``why`` is the reason that they must
    be.
    """
    prompts, most = request.prompts, request.how.max_batch
    count, together = len(prompts), f"{why}: the {len(prompts)} sequences must be decoded together"
    if most is not None and most < count:
        raise ValueError(f"{together}, and max_batch={most}; leave it out, or give one prompt a call")
    if target.length_rope is not None and target.length_rope.mixed([len(p) for p in prompts]):
        raise ValueError(f"{together}, and their lengths need different positions; give them one by one")


def _seed(request: Request) -> int | None:
    """Returns the seed of torch's global generators for drawing tokens; None leaves the generators
    unchanged.
    """
    if request.to_probs.greedy:
        return None
    seed, seeds = request.how.seed, request.how.seeds
    if seeds is not None and any(each is not None for each in seeds):
        if len(seeds) > 1:
            raise ValueError(
                f"seed={seeds} has a seed for each sequence, and logits processors or stopping criteria "
                "that keep state need all sequences drawn together; give one seed"
            )
        [seed] = seeds
    if seed is None and distributed.current() is not None:
        seed = distributed.broadcast_object(int(torch.randint(2**62, (), device="cpu")))
    return seed


class _GrammarMasks(LogitsProcessor):
    """Sets the scores of tokens that the grammars of a batch do not allow to -inf.

    Args:
        matchers: the state of each sequence's grammar before its first new token; None without a grammar.
        width: tokens of the prompts, padding included.
    """

    def __init__(self, matchers: Sequences[Matcher | None], width: int) -> None:
        self._matchers = [matcher and matcher.copy() for matcher in matchers]
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the masked scores, ``[B, V]``, of the tokens after ``input_ids``, int64 ``[B, L]``."""
        words = torch.full((len(scores), words_of(scores.shape[1])), -1, dtype=torch.int32, device="cpu")
        newest = input_ids[:, -1].tolist()
        going: dict[int, Matcher] = {}
        for b, matcher in enumerate(self._matchers):
            if matcher is None or matcher.ended:
                continue
            if input_ids.shape[1] > self._width:
                matcher.accept(newest[b : b + 1])
            if not matcher.ended:
                going[b] = matcher
        Matcher.fill(list(going.values()), words, list(going))
        return mask_logits(scores, words.to(scores.device))


class _Forward(OwnForward):
    """Presents plain passes as the forward of a model.

    Args:
        passes: plain passes over the prompts of the batch.
        with_nan: whether logits may contain NaN, which a processor removes.

    Attributes:
        logits: the logits of the last pass, fp32 ``[B, V]``.
    """

    def __init__(self, passes: PlainPasses, with_nan: bool) -> None:
        super().__init__()
        self._passes, self._with_nan, self._begun = passes, with_nan, False
        self.logits: Tensor

    def step(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self._begun:
            self.append(input_ids[:, -1].tolist())
        self._begun = True
        self.logits = self._passes.logits(self._with_nan)
        return self.logits

    def append(self, tokens: Sequences[int]) -> None:
        """Appends the newest tokens. All ranks append those of rank 0."""
        self._passes.append(distributed.broadcast_object(list(tokens)))


class _Followed(StoppingCriteriaList):
    """The stopping criteria of a request. After they are called, each new token is processed.

    Args:
        request: its sequences receive their new tokens and the reasons why they end.
        forward: computes the logits of the tokens.
        on_host: whether the requested values of the tokens are kept in host memory.

    Attributes:
        tokens: the newest token of every sequence, pad tokens included.
        scores: the requested logits, scores and log-probabilities; None if none are requested.
    """

    def __init__(self, request: Request, forward: _Forward, on_host: bool) -> None:
        super().__init__(request.criteria)
        self._streamers, self._sequences, self._forward = request.how.streamers, request.sequences, forward
        self._names = request.outputs
        self.scores = EmittedScores(request, on_host) if self._names else None
        self.tokens: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns bool ``[B]``: which sequences have ended after one new token each."""
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        stopped = ended
        for criterion in self:
            said = answer_of(criterion, input_ids, scores, **kwargs)
            ended = ended | said
            if type(criterion) is not MaxLengthCriteria:
                stopped = stopped | said
        self.tokens = input_ids[:, -1].tolist()
        going = [sequence.finish_reason is None for sequence in self._sequences]
        self._keep(scores, input_ids[:, -1], going)
        found = distributed.broadcast_object((ended.tolist(), stopped.tolist()))
        for b, (sequence, over, stop) in enumerate(zip(self._sequences, *found, strict=True)):
            if going[b]:
                self._add(sequence, self.tokens[b], over, stop)
        reasons = [sequence.finish_reason is not None for sequence in self._sequences]
        return torch.tensor(reasons, device=input_ids.device)

    def _keep(self, scores: Any, tokens: Tensor, going: list[bool]) -> None:
        """Keeps the requested values of the newest tokens of sequences that had not ended before."""
        if self.scores is None:
            return
        found = {"logits": self._forward.logits}
        if "scores" in self._names:
            found["scores"] = scores[-1]
        if "logprobs" in self._names:
            found["logprobs"] = found["logits"].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        for b in range(len(going)):
            if going[b]:
                self.scores.keep(b, {name: each[b : b + 1].clone() for name, each in found.items()})

    def _add(self, sequence: Sequence, token: int, over: bool, stop: bool) -> None:
        sequence.tokens.append(token)
        sequence.target.add(1, 0, 0, 1, 0.0)
        newest = None if self.scores is None else self.scores.newest
        # A streamer may end its sequence.
        if self._streamers.put(sequence.number, [token], newest):
            over = stop = True
        if over:
            is_end = token in sequence.ending.stop_tokens
            sequence.finish_reason = "eos" if is_end else "stop" if stop else "length"
            self._streamers.end(sequence.number)
