"""Every KV backend, through its contract alone: forwards see of it what the model computes from the text.

Memory holds NaN until it is written, rings are short, and trees of tokens, prompts and their order are
random.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.families import prompt_of, tiny
from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.ranks import collectives
from triforce_tree.kv import store as store_module
from triforce_tree.kv.backend import CacheSpec, KVBackend, PromptRun
from triforce_tree.kv.choose import make_backend
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.parallel.backend import SplitBackend
from triforce_tree.kv.parallel.store import SequenceSplit
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import step_model
from triforce_tree.runtime.distributed import Group
from triforce_tree.trees.ancestors import ancestor_mask

pytestmark = pytest.mark.usefixtures("poisoned_empty")

MOST, TREE = 150, 5
SETTINGS: dict[str, Any] = {
    "gamma": 4, "tree": "chain:3", "rounds": 1, "budget": 24, "chunk": 4, "recent": 8, "prefill_chunk": 16,
}  # fmt: skip


@dataclass
class Kind:
    """A kind of backend.

    Attributes:
        family: of the target.
        options: settings.
        how: for ``make_backend``.
        tolerance: of logits.
    """

    family: str = "llama-gqa"
    options: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4


KINDS = {
    "device": Kind(),
    "device, 8 bits": Kind(options={"kv_bits": 8}, tolerance=0.1),
    "device, exact": Kind(options={"exact": True}),
    "device, windows": Kind("mistral-window"),
    "pool": Kind(how={"pool": PoolSize(1500, 1500, 16)}),
    "pool, 8 bits": Kind(options={"kv_bits": 8}, how={"pool": PoolSize(1500, 1500, 16)}, tolerance=0.1),
    "pool, exact": Kind(options={"exact": True}, how={"pool": PoolSize(1500, 1500, 16)}),
    "host": Kind(how={"offload": Offload(piece_bytes=4096)}),
    "host, windows": Kind("gemma2", how={"offload": Offload(piece_bytes=4096)}),
    "host, some resident": Kind(how={"offload": Offload(50_000, 4096)}),
    "host, last layer resident": Kind(how={"offload": Offload(150_000, 4096, last_resident=True)}),
    "ranks": Kind(how={"split": True}),
}


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RING_PAGE", 8)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of a group of one rank."""
    monkeypatch.setattr(collectives, "all_gather_tensor", lambda tensor, group: tensor[None])


class Cache:
    """A backend, and the texts that it should hold."""

    def __init__(self, kind: Kind, batch: int, levels: int = 1) -> None:
        self.kind, self.target = kind, HFModel(tiny(kind.family))
        config = HierarchyConfig.from_options(**{**SETTINGS, "levels": levels, **kind.options})
        self.spec = CacheSpec(self.target, config, batch, MOST, levels)
        how = dict(kind.how)
        if how.pop("split", False):
            rank = SequenceSplit(Group(0, 1, self.target.device), config.retrieval.chunk)
            self.backend: KVBackend = SplitBackend(self.spec, rank)
        else:
            self.backend = make_backend(self.spec, **how)
        self.step = step_model(self.target, False, (), config.exact)
        self.texts: list[list[int]] = [[] for _ in range(batch)]

    def feed(
        self, prompts: Sequence[list[int]], row: int | None = None, run: PromptRun | None = None
    ) -> None:
        """Prefill, reusing what the backend has of whole chunks."""
        backend, first = self.backend, row or 0
        backend.place(prompts, row, None)
        starts = [backend.cached.common(b, p, "chunks") for b, p in enumerate(prompts, first)]
        starts = [n if backend.store.continues(b, n) else 0 for b, n in enumerate(starts, first)]
        with self.target.active():
            backend.prefill(prompts, first, starts, run or PromptRun())
        for b, prompt in enumerate(prompts, first):
            backend.cached.begin(b, prompt)
            self.texts[b] = list(prompt)
        if row is None:
            backend.begin([len(prompt) - 1 for prompt in prompts])

    def forward(self, parents: Sequence[int], tokens: Sequence[Sequence[int]]) -> tuple[Any, Tensor]:
        """A view of a tree of tokens after each text's last one, and its logits ``[B, T, V]``."""
        mask = ancestor_mask(list(parents))
        depths = [int(count) - 1 for count in mask.sum(1)]
        view = self.backend.view(len(parents), mask, depths)
        start = torch.tensor([len(text) - 1 for text in self.texts])
        view.begin(start)
        ids = torch.tensor([[text[-1], *own] for text, own in zip(self.texts, tokens, strict=True)])
        logits = self.step(ids, start[:, None] + torch.tensor(depths), view)
        return view, logits.clone()

    def check(self, draw: random.Random, commits: bool = True) -> None:
        """Logits of a random tree are the model's of each path; then one path is committed."""
        parents = [-1, *(draw.randrange(node) for node in range(1, TREE))]
        tokens = [[draw.randrange(60) for _ in range(TREE - 1)] for _ in self.texts]
        view, logits = self.forward(parents, tokens)
        for b, text in enumerate(self.texts):
            for node in range(TREE):
                path = [*text, *(tokens[b][n - 1] for n in path_to(parents, node)[1:])]
                torch.testing.assert_close(
                    logits[b, node], self.expected(path), atol=self.kind.tolerance, rtol=self.kind.tolerance
                )
        if not commits:
            return
        ends = [draw.randrange(TREE) for _ in self.texts]
        paths = [path_to(parents, end) for end in ends]
        index = torch.full((len(self.texts), TREE), -1)
        for b, path in enumerate(paths):
            index[b, : len(path)] = torch.tensor(path)
        view.move(index)
        # The last token of a path is followed by one whose keys are not in the cache.
        new = [[*(tokens[b][n - 1] for n in path[1:]), draw.randrange(60)] for b, path in enumerate(paths)]
        self.backend.cached.grown(new)
        self.backend.committed([len(path) for path in paths])
        for text, own in zip(self.texts, new, strict=True):
            text += own

    def expected(self, path: list[int]) -> Tensor:
        with torch.no_grad():
            return self.target.model(torch.tensor([path])).logits[0, -1].float()


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to one."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.fixture
def draw() -> random.Random:
    return random.Random(random.randrange(2**32))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_forwards_see_the_text_and_their_own_path(kind: str, draw: random.Random) -> None:
    """Prompts that begin alike are followed by passes that accept something, and by shorter texts."""
    cache, common = Cache(KINDS[kind], 2), prompt_of(40)
    for prompts in ([common + prompt_of(9), common + prompt_of(30)[::-1]], [prompt_of(3), [*common, 5, 6]]):
        cache.feed(prompts)
        for _ in range(6):
            cache.check(draw)
    stored, shared = cache.backend.tokens()
    held = sum(len(text) - 1 for text in cache.texts)
    assert stored + shared == (0 if cache.backend.transfers else held)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_trial_changes_nothing(kind: str, draw: random.Random) -> None:
    """Passes after made-up sequences of any length leave no trace, but for what is computed again."""
    cache = Cache(KINDS[kind], 2)
    cache.feed([prompt_of(40), prompt_of(33)])
    texts = [list(text) for text in cache.texts]
    for length in (MOST - 1, 0, 20):
        with cache.backend.trial(length, cache.spec.scratch + 1):
            cache.texts = [[7] * (length + 1) for _ in texts]
            view, _ = cache.forward([-1, 0, 0], [[1, 2], [3, 4]])
            view.move(torch.tensor([[0, 2, -1], [0, 1, -1]]))
        cache.texts = texts
        cache.backend.begin([len(text) - 1 for text in texts])
        cache.check(draw)
        texts = cache.texts


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_sequences_come_and_go(kind: str, draw: random.Random) -> None:
    """One of three sequences at a time is replaced, at random, while the others go on."""
    cache = Cache(KINDS[kind], 3)
    if not cache.backend.replaces:
        pytest.skip("sequences of this backend end together")
    document = prompt_of(50)

    def prompt() -> list[int]:
        return document[: draw.randrange(51)] + [draw.randrange(60) for _ in range(draw.randrange(1, 9))]

    cache.backend.expect([60] * 3)
    cache.feed([prompt() for _ in range(3)])
    for _ in range(12):
        cache.check(draw)
        row = draw.randrange(3)
        assert cache.backend.has_slots(
            {b: text for b, text in enumerate(cache.texts) if b != row}, [(document, 60)], 3, None
        )
        cache.backend.release([row])
        cache.feed([prompt()], row)
    cache.check(draw)


class _Stop(Exception):
    """Is raised by a callback."""


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_error_at_any_chunk_is_forgotten(kind: str, draw: random.Random) -> None:
    cache, prompts = Cache(KINDS[kind], 2), [prompt_of(50), prompt_of(40)[::-1]]
    cache.feed(prompts)
    for at in range(5):
        left = at

        def stop(tokens: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Stop

        others = [[at, *prompt_of(45), 1], [at, *prompt_of(60)[20:]]]
        with pytest.raises(_Stop):
            cache.feed(others, run=PromptRun(stop))
        cache.backend.cached.clear()
        cache.backend.forget()
        for again in (prompts, others):
            cache.feed(again)
            cache.check(draw)


SAVED = [kind for kind in KINDS if "pool" not in kind and kind != "ranks"]


@pytest.mark.parametrize("kind", SAVED)
@torch.no_grad()
def test_what_is_saved_can_be_stored_anywhere(kind: str, draw: random.Random) -> None:
    """Any backend for the same target and bits can store it."""
    one = Cache(KINDS[kind], 1)
    one.feed([prompt_of(45)])
    for _ in range(3):
        one.check(draw)
    [text] = one.texts
    count = len(text) - 1
    layers = range(len(one.target.kv_layers))
    saved = [one.backend.layer(layer, count) for layer in layers]
    for other in SAVED:
        alike = KINDS[other].family == KINDS[kind].family
        if not alike or ("8 bits" in other) != ("8 bits" in kind):
            continue
        two = Cache(KINDS[other], 1)
        for layer, parts in zip(layers, saved, strict=True):
            slots, least = two.backend.layer_slots(layer, count)
            assert list(slots) == list(parts)
            assert all(least <= part.shape[1] <= count for part in parts.values())
            two.backend.set_layer(layer, count, list(parts.values()))
        two.backend.restored(count)
        two.backend.cached.begin(0, text)
        two.texts = [list(text)]
        two.backend.begin([count])
        for _ in range(3):
            two.check(draw)


@pytest.mark.parametrize(
    ("before", "after"),
    [("device", "device"), ("device", "pool"), ("pool", "pool"), ("device, windows", "device, windows"),
     ("device, 8 bits", "pool, 8 bits"), ("pool, exact", "pool, exact")],
)  # fmt: skip
@torch.no_grad()
def test_an_earlier_backend_is_taken_over(before: str, after: str, draw: random.Random) -> None:
    """A backend for more sequences takes it over, and computes only the rest."""
    one, two = Cache(KINDS[before], 1), Cache(KINDS[after], 2)
    prompts = [prompt_of(50), [*prompt_of(50)[:40], 9, 8]]
    one.feed(prompts[:1])
    pool = KINDS[after].how.get("pool")
    bits = two.spec.config.kv_bits
    assert one.backend.gives(bits, prompts, "chunks", pool)
    assert not one.backend.gives(24 - bits, prompts, "chunks", pool)
    two.backend.take_over(one.backend)
    computed: list[int] = []
    two.feed(prompts, run=PromptRun(computed.append))
    rest = sum(len(prompt) - 1 for prompt in prompts)
    assert sum(computed) <= rest - (48 if "windows" not in after else 0)
    two.check(draw)


@pytest.mark.parametrize("slots", [500, 600, 700])
@torch.no_grad()
def test_a_pool_takes_over_what_it_has_slots_for(slots: int, draw: random.Random) -> None:
    one = Cache(KINDS["device"], 3)
    one.feed([[n, *prompt_of(130)] for n in range(3)])
    two = Cache(Kind(how={"pool": PoolSize(slots, slots, 16)}), 2)
    two.backend.take_over(one.backend)
    two.backend.expect([2, 2])
    computed: list[int] = []
    two.feed([[0, *prompt_of(130)], [5]], run=PromptRun(computed.append))
    assert sum(computed) == 130 % 16
    two.check(draw)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_is_forgotten_is_computed_again(kind: str) -> None:
    cache, prompts = Cache(KINDS[kind], 2), [prompt_of(50), prompt_of(40)]
    for again in (False, True):
        computed: list[int] = []
        cache.feed(prompts, run=PromptRun(computed.append))
        assert sum(computed) == 49 + 39, again
        cache.backend.cached.clear()
        cache.backend.forget()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "windows" not in kind])
@torch.no_grad()
def test_level_1_sees_all_of_a_short_text(kind: str, draw: random.Random) -> None:
    """If the budget holds the whole text, its logits are the target's."""
    settings = {**KINDS[kind].options, "budget": 96, "recent": 32, "chunk": 32}
    made = Kind(KINDS[kind].family, settings, dict(KINDS[kind].how), KINDS[kind].tolerance)
    if "pool" in made.how:
        made.how["pool"] = PoolSize(1600, 1600, 32)
    cache = Cache(made, 2, levels=3)
    cache.feed([prompt_of(98), prompt_of(101)[::-1][:99]])
    view = cache.backend.retrieval
    assert view is not None
    view.update_chunk_means(torch.zeros(2, dtype=torch.int64), 64)
    start = torch.tensor([len(text) - 1 for text in cache.texts])
    nodes = 4  # of a chain of three tokens
    words = torch.tensor([[1], [3], [7], [15]]).expand(2, -1, -1)
    view.refreshing = True
    view.refresh(start, start)
    view.begin(start, words)
    tokens = [[draw.randrange(60) for _ in range(nodes - 1)] for _ in range(2)]
    ids = torch.tensor([[text[-1], *own] for text, own in zip(cache.texts, tokens, strict=True)])
    logits = cache.step(ids, start[:, None] + torch.arange(nodes), view)
    for b, text in enumerate(cache.texts):
        for node in range(nodes):
            path = [*text, *tokens[b][:node]]
            torch.testing.assert_close(
                logits[b, node], cache.expected(path), atol=made.tolerance, rtol=made.tolerance
            )
    # What it wrote is overwritten by the target.
    cache.check(draw)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_what_is_stored(kind: str) -> None:
    backend = Cache(KINDS[kind], 2).backend
    slot = sum(shape.elements for shape in backend.target.kv_shapes) * 4
    most = (backend.pool_slots or 2 * backend.spec.slots) * slot
    assert 0 < backend.bytes <= (2 if backend.transfers else 1.2) * most + 64 * slot
    assert backend.least_prompt == 1
    if not backend.transfers:
        assert backend.transferred_bytes(100, 2) == 0
    elif kind == "host":
        assert backend.transferred_bytes(100, 2) == 2 * 100 * slot
    backend.close()
    assert backend.closed == ("host" in kind)
