"""Buffers, models and captured stages for one batch size, room and configuration."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.growth import Growth
from triforce_tree.cycle.laws import DeviceLaw
from triforce_tree.cycle.model import StepModel
from triforce_tree.cycle.prefill import prefill
from triforce_tree.cycle.rows import KVStore, RetrievalRows
from triforce_tree.cycle.shapes import DeviceShape, device_shape
from triforce_tree.cycle.stages import ChainPass, Grow, MiddlePass, PlainPass, Stage, TreePass, Verifier
from triforce_tree.cycle.texts import Texts
from triforce_tree.few_row import few_row_copy, low_bit_copy
from triforce_tree.graphs import Captured
from triforce_tree.hf_model import HFModel
from triforce_tree.level import Progress
from triforce_tree.sampling import TokenLaw
from triforce_tree.tree_search import parse_shape


@dataclass(frozen=True)
class _Program:
    """The stages of a cycle for one kind of law."""

    law: DeviceLaw
    stages: dict[str, Stage]
    graphs: dict[str, Captured]


class Cycle:
    """Everything that decoding needs on the device, made once and used for many texts.

    Args:
        target: level 2, and level 1.
        draft: level 0; may be None for one level.
        config: what each level does.
        batch: sequences.
        room: most tokens of a text, new ones included.
        levels: 1, 2 or 3.

    Raises:
        ValueError: several levels without a draft, or with a tree that has no fixed size.
    """

    def __init__(
        self,
        target: HFModel,
        draft: HFModel | None,
        config: HierarchyConfig,
        batch: int,
        room: int,
        levels: int,
    ) -> None:
        self.target, self.config, self.batch, self.room, self.levels = target, config, batch, room, levels
        self.device = target.device
        self._prefill_chunk = config.prefill_chunk or (4096 if self.device.type == "cuda" else 1024)
        self._programs: dict[Hashable, _Program] = {}
        compiled = self.device.type == "cuda"
        shape = device_shape(parse_shape(config.tree)) if levels > 1 else None
        if levels > 1 and (draft is None or shape is None):
            raise ValueError(
                "a captured cycle of several levels needs a draft model and a tree of fixed size"
            )
        depth = len(shape.widths) if shape is not None else 0
        nodes = 1 + sum(shape.widths) if shape is not None else 1
        self.reach = config.gamma if levels == 3 else depth
        self.leaves = levels == 3 and config.leaves is not False
        # Rows and tokens behind a text's end that a pass may write, and those of a capture's trial runs.
        behind = 4 * (self.reach + depth + nodes) + 64
        page = config.retrieval.chunk if levels == 3 else 64
        self.store = KVStore(
            target.layers, batch, target.heads, room + behind, self.device, target.dtype, page
        )
        reach, extra, vocabulary = (
            (self.reach, depth + 1, target.vocab_size) if levels == 3 else (0, depth, 0)
        )
        self.texts = Texts(batch, room + behind, reach, max(1, extra), vocabulary, self.device)
        self.full = StepModel(few_row_copy(target.model), compiled)
        self.growth = self._growth(draft, shape, depth, compiled) if draft and shape else None
        self.rows: RetrievalRows | None = None
        if levels == 3:
            self.rows = RetrievalRows(self.store, nodes, config.retrieval, self.reach + 1)
            bits = config.middle_bits
            self.middle = self.full if bits == 16 else StepModel(low_bit_copy(target.model, bits), compiled)
        self.capture_seconds = 0.0

    def _growth(self, draft: HFModel, shape: DeviceShape, depth: int, compiled: bool) -> Growth:
        model = StepModel(few_row_copy(draft.model), compiled)
        reach = self.reach + depth + 2
        return Growth(model, draft.layers, draft.heads, shape, self.config.streaming, self.batch, reach)

    def prepare(self, law: TokenLaw) -> None:
        """Make stages and graphs for this kind of law, or take those that are there, and set it.

        Texts must be fed or rewound after this: a capture's trial runs use their buffers.
        """
        key = DeviceLaw.key(law)
        if key not in self._programs:
            start = time.perf_counter()
            own = DeviceLaw(law, self.device)
            stages = self._stages(own)
            self._programs[key] = _Program(own, stages, self._captured(stages))
            self.capture_seconds += time.perf_counter() - start
        self._program = self._programs[key]
        self._program.law.set(law)

    def _stages(self, law: DeviceLaw) -> dict[str, Stage]:
        texts, vocabulary = self.texts, self.target.vocab_size
        stages: dict[str, Stage] = {}
        if self.growth is not None:
            grow = Grow(self.growth, law, texts)
            stages["grow"] = grow
            nodes = self.growth.nodes
            if self.rows is not None:
                verifier = Verifier(self.middle, law, texts, nodes, vocabulary)
                for name, choosing in (("choose", True), ("middle", False)):
                    stages[name] = MiddlePass(grow, verifier, self.rows, self.leaves, choosing)
                stages["full"] = ChainPass(
                    self.full, self.store, self.rows, law, texts, vocabulary, self.leaves
                )
            else:
                stages["full"] = TreePass(
                    grow, Verifier(self.full, law, texts, nodes, vocabulary), self.store
                )
        stages["plain"] = PlainPass(self.full, self.store, self.rows, law, texts, vocabulary)
        return stages

    def _captured(self, stages: dict[str, Stage]) -> dict[str, Captured]:
        """Capture every stage on texts of a made-up length."""
        result = {}
        for name, stage in stages.items():
            self.texts.length.fill_(self.room - 1)
            self.texts.chain.zero_()
            if self.growth is not None:
                self.growth.dropped.fill_(max(0, self.room - 1 - self.growth.again))
            pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
            result[name] = Captured(stage, self.device, pool)
        return result

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Feed all but each prompt's last token, the first root, to every level."""
        with self.target.active():
            for b, prompt in enumerate(prompts):
                prefill(self.target, self.store, b, list(prompt[:-1]), self._prefill_chunk, progress)
        if self.rows is not None:
            everything = self.rows.means.shape[3]
            self.rows.renew_means(torch.zeros_like(self.texts.length), everything)
        self.rewind(prompts)

    def rewind(self, prompts: Sequence[Sequence[int]]) -> None:
        """Stand at the end of these prompts, or beginnings of texts, whose rows are in the cache."""
        texts = self.texts
        for b, prompt in enumerate(prompts):
            texts.tokens[b, : len(prompt)] = torch.tensor(prompt, device=self.device)
        texts.length.copy_(torch.tensor([len(p) - 1 for p in prompts], device=self.device))
        texts.active.fill_(1)
        texts.broken.zero_()
        texts.chain.zero_()
        texts.gathered.zero_()
        if self.growth is not None:
            self.growth.renew([list(p) for p in prompts])

    def run(self, name: str, generator: torch.Generator) -> None:
        """One stage, with fresh random numbers."""
        for noise in self._program.stages[name].noise:
            noise.draw(generator)
        self._program.graphs[name]()
