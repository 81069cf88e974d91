"""Compares our forward of a model with transformers' own at load, which finds unsupported features.

A wrong rotation, or an ignored window or softcap, raises no error. The output differs, often only beyond a
length that small tests do not reach. So random tokens are processed by our forward (chunks of prefill, then a
token tree) and by transformers' own forward, and the logits must agree.

The first layer of each kind is enough. Long prefixes are not computed: both KV caches are filled with random
keys and values for a prefix before the tokens are processed, so attention to wrong positions changes the
logits. Rotary frequencies that depend on the length are compared with tokens at distant positions.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.device import KernelError
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.recurrent_states import RecurrentStates
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.loading.layer_slice import LayerSlice
from triforce_tree.loading.rounding import NOISE, explained_error, noisy_embeddings, relative_error
from triforce_tree.models.attention import scales_queries
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.models.recorder import LayerCall
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.models.running_forward import IndexedPass
from triforce_tree.models.supported import UnsupportedModelError, likely_cause, max_positions
from triforce_tree.runtime.devices import plain_torch_modes

# The tokens of two chunks of prefill, and of one tree, which is a chain.
_CHUNKS = (16, 16, 8)
_LONG_CHUNKS = (8, 8, 8)  # in comparisons at a length from the model's configuration
_LEAST_LENGTH = 16  # the first comparison is longer than this, so shorter lengths need no other
_MOST_LENGTHS = 3
# Most elements of random keys and values: half a second of drawing on two cores, 1 GiB of a GPU in 16 bits.
_MOST_ELEMENTS = {"cpu": 40 << 20, "cuda": 512 << 20}
# Most floating-point operations of one comparison: a few seconds on eight cores, 0.1 s on a GPU.
_MOST_FLOPS = {"cpu": 1e12, "cuda": 5e13}
# Standard deviation of random attention scores, which makes attention uneven but not concentrated.
_SCORES = 2.0
_LENGTH = re.compile("window(_size)?$|chunk_size$|original_max|floor_scale|local_attention|index_topk$")
_SPECIAL = re.compile("token_(id|index)$")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardReport:
    """The result of the comparisons at load.

    Attributes:
        layers: indices of the layers that were compared.
        errors: relative error of the logits, by comparison.
        skipped: the reason of each comparison that was skipped, by comparison.
    """

    layers: tuple[int, ...]
    errors: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def compare_at_load(model: HFModel) -> GuardReport:
    """Compares our forward with transformers' own, also beyond each length in the model's configuration.

    It takes 0.03 s for the small target in the package and 0.06 s for a tiny model with a window of 4,096
    tokens. For the layers of a 7B model with such a window it takes 4.5 s on one CPU core in fp32, and 3.7 s
    on an H200 in bf16, mostly to compile kernels that generation needs too. Comparisons that would take much
    longer are skipped, and the report lists them. torch's random state is not changed.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding explains.
    """
    return _Guard(model).run()


class _Guard:
    def __init__(self, model: HFModel) -> None:
        self.model, self.device = model, model.device
        self.kind = "cuda" if self.device.type == "cuda" else "cpu"
        self.slice = LayerSlice(model)
        self.calls = {index: model.calls[index] for index in self.slice.layers if index in model.calls}
        self.report = GuardReport(self.slice.layers)
        self.random = torch.Generator().manual_seed(0)
        self.scores: dict[int, float] = {}

    def run(self) -> GuardReport:
        most = self.model.max_positions
        count = min(sum(_CHUNKS), most or sum(_CHUNKS))
        chunks = _CHUNKS if count == sum(_CHUNKS) else (count - count // 2, count // 2)
        self._compare(f"a sequence of {count} tokens", chunks)
        for length in sorted(named_lengths(self.model.model))[:_MOST_LENGTHS]:
            self._compare_beyond(length)
            if most is None or length + sum(_LONG_CHUNKS) <= most:
                gap = length + 1 - _LONG_CHUNKS[0]
                self._compare(f"positions on both sides of {length}", _LONG_CHUNKS, gap=gap)
        for what, why in self.report.skipped.items():
            _LOG.debug("%s: %s was not compared with transformers' forward: %s", self.model.name, what, why)
        return self.report

    def _compare_beyond(self, length: int) -> None:
        """Compares after a random prefix of 2 * ``length`` positions, or fewer if the model has fewer."""
        tail, most = sum(_LONG_CHUNKS), self.model.max_positions
        what = f"a sequence beyond {length} tokens"
        if self.slice.shares_kv or self.model.states is not None or self.model.indexed:
            # A random prefix would need equal keys and values in layers that share them, matching states of
            # recurrent layers, and keys of indexers. So a prefix of real tokens is computed instead.
            self._compare(what, (length, *_LONG_CHUNKS))
            return
        prefix = 2 * length if most is None else min(2 * length, most - tail)
        elements = prefix * sum(call.heads.row for call in self.calls.values())
        if prefix + tail <= length:
            self.report.skipped[what] = f"the model has {most} positions"
        elif elements > _MOST_ELEMENTS[self.kind]:
            self.report.skipped[what] = f"it would take {elements} random elements"
        else:
            self._compare(what, _LONG_CHUNKS, prefix=prefix)

    def _compare(self, what: str, chunks: Sequence[int], prefix: int = 0, gap: int = 0) -> None:
        """Compares the logits of the last chunk.

        Args:
            what: the name of the comparison.
            chunks: number of tokens of each of our forwards.
            prefix: number of positions with random keys and values before the tokens.
            gap: number that is added to the positions from the second chunk on.
        """
        windows = [call.how.window for call in self.calls.values() if call.how.window is not None]
        if gap and windows and min(windows) < sum(chunks):
            self.report.skipped[what] = f"a window of {min(windows)} tokens is shorter than the sequence"
            return
        if gap and scales_queries(self.model.model):
            self.report.skipped[what] = "transformers scales its queries by other positions than these"
            return
        # Two forwards with two operations per parameter and token each.
        flops = 4 * sum(chunks) * self.slice.parameters
        if flops > _MOST_FLOPS[self.kind]:
            self.report.skipped[what] = f"it would take {flops:.1g} floating-point operations"
            return
        kv = {i: self._random_kv(i, call, prefix) for i, call in self.calls.items()} if prefix else {}
        ids = self._random_tokens(sum(chunks))
        try:
            expected = self._reference_logits(ids, chunks, prefix, gap, kv)
        except torch.OutOfMemoryError:
            self.report.skipped[what] = "memory is short"
            return
        except Exception as failure:  # transformers' own forward fails, which says nothing about ours
            self.report.skipped[what] = f"{type(failure).__name__}: {failure}"
            return
        try:
            ours = self._our_logits(ids[0].tolist(), chunks, prefix, gap, kv)
        except torch.OutOfMemoryError:
            self.report.skipped[what] = "memory is short"
            return
        except KernelError:
            raise
        except Exception as failure:  # the model's code fails with our attention, but not with its own
            raise UnsupportedModelError(
                f"{self.model.name} cannot be decoded hierarchically: its forward fails on {what} "
                f"({type(failure).__name__}: {failure})"
            ) from failure
        if not bool(expected.isfinite().all()):
            self.report.skipped[what] = "the model's own logits are not finite"
            return
        error = relative_error(ours, expected)
        self.report.errors[what] = error
        limit = explained_error(
            self.model, error, expected,
            lambda: self._reference_logits(ids, chunks, prefix, gap, kv, noise=NOISE),
        )  # fmt: skip
        if not error <= limit:
            cause = likely_cause(self.model.model, [call.module for call in self.calls.values()])
            layers = ", ".join(map(str, self.slice.layers))
            raise UnsupportedModelError(
                f"{self.model.name} would not be decoded as by transformers: {cause and cause + '; '}"
                f"on {what} its logits differ by {error:.2g} relative to their norm, and rounding explains "
                f"at most {limit:.2g} (layers {layers})"
                + ("" if cause else "; please report the model's configuration")
            )

    def _reference_logits(
        self,
        ids: Tensor,
        chunks: Sequence[int],
        prefix: int,
        gap: int,
        kv: dict[int, tuple[Tensor, Tensor]],
        noise: float = 0.0,
    ) -> Tensor:
        """Returns transformers' logits of the last chunk, fp32 ``[T, V]``, with noise on the embeddings."""
        model: Any = shallow_copy(self.model.model).eval()
        count, kept = ids.shape[1], chunks[-1]
        keywords: dict[str, Any] = {"use_cache": False}
        if prefix:
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            for layer, (k, v) in kv.items():
                cache.update(k, v, layer)
            positions = torch.arange(prefix, prefix + count, device=self.device)
            keywords = {"use_cache": True, CACHE: cache, "position_ids": positions[None]}
        if gap:
            positions = torch.arange(count, device=self.device)
            positions += gap * (positions >= chunks[0])
            future = torch.ones(count, count, dtype=torch.bool, device=self.device).triu(1)
            mask = torch.zeros(count, count, dtype=model.dtype, device=self.device)
            mask.masked_fill_(future, torch.finfo(model.dtype).min)
            keywords |= {"position_ids": positions[None], "attention_mask": mask[None, None]}
        with plain_torch_modes(self.device), self.slice.alone(model), noisy_embeddings(model, noise):
            out = model(input_ids=ids.to(self.device), logits_to_keep=kept, **keywords)
        logits: Tensor = out.logits[0, -kept:]
        return logits.float()

    def _our_logits(
        self,
        tokens: list[int],
        chunks: Sequence[int],
        prefix: int,
        gap: int,
        kv: dict[int, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Returns our logits of the last chunk, fp32 ``[T, V]``."""
        count = self.model.layers
        shapes = [s if i % count in self.calls else None for i, s in enumerate(self.model.kv_layers)]
        tail = chunks[-1]
        slots = prefix + len(tokens) + tail
        if self.model.length_rope is not None:
            self.model.length_rope.choose_for_texts([prefix + gap + len(tokens)])
        logits = torch.empty(0, device="cpu")
        with self.model.active(own=True), self.slice.alone(self.model.running):
            store = KVStore(shapes, 1, slots, self.device, self.model.dtype, scratch=tail)
            states = None
            if self.model.states is not None:
                states = RecurrentStates(self.model.states, 1, self.device, self.model.dtype)
            cache = _GuardCache(store, prefix, chunks, gap, states)
            # A ring buffer keeps the newest positions of the prefix.
            for layer, (k, v) in kv.items():
                store.append(layer, 0, 0, k, v)
            for count in chunks:
                part, tokens = tokens[:count], tokens[count:]
                logits = self.model.forward(part, cache, last_only=bool(tokens), whole=False)
        for layer, q in cache.queries.items():
            self.scores[layer] = float(q.float().pow(2).mean().sqrt())
        return logits.float()

    def _random_kv(self, layer: int, call: LayerCall, positions: int) -> tuple[Tensor, Tensor]:
        """Returns random keys ``[1, H_kv, positions, D]`` and values ``[1, H_kv, positions, D_v]``.

        They are scaled such that the layer's attention is uneven.
        """
        generator = torch.Generator(self.device).manual_seed(layer)
        heads = call.heads
        how: dict[str, Any] = {"device": self.device, "dtype": self.model.model.dtype}
        k, v = (
            torch.randn((1, heads.kv, positions, dim), generator=generator, **how)
            for dim in (heads.dim, heads.value_dim)
        )
        # A missing softcap changes the logits only if scores are about as large as the cap.
        cap = getattr(self.model.model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
        deviation = _SCORES if cap is None else cap / 4
        return k * (deviation / (self.scores.get(layer, 1.0) * call.how.scale * heads.dim**0.5)), v * 4

    def _random_tokens(self, count: int) -> Tensor:
        """Returns random token ids ``[1, count]`` without special ones, such as image placeholders."""
        config: Any = self.model.model.config
        special = {id for name, id in config.to_dict().items() if _SPECIAL.search(name) and type(id) is int}
        plain = torch.tensor(
            [id for id in range(min(self.model.vocab_size, 4096)) if id not in special], device="cpu"
        )
        return plain[torch.randint(len(plain), (1, count), generator=self.random, device="cpu")]


class _GuardCache(PromptCache):
    """The KV cache of our forwards. The last chunk is verified as a tree (a chain); the others are prefill.

    Args:
        store: the KV slots of one sequence, which hold the prefix.
        prefix: number of positions before the tokens.
        chunks: number of tokens of each forward.
        gap: number that is added to the positions from the second chunk on.
        states: the states of recurrent layers, if there are any.

    Attributes:
        queries: the queries of the last forward, ``[1, H_q, T, D]``, by layer.
    """

    def __init__(
        self,
        store: KVStore,
        prefix: int,
        chunks: Sequence[int],
        gap: int,
        states: RecurrentStates | None,
    ) -> None:
        super().__init__(store, 0, states)
        self.length, self.queries = prefix, dict[int, Tensor]()
        self._second, self._gap = prefix + chunks[0], gap
        tail = chunks[-1]
        self._last = prefix + sum(chunks) - tail
        self._chain = TreeAttentionView(
            store, tail, mask=torch.ones(tail, tail, dtype=torch.bool, device="cpu").tril()
        )
        self._chain.begin(torch.tensor([self._last], device=store.device))

    def positions(self, count: int) -> Tensor:
        positions = super().positions(count)
        return positions + self._gap * (positions >= self._second)

    @property
    def indexed(self) -> IndexedPass | None:
        return super().indexed if self.length < self._last else self._chain.indexed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        self.queries[layer] = q
        if self.length < self._last:
            return super().attend(layer, q, k, v, params)
        return self._chain(layer, q, k, v, params)


def named_lengths(model: nn.Module) -> set[int]:
    """Returns the lengths in a model's configuration that are shorter than its most positions.

    These are windows, chunks of attention and original lengths of scaled rotary embeddings.
    """
    config: Any = model.config
    text_config = config.get_text_config(decoder=True)
    most = max_positions(text_config) or float("inf")
    lengths: set[int] = set()

    def collect(settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if isinstance(value, dict):
                collect(value)
            elif type(value) is int and _LENGTH.search(name) and _LEAST_LENGTH <= value < most:
                lengths.add(value)

    collect(text_config.to_dict())
    return lengths
