"""Is our forward the model's own? A comparison at load, for what nobody thought of.

A wrong rotation, a window or a cap that is not carried out changes no shape and raises nothing: the text is
simply another one, and often only beyond a length that no small test reaches. So random tokens go through
our path (chunks of prefill, then rows of a tree) and through transformers' own forward, and the logits must
agree.

The first layer of each kind is enough. Long prefixes are not computed: random keys and values of that many
rows are put into both caches before the tokens come, so that attention to other rows gives other logits.
Rotary frequencies that change with the length are compared by tokens at positions far apart.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from triforce_tree.kernels.device import KernelError
from triforce_tree.kv.prefill import SequenceRows
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.loading.layer_slice import LayerSlice
from triforce_tree.models.attention import AttentionParams
from triforce_tree.models.hf_model import HFModel, own_arithmetic
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.models.recorder import LayerCall
from triforce_tree.models.supported import UnsupportedModelError

# Tokens of two chunks of prefill, and of one tree, which is a chain.
_PIECES = (16, 16, 8)
_FAR_PIECES = (8, 8, 8)
_LEAST_LENGTH = 16  # shorter ones lie within the first text
_MOST_FAR = 3
# Numbers of the random rows: half a second of drawing on two cores, 1 GiB of a GPU in 16 bits.
_MOST_NUMBERS = {"cpu": 40 << 20, "cuda": 512 << 20}
# Floating-point operations of one comparison: a few seconds of eight cores, a tenth of one of a GPU.
_MOST_FLOPS = {"cpu": 1e12, "cuda": 5e13}
# A share of the logits' size. What is wrong is off by 0.1 and more, rounding by the values below it.
_ROUNDING = {torch.float32: 5e-3, torch.float64: 5e-3}
_ROUNDING_16 = 0.08
# Random scores of this deviation: attention looks at some rows more than at others, but at many.
_SCORES = 2.0
_LENGTH = re.compile("window(_size)?$|chunk_size$|original_max|floor_scale|local_attention")
_SPECIAL = re.compile("token_(id|index)$")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardReport:
    """What was compared at load, and what was not.

    Attributes:
        errors: relative error of the logits, by what was compared.
        skipped: what was too long to be compared, or failed in transformers' own forward, with the reason.
    """

    layers: tuple[int, ...]
    errors: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def compare_at_load(model: HFModel) -> GuardReport:
    """Compare our forward of a few tokens with transformers' own, over every length that the model names.

    It takes 0.03 s for the embedded pair's target and 0.06 s for a tiny model with a window of 4,096 tokens;
    for the layers of a 7B model with such a window 4.5 s of one CPU core in fp32, and 3.7 s on an H200 in
    bf16, most of it for compiling kernels that the text needs as well. A length that would take many more
    seconds is skipped, and the report says so. The random state of torch stays as it is.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding explains.
    """
    return _Guard(model).run()


def relative_error(ours: Tensor, own: Tensor) -> float:
    """Difference of logits ``[T, V]`` as a share of their size, of the median row.

    A tie between experts may go either way, which changes single rows in 16 bits.
    """
    size = (own - own.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((ours - own).norm(dim=-1) / size).median())


class _Guard:
    def __init__(self, model: HFModel) -> None:
        self.model, self.device = model, model.device
        self.kind = "cuda" if self.device.type == "cuda" else "cpu"
        self.slice = LayerSlice(model)
        self.calls = {index: model.calls[index] for index in self.slice.layers}
        self.report = GuardReport(self.slice.layers)
        self.random = torch.Generator().manual_seed(0)
        self.limit = _ROUNDING.get(model.dtype, _ROUNDING_16)
        self.scores: dict[int, float] = {}

    def run(self) -> GuardReport:
        most = self.model.max_positions
        count = min(sum(_PIECES), most or sum(_PIECES))
        pieces = _PIECES if count == sum(_PIECES) else (count - count // 2, count // 2)
        self._compare(f"a text of {count} tokens", pieces)
        for length in sorted(named_lengths(self.model.model))[:_MOST_FAR]:
            self._compare_beyond(length)
            if most is None or length + sum(_FAR_PIECES) <= most:
                jump = length + 1 - _FAR_PIECES[0]
                self._compare(f"positions on both sides of {length}", _FAR_PIECES, jump=jump)
        for what, why in self.report.skipped.items():
            _LOG.debug("%s: %s was not compared with transformers' own: %s", self.model.name, what, why)
        return self.report

    def _compare_beyond(self, length: int) -> None:
        """Rows beyond ``length``: twice as many, or as many as the model has positions for."""
        tail, most = sum(_FAR_PIECES), self.model.max_positions
        what = f"a text beyond {length} tokens"
        if self.slice.shares_rows:
            # Random rows would have to be the same in the layers that share them: a text it is.
            self._compare(what, (length, *_FAR_PIECES))
            return
        rows = 2 * length if most is None else min(2 * length, most - tail)
        numbers = rows * sum(2 * call.kv_heads * call.dim for call in self.calls.values())
        if rows + tail <= length:
            self.report.skipped[what] = f"the model has {most} positions"
        elif numbers > _MOST_NUMBERS[self.kind]:
            self.report.skipped[what] = f"it would take {numbers} numbers"
        else:
            self._compare(what, _FAR_PIECES, before=rows)

    def _compare(self, what: str, pieces: Sequence[int], before: int = 0, jump: int = 0) -> None:
        """Compare the logits of the last piece.

        Args:
            pieces: tokens of each forward of ours.
            before: random rows in front of the tokens.
            jump: what positions from the second piece on are further by.
        """
        windows = [call.how.window for call in self.calls.values() if call.how.window is not None]
        if jump and windows and min(windows) < sum(pieces):
            self.report.skipped[what] = f"a window of {min(windows)} tokens is shorter than the text"
            return
        # Both paths, two operations a parameter.
        flops = 4 * sum(pieces) * self.slice.parameters
        if flops > _MOST_FLOPS[self.kind]:
            self.report.skipped[what] = f"it would take {flops:.1g} operations"
            return
        rows = {i: self._random_rows(i, call, before) for i, call in self.calls.items()} if before else {}
        ids = self._tokens(sum(pieces))
        try:
            own = self._own(ids, pieces, before, jump, rows)
        except torch.OutOfMemoryError:
            self.report.skipped[what] = "memory is short"
            return
        except Exception as failure:  # foreign code on inputs of ours: it says nothing about our forward
            self.report.skipped[what] = f"{type(failure).__name__}: {failure}"
            return
        try:
            ours = self._ours(ids[0].tolist(), pieces, before, jump, rows)
        except torch.OutOfMemoryError:
            self.report.skipped[what] = "memory is short"
            return
        except KernelError:
            raise
        except Exception as failure:  # the family's code, in a way that transformers' own forward is not
            raise UnsupportedModelError(
                f"{self.model.name} cannot be decoded hierarchically: over {what} its forward fails "
                f"({type(failure).__name__}: {failure})"
            ) from failure
        if not bool(own.isfinite().all()):
            self.report.skipped[what] = "the model's own logits are not finite"
            return
        error = relative_error(ours, own)
        self.report.errors[what] = error
        if not error <= self.limit:
            raise UnsupportedModelError(
                f"{self.model.name} would not be decoded as transformers does: over {what} its logits differ "
                f"by {error:.2g} of their size, where rounding explains {self.limit:.2g} (layers "
                f"{', '.join(map(str, self.slice.layers))}); please report the model's configuration"
            )

    def _own(
        self,
        ids: Tensor,
        pieces: Sequence[int],
        before: int,
        jump: int,
        rows: dict[int, tuple[Tensor, Tensor]],
    ) -> Tensor:
        model: Any = shallow_copy(self.model.model).eval()
        count, kept = ids.shape[1], pieces[-1]
        more: dict[str, Any] = {"use_cache": False}
        if before:
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            for layer, (k, v) in rows.items():
                cache.update(k, v, layer)
            positions = torch.arange(before, before + count, device=self.device)
            more = {"use_cache": True, "past_key_values": cache, "position_ids": positions[None]}
        if jump:
            positions = torch.arange(count, device=self.device)
            positions += jump * (positions >= pieces[0])
            hidden = torch.ones(count, count, dtype=torch.bool, device=self.device).triu(1)
            mask = torch.zeros(count, count, dtype=model.dtype, device=self.device)
            mask.masked_fill_(hidden, torch.finfo(model.dtype).min)
            more |= {"position_ids": positions[None], "attention_mask": mask[None, None]}
        with own_arithmetic(self.device), self.slice.alone(model):
            out = model(input_ids=ids.to(self.device), logits_to_keep=kept, **more)
        logits: Tensor = out.logits[0, -kept:]
        return logits.float()

    def _ours(
        self,
        tokens: list[int],
        pieces: Sequence[int],
        before: int,
        jump: int,
        rows: dict[int, tuple[Tensor, Tensor]],
    ) -> Tensor:
        shapes = [s if i in self.calls else None for i, s in enumerate(self.model.kv_shapes)]
        tail = pieces[-1]
        room = before + len(tokens) + tail
        if self.model.length_rope is not None:
            self.model.length_rope.choose_for_texts([before + jump + len(tokens)])
        logits = torch.empty(0)
        with self.model.active(), self.slice.alone(self.model.running):
            store = KVStore(shapes, 1, room, self.device, self.model.dtype, scratch=tail)
            cache = _GuardRows(store, before, pieces, jump)
            for layer, (k, v) in rows.items():
                cache.fill(layer, k, v)
            for count in pieces:
                part, tokens = tokens[:count], tokens[count:]
                logits = self.model.forward(part, cache, last_only=bool(tokens), whole=False)
        for layer, q in cache.queries.items():
            self.scores[layer] = float(q.float().pow(2).mean().sqrt())
        return logits.float()

    def _random_rows(self, layer: int, call: LayerCall, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[1, H_kv, rows, D]`` that this layer's queries look at unevenly."""
        generator = torch.Generator(self.device).manual_seed(layer)
        shape = (1, call.kv_heads, rows, call.dim)
        k, v = (
            torch.randn(shape, generator=generator, device=self.device, dtype=self.model.dtype)
            for _ in range(2)
        )
        # A cap shows where scores come near it.
        cap = getattr(self.model.model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
        wanted = _SCORES if cap is None else cap / 4
        return k * (wanted / (self.scores[layer] * call.how.scale * call.dim**0.5)), v * 4

    def _tokens(self, count: int) -> Tensor:
        """Random ids ``[1, count]``, none of which stands for an image or a sound."""
        config: Any = self.model.model.config
        own = {id for name, id in config.to_dict().items() if _SPECIAL.search(name) and type(id) is int}
        plain = torch.tensor([id for id in range(min(self.model.vocab_size, 4096)) if id not in own])
        return plain[torch.randint(len(plain), (1, count), generator=self.random)]


class _GuardRows(SequenceRows):
    """Pieces of a text in the KV slots of a cycle: all but the last one are prefill, the last is a chain.

    Args:
        store: of one sequence.
        before: positions in front of the text, which :meth:`fill` writes.
        pieces: tokens of each.
        jump: what positions from the second piece on are further by.

    Attributes:
        queries: of the last forward, by layer, ``[1, H_q, T, D]``.
    """

    def __init__(self, store: KVStore, before: int, pieces: Sequence[int], jump: int) -> None:
        super().__init__(store, 0)
        self.length, self.queries = before, dict[int, Tensor]()
        self._second, self._jump = before + pieces[0], jump
        tail = pieces[-1]
        self._last = before + sum(pieces) - tail
        self._chain = TreeAttentionView(store, tail, mask=torch.ones(tail, tail, dtype=torch.bool).tril())
        self._chain.begin(torch.tensor([self._last], device=store.device))

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys and values ``[1, H_kv, before, D]`` in front of the text; a ring keeps the newest."""
        number, _ = self.store.place(layer)
        group, stop = self.store.groups[number], k.shape[2]
        start = max(0, stop - group.ring) if group.ring else 0
        for kept, given in zip(self.store.layer(layer), (k, v), strict=True):
            for slots, places in group.runs(start, stop):
                kept[:, :, slots] = given[:, :, start:][:, :, places]

    def positions(self, count: int) -> Tensor:
        places = super().positions(count)
        return places + self._jump * (places >= self._second)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        self.queries[layer.layer_idx] = q
        if self.length < self._last:
            return super().attend(layer, q, k, v, how)
        return self._chain(layer.layer_idx, q, k, v, how).transpose(1, 2)


def named_lengths(model: nn.Module) -> set[int]:
    """Lengths below its most positions that a model's configuration names: windows, chunks, original ones."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None) or float("inf")
    found: set[int] = set()

    def look(settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if isinstance(value, dict):
                look(value)
            elif type(value) is int and _LENGTH.search(name) and _LEAST_LENGTH <= value < most:
                found.add(value)

    look(text.to_dict())
    return found
