"""What a draft model keeps of each sequence: keys and values of sinks and a window, and recurrent states.

Every tree begins with a forward of the newest ``refeed`` tokens, the root last (``GrownTree``), so the tokens
that a window holds at the beginning of a pass end before these.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig, StreamingConfig
from triforce_tree.drafters.token_map import Forwards, TokenMap
from triforce_tree.kernels.ahead import compile_together
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.marks import Marks
from triforce_tree.kv.prefill import chunk_tokens, windowed_attention
from triforce_tree.kv.recurrent_states import DraftedStates, PromptPass, RecurrentStates
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.running_forward import ChunkPass
from triforce_tree.models.step_model import MOST_ROWS
from triforce_tree.runtime.devices import overwrite
from triforce_tree.runtime.executor import Step, executor
from triforce_tree.runtime.progress_log import logged
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.runtime.token_ids import id_tensor

# Most tokens of each sequence that one forward for the whole batch processes.
_COLUMNS = 16


class DraftWindow:
    """Keeps what a draft model has computed of B sequences.

    Attributes:
        config: sinks and window.
        store: KV slots: those of the sinks, those of the window, and slots that trees overwrite.
        dropped: int64 ``[B]``, the number of tokens between sinks and window that the slots of each sequence
            have no more. It is negative for a sequence shorter than ``refeed``, which counts as padded on the
            left.
        drafted: the states of recurrent layers during a pass; None without such layers.
    """

    config: StreamingConfig
    store: KVStore
    dropped: Tensor
    drafted: DraftedStates | None = None

    def take_over(self, earlier: "DraftWindow") -> None:
        """Takes over what an earlier window of the same draft has copies of; by default nothing."""

    def choose_rope(self, sequences: Sequence[Sequence[int]]) -> None:
        """Chooses the rotary frequencies for new sequences, if they depend on the length."""
        raise NotImplementedError

    def start(self, b: int, sequence: Sequence[int]) -> None:
        """Begins a sequence at batch index b."""
        raise NotImplementedError

    def extend(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Makes the windows ready for the trees of a pass.

        Args:
            sequences: all committed tokens of each sequence; None for one that has ended.
            resumed: whether tokens were committed without a tree since the last call.
        """
        raise NotImplementedError

    def begin_tree(self, state: SequenceState) -> None:
        """Makes the window ready for a tree, on the device; by default nothing, as a tree overwrites the last
        one's slots.
        """


class RecomputedWindow(DraftWindow):
    """The window of a draft without recurrent layers, at positions counted within the cache (StreamingLLM).

    When it is full, the keys and values of its newer half are recomputed, which Xiao et al. (arXiv
    2309.17453, table 1) found to be the best of the windowed caches. No cached key is rotated again.

    Tokens that were committed without a tree are processed by forwards for the whole batch. A sequence that
    has fewer of them, or none, is padded on the right: slots after its last token are overwritten by the next
    tree.

    Args:
        draft: the draft model; ``model`` runs it.
        config: sinks and window.
        refeed: tokens of the first forward of a tree.
        scratch: KV slots that trees may write after those of the window.
        state: the sequences.
    """

    def __init__(
        self,
        draft: HFModel,
        model: Forwards,
        config: StreamingConfig,
        refeed: int,
        scratch: int,
        state: SequenceState,
    ) -> None:
        self.config, self._model, self._rope = config, model, draft.length_rope
        self._refeed, self._scratch = refeed, max(scratch, _COLUMNS)
        self.store = _store(draft, self.config, self._scratch, state)
        self.dropped = torch.zeros_like(state.length)
        # ``_dropped_on_host`` is a copy of ``dropped`` on the host.
        self._dropped_on_host = [0] * state.batch
        # The number of first tokens of each sequence that the cache holds or has dropped.
        self._fed = [0] * state.batch
        device = state.device
        # A sequence with more new tokens has a forward of its own. On a GPU such a forward of up to MOST_ROWS
        # tokens would compile the layers, which takes seconds. On a CPU padding of the others costs time.
        self._most_together = MOST_ROWS if device.type == "cuda" else 2 * _COLUMNS
        # The first KV slot that a forward for the whole batch writes, and its tokens.
        self._inputs = torch.zeros(state.batch, 1 + _COLUMNS, dtype=torch.int64, device=device)
        self._columns = torch.arange(_COLUMNS, device=device)
        causal = torch.ones(_COLUMNS, _COLUMNS, dtype=torch.bool, device="cpu").tril()
        self._view = TreeAttentionView(self.store, _COLUMNS, mask=causal)
        self._width = _COLUMNS
        capturable = self._view.capturable is True and model.capturable
        if capturable:
            compile_together(self._forward, device)
        self._run = executor([Step(self._forward, capturable)], device)

    def choose_rope(self, sequences: Sequence[Sequence[int]]) -> None:
        if self._rope is not None:
            # The draft model's positions never exceed those of its window.
            self._rope.choose_for_texts([self.store.slots])

    def start(self, b: int, sequence: Sequence[int]) -> None:
        # Every tree processes the newest ``refeed`` tokens again. A sequence shorter than this counts as
        # padded on the left with copies of its first token.
        final = len(sequence) - self._refeed
        sinks, window = self.config.sinks, self.config.window
        newest = min(window, max(0, final - sinks))
        held = [*sequence[: max(0, min(sinks, final))], *sequence[max(0, final - newest) : max(0, final)]]
        self._dropped_on_host[b] = final - len(held)
        self.dropped[b].fill_(final - len(held))  # An assignment would wait for the device.
        self._fed[b] = max(0, final)
        if held:
            self._prefill(b, held)

    def extend(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        pending: dict[int, tuple[int, Sequence[int]]] = {}
        for b, sequence in enumerate(sequences):
            if sequence is None:
                continue
            dropped, fed = self._dropped_on_host[b], self._fed[b]
            new = sequence[fed : max(fed, len(sequence) - self._refeed)] if resumed else ()
            # Only the first forward of a tree writes slots of padding on the left, so a padded sequence that
            # has grown is recomputed.
            if len(sequence) - dropped + self._scratch > self.store.slots or (resumed and dropped < 0):
                self.start(b, sequence)
            elif len(new) > self._most_together:
                self._prefill(b, list(new), fed - dropped)
            elif new:
                pending[b] = fed - dropped, new
            # The first forward of the next tree processes the newest tokens.
            self._fed[b] = len(sequence)
        if pending:
            self._prefill_together(pending)

    def _prefill(self, b: int, tokens: list[int], first: int = 0) -> None:
        """Writes the keys and values of ``tokens`` into the KV slots of sequence b from ``first`` on."""
        ids, end = id_tensor(tokens, self._model.device)[None], first + len(tokens)
        positions = torch.arange(first, end, device=ids.device)[None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
            how = self.store.layers[layer].checked(how)
            k, v = self.store.append(layer, b, first, k, v)
            out = windowed_attention(q, k, v, how, end - q.shape[2])
            return out.transpose(1, 2).contiguous()

        self._model(ids, positions, attend, last=1)

    def _prefill_together(self, pending: dict[int, tuple[int, Sequence[int]]]) -> None:
        """Writes the keys and values of tokens of some sequences.

        The other sequences write slots after all that their windows hold.

        Args:
            pending: by sequence, the first KV slot to write and the tokens.
        """
        longest = max(len(tokens) for _, tokens in pending.values())
        self._width = min(longest, _COLUMNS) if self._view.resizable else _COLUMNS
        for start in range(0, longest, self._width):
            rows = []
            for b, fed in enumerate(self._fed):
                first, tokens = pending.get(b, (fed - self._dropped_on_host[b], ()))
                part = tokens[start : start + self._width]
                padding = [0] * (self._width - len(part))
                rows.append([first + min(start, len(tokens)), *part, *padding])
            overwrite(self._inputs[:, : 1 + self._width], torch.tensor(rows, device="cpu"))
            self._run()

    def _forward(self) -> None:
        first, tokens = self._inputs[:, 0], self._inputs[:, 1 : 1 + self._width]
        self._view.begin(first)
        self._model(tokens, first[:, None] + self._columns[: self._width], self._view, last=1)


class ContinuedWindow(DraftWindow):
    """The window and the states of a draft with recurrent layers, which read the whole sequence.

    A prompt is read in chunks. Its keys are rotated by their positions in the sequence, so that a window
    moves by moving its slots: nothing is computed twice. A query sees the sinks and at least the ``window``
    tokens before it.

    The states are those after the tokens that precede the newest ``refeed`` ones. They are advanced at the
    beginning of the next pass (``DraftedStates``), when it is known which tokens were committed.

    A later prompt continues from a copy at the end of an earlier prompt's whole chunks, or at its end: what
    is computed is then equal, bit by bit, to what reading the whole prompt would compute.

    Args:
        tokens: maps the target's token ids to the draft's; None if these are equal.
        config: sinks and window, and the tokens of a chunk.
        draft, refeed, scratch, state: as for :class:`RecomputedWindow`.
    """

    drafted: DraftedStates

    def __init__(
        self,
        draft: HFModel,
        tokens: TokenMap | None,
        config: HierarchyConfig,
        refeed: int,
        scratch: int,
        state: SequenceState,
    ) -> None:
        assert draft.states is not None
        self.config, self._draft, self._tokens = config.streaming, draft, tokens
        self._refeed, self._scratch, self._state = refeed, scratch, state
        self._chunk = chunk_tokens(config.prefill_chunk, draft.device)
        batch = state.batch
        self.store = _store(draft, self.config, scratch, state)
        # Trial runs read slots that no prompt has written.
        self.store.initialise([0] * batch)
        self.states = RecurrentStates(draft.states, batch, draft.device, draft.dtype)
        self.drafted = DraftedStates(self.states, refeed, state.max_draft_tokens)
        self.dropped = torch.zeros_like(state.length)
        # The number of first tokens that the states hold, negative for a padded sequence.
        self._held = torch.zeros_like(state.length)
        # Copies on the host of ``dropped``, and of ``_held`` as it was at the beginning of the last pass with
        # trees.
        self._dropped_on_host, self._held_on_host = torch.zeros(2, batch, dtype=torch.int64, device="cpu")
        # The newest prompt of each sequence. There are copies of the states at the ends of some of its
        # beginnings.
        self._prompts: list[list[int]] = [[] for _ in range(batch)]
        self._marks = Marks(self, batch)

    def take_over(self, earlier: DraftWindow) -> None:
        if not isinstance(earlier, ContinuedWindow):
            return
        if (earlier.config, earlier._chunk) == (self.config, self._chunk):
            count = min(len(self._prompts), len(earlier._prompts))
            self._prompts[:count] = earlier._prompts[:count]
            self._marks.take(earlier._marks)

    def choose_rope(self, sequences: Sequence[Sequence[int]]) -> None:
        if (rope := self._draft.length_rope) is not None:
            rope.choose_for_texts([len(sequence) for sequence in sequences])

    def start(self, b: int, sequence: Sequence[int]) -> None:
        final = len(sequence) - self._refeed
        if self._state.made_up:
            # What a made-up sequence holds does not matter.
            self._set(b, final, final - min(final, self.config.sinks + self.config.window))
            return
        known = common_prefix(self._prompts[b], sequence, max(0, final))
        whole = max(0, final) // self._chunk * self._chunk
        usable = [n for n, _ in self._marks.copies(b) if n <= known and (n % self._chunk == 0 or n == final)]
        at = max(usable, default=0)
        self._prompts[b] = list(sequence)
        self._marks.restore(b, at)
        if final < 0:
            self._set(b, final, final)  # padded on the left with copies of its first token
        with logged(f"the draft is reading {final - at:,} tokens of a prompt"):
            for end in sorted({whole, final}):
                if end > at:
                    self._read(b, sequence, at, end)
                    self._marks.add(b, end)
                    at = end

    def extend(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        for b, sequence in enumerate(sequences):
            if sequence is not None:
                self._extend(b, sequence, resumed)

    def _extend(self, b: int, sequence: Sequence[int], resumed: bool) -> None:
        final, held = len(sequence) - self._refeed, int(self._held_on_host[b])
        if resumed and held < 0:
            self.start(b, sequence)  # It is no longer padded as it was.
        elif resumed and final > held:
            self._read(b, sequence, held, final)
        dropped = int(self._dropped_on_host[b])
        if len(sequence) - dropped + self._scratch > self.store.slots:
            self._move(b, final, dropped)
        self._held_on_host[b] = final

    def _move(self, b: int, final: int, dropped: int) -> None:
        """Drops all of the window of sequence b but its newest half, which moves to its first slots."""
        sinks, filled = self.config.sinks, final - dropped
        oldest = max(sinks, filled - self.config.window)
        for part in self._slots(b):
            part[:, :, sinks : sinks + filled - oldest] = part[:, :, oldest:filled].clone()
        dropped += oldest - sinks
        self._dropped_on_host[b] = dropped
        self.dropped[b].fill_(dropped)

    def begin_tree(self, state: SequenceState) -> None:
        """Advances the states to the first of the tokens that the next forward processes."""
        # Without a provisional chain the states are those of a new pass.
        committed = (state.length + 1 - self._refeed - self._held).clamp(0, self.drafted.room)
        self._held += committed
        before = state.end + 1 - self._refeed - self._held
        self.drafted.begin(committed, before.clamp(0, state.max_draft_tokens))

    # Copies for later prompts (the protocol ``Continued``)

    def _parts(self, b: int) -> list[Tensor]:
        kept = self.config.sinks + 2 * self.config.window
        slots = [part[:, :, :kept] for part in self._slots(b)]
        return [*slots, *(state[b] for state in self.states.buffers), self._dropped_on_host[b]]

    def copy(self, b: int, length: int) -> list[Tensor]:
        return [part.clone() for part in self._parts(b)]

    def put_back(self, b: int, length: int, copies: Sequence[Tensor]) -> None:
        for own, copy in zip(self._parts(b), copies, strict=True):
            own.copy_(copy)
        self._set(b, length, int(self._dropped_on_host[b]))

    def continues(self, b: int, length: int) -> bool:
        return False

    def clear(self, b: int) -> None:
        self.states.clear(b)
        self._set(b, 0, 0)

    def _slots(self, b: int) -> list[Tensor]:
        """Returns the keys and values of sequence b, ``[layers, H_kv, S, D]``."""
        return [part[:, b] for group in self.store.groups for part in group.parts]

    def _set(self, b: int, held: int, dropped: int) -> None:
        self._held_on_host[b], self._dropped_on_host[b] = held, dropped
        self._held[b].fill_(held)
        self.dropped[b].fill_(dropped)

    def _read(self, b: int, sequence: Sequence[int], start: int, end: int) -> None:
        """Applies the tokens from position ``start`` to ``end`` to the states and the window."""
        tokens = list(sequence[start:end])
        if self._tokens is not None:
            tokens = self._tokens.inputs[torch.tensor(tokens, device="cpu")].tolist()
        cache = _Prompt(self, b, start, start - int(self._dropped_on_host[b]))
        with self._draft.active():
            for first in range(0, len(tokens), self._chunk):
                self._draft.forward(tokens[first : first + self._chunk], cache, last_only=True)
        self._set(b, end, end - cache.filled)


class _Prompt:
    """A ``KVCache`` of one sequence, of whose tokens it keeps the sinks and the newest.

    Args:
        window: the window of the draft.
        sequence: the batch index.
        length: tokens of the sequence that were read.
        filled: KV slots that hold sinks and newest tokens.
    """

    def __init__(self, window: ContinuedWindow, sequence: int, length: int, filled: int) -> None:
        self._store, self._config, self._sequence = window.store, window.config, sequence
        self._length, self.filled = length, filled
        self.recurrent: ChunkPass | None = PromptPass(window.states, sequence)
        self.indexed = None

    def positions(self, count: int) -> Tensor:
        return torch.arange(self._length, self._length + count, device=self._store.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        own, b = self._store.layers[layer], self._sequence
        params, count = own.checked(params), k.shape[2]
        held = [part[b : b + 1, :, : self.filled] for part in own.parts]
        keys, values = (torch.cat([old, new], 2) for old, new in zip(held, (k, v), strict=True))
        sinks, window = self._config.sinks, self._config.window
        outs = []
        # Layers that share another's keys may have been left with the last queries alone.
        skipped = count - q.shape[2]
        for start in range(0, q.shape[2], window):
            stop = min(start + window, q.shape[2])
            end, first = self.filled + skipped + stop, self.filled + skipped + start - window
            seen_k, seen_v = (
                torch.cat([t[:, :, :sinks], t[:, :, first:end]], 2) if first > sinks else t[:, :, :end]
                for t in (keys, values)
            )
            position = seen_k.shape[2] - (stop - start)
            outs.append(windowed_attention(q[:, :, start:stop], seen_k, seen_v, params, position))
        kept = self._kept(count)
        for part, new in zip(own.parts, (keys, values), strict=True):
            dropped = new.shape[2] - kept
            part[b : b + 1, :, : min(sinks, kept)] = new[:, :, : min(sinks, kept)]
            part[b : b + 1, :, sinks:kept] = new[:, :, sinks + dropped :]
        return torch.cat(outs, 2).transpose(1, 2)

    def advance(self, count: int) -> None:
        self._length, self.filled = self._length + count, self._kept(count)

    def _kept(self, count: int) -> int:
        """Returns the KV slots that are filled after ``count`` more tokens: the newest 2 windows fit, of
        more tokens one window is kept.
        """
        sinks, window = self._config.sinks, self._config.window
        filled = self.filled + count
        return filled if filled <= sinks + 2 * window else sinks + window


def _store(draft: HFModel, config: StreamingConfig, scratch: int, state: SequenceState) -> KVStore:
    capacity = config.sinks + 2 * config.window + scratch
    return KVStore(draft.kv_layers, state.batch, capacity, state.device, draft.dtype)
