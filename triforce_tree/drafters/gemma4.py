"""Gemma 4 assistants: small models that draft from the target's hidden state and its keys and values.

An assistant (``gemma4_assistant`` in transformers) keeps nothing itself. Its layers attend to the slots of
two layers of the target, whose keys and values later layers of their kind (full attention, sliding window)
share. Its input at each node is the target's embedding of the node's token beside a hidden state: for the
root the target's state that gave it, and below the assistant's own. All nodes have the position of the root,
as in transformers' ``SinglePositionMultiTokenCandidateGenerator``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.heads.growth import GrowingDrafter
from triforce_tree.drafters.heads.published import check_equal
from triforce_tree.drafters.token_map import ABSENT
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.attention.reference import tree_attention
from triforce_tree.kv.layer_reader import LayerReader
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.running_forward import ATTENTION, Attend, running_forward
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.shapes import Shape
from triforce_tree.verify.probs import Sampler

_CHECKED = 5  # positions


class Gemma4Assistant(GrowingDrafter):
    """The assistant in a folder, as a drafter of token trees for its Gemma 4.

    Args:
        folder: has ``config.json`` and safetensors, as transformers saves them.
        tree, other_trees: shapes, see :class:`GrowingDrafter`.

    Raises:
        ValueError: the folder holds no assistant that can be loaded, or a tree is no shape.
    """

    reads_slots = True

    def __init__(
        self,
        folder: str | Path,
        tree: str | Shape | None = None,
        other_trees: str | Sequence[str | Shape] | None = None,
    ) -> None:
        super().__init__("gemma4", tree, other_trees)
        self.folder = Path(folder)

    def attach(self, target: HFModel) -> None:
        super().attach(target)
        self.features = (target.layers,)
        self._embed = target.source.get_input_embeddings()
        self._network = _Network(self.folder, target)
        self._sources = self._network.sources(target)
        self.weight_bytes = self._network.weight_bytes
        self._compare(target)

    def read(self, store: KVStore) -> None:
        self.capturable = store.attention.can.captures
        widths = {part.stop - part.start for growth in self._growths for part in growth.frontiers}
        self._readers = {
            width: {
                kind: LayerReader(store, layer, self._network.heads, width)
                for kind, layer in self._sources.items()
            }
            for width in sorted(widths)
        }

    @torch.no_grad()
    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        growth, ends = self._growths[tree.shape], state.end
        tree.tokens[:, 0] = state.newest
        for readers in self._readers.values():
            for reader in readers.values():
                reader.begin(ends)
        tokens, hidden = state.newest[:, None], state.newest_features(self.features[0], 1)
        for depth, nodes in enumerate(growth.frontiers):
            if depth:
                tokens = growth.ids[depth - 1]
                parents = (tree.parents[:, nodes] - growth.frontiers[depth - 1].start).clamp_min(0)
                hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[2]))
            readers = self._readers[nodes.stop - nodes.start]
            logits, hidden = self._network(self._embed(tokens), hidden, ends, readers)
            growth.place(depth, broadcast_tensor(logits.contiguous()), state, tree, sampler)

    @torch.no_grad()
    def _compare(self, target: HFModel) -> None:
        """Compares one forward over random keys and values with transformers' own.

        Raises:
            RuntimeError: they differ by more than rounding.
        """
        network, random = self._network, torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, device="cpu").to(target.device, target.dtype)

        shapes = {kind: target.calls[layer].heads for kind, layer in self._sources.items()}
        slots = {
            kind: (drawn(1, heads.kv, _CHECKED, heads.dim), drawn(1, heads.kv, _CHECKED, heads.value_dim))
            for kind, heads in shapes.items()
        }

        def attend(kind: str, q: Tensor, params: AttentionParams) -> Tensor:
            mask = torch.ones(q.shape[2], _CHECKED, dtype=torch.bool, device=q.device)
            return tree_attention(q, *slots[kind], mask, scale=params.scale)[0].transpose(1, 2)

        embedded = self._embed(torch.ones(1, 1, dtype=torch.int64, device=target.device))
        hidden = drawn(1, 1, network.backbone)
        ends = torch.tensor([_CHECKED], device=target.device)
        ours = network(embedded, hidden, ends, {kind: partial(attend, kind) for kind in slots})
        theirs = network.reference(embedded, hidden, ends, slots)
        kept = ours[0] > ABSENT
        for one, other in ((ours[0][kept], theirs[0][kept]), (ours[1], theirs[1])):
            source = f"the assistant in {str(self.folder)!r} computes numbers"
            check_equal(source, one, other, target.dtype, "transformers' own forward")


class _Network:
    """The assistant's modules beside a target, whose attention calls ours.

    Attributes:
        heads: query heads.
        backbone: hidden size of the target.

    Raises:
        ValueError: it cannot be loaded, or was made for another target.
    """

    def __init__(self, folder: Path, target: HFModel) -> None:
        self._folder = folder
        self._model = model = _loaded(folder, target)
        config = model.config.get_text_config(decoder=True)
        self._kinds: list[str] = config.layer_types
        self.heads: int = config.num_attention_heads
        self.backbone: int = model.config.backbone_hidden_size
        own = target.model.config.get_text_config(decoder=True)
        for what, size, expected in (
            ("hidden size", self.backbone, own.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
        ):
            if size != expected:
                raise ValueError(
                    f"the assistant in {str(folder)!r} was made for a {what} of {size}, and {target.name} "
                    f"has {expected}; give the assistant of this target"
                )
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())
        self._ordered: Any = model.masked_embedding

    def sources(self, target: HFModel) -> dict[str, int]:
        """Returns the target's layer whose keys and values each kind of layer reads."""
        found: dict[str, int] = {
            str(call.module.layer_type): layer
            for layer, call in target.calls.items()
            if getattr(call.module, "store_full_length_kv", False)
        }
        for layer, kind in enumerate(self._kinds):
            module = self._model.model.layers[layer].self_attn
            if kind not in found or target.calls[found[kind]].heads.dim != module.head_dim:
                raise ValueError(
                    f"layer {layer} of the assistant in {str(self._folder)!r} reads {kind} of heads of "
                    f"{module.head_dim} elements, which {target.name} does not share; give the assistant of "
                    "this target"
                )
        return {kind: found[kind] for kind in dict.fromkeys(self._kinds)}

    def __call__(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        readers: Mapping[str, Callable[[Tensor, AttentionParams], Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Returns the logits ``[B, T, V]`` and the next hidden states ``[B, T, H]`` of T nodes.

        Args:
            embedded, hidden: ``[B, T, H]``, embeddings of the target and hidden states.
            positions: int64 ``[B]``, of the roots.
            readers: the attention of each kind of layer: maps queries ``[B, H_q, T, D]`` to
                ``[B, T, H_q, D_v]``.
        """
        model, (batch, count, _) = self._model, embedded.shape

        def by_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
            nodes = q[:, :, 0].unflatten(0, (batch, count)).transpose(1, 2)  # [B, H_q, T, D]
            return readers[self._kinds[layer]](nodes, params).flatten(0, 1)[:, None]

        call: Attend = by_layer
        # The model gets each node as a sequence of one token. The keys and values are those of the target.
        x = torch.cat([embedded, hidden.to(embedded.dtype)], -1).flatten(0, 1)[:, None]
        x = model.pre_projection(x)
        nothing = dict.fromkeys(self._kinds, (x[:, None], x[:, None]))
        with running_forward(call):
            x = model.model(
                inputs_embeds=x, position_ids=positions.repeat_interleave(count)[:, None], use_cache=False,
                attention_mask=dict.fromkeys(self._kinds), shared_kv_states=nothing,
            ).last_hidden_state  # fmt: skip
        x = x.view(batch, count, -1)
        return self._logits(x), model.post_projection(x)

    def _logits(self, x: Tensor) -> Tensor:
        if self._ordered is None:
            logits: Tensor = self._model.lm_head(x)
            return logits
        # Only tokens of the best clusters have logits (``Gemma4AssistantMaskedEmbedder``).
        own = self._ordered
        best = own.centroids(x).topk(own.centroid_intermediate_top_k, -1).indices
        tokens = own.token_ordering.view(own.num_centroids, -1)[best].flatten(2)  # [B, T, tokens]
        known = torch.einsum("bth,btnh->btn", x, self._model.lm_head.weight[tokens])
        absent = x.new_full((*x.shape[:2], own.vocab_size), ABSENT, dtype=torch.float32)
        return absent.scatter(2, tokens, known.float())

    def reference(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, slots: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns what transformers' own forward gives for one node, by its eager attention."""
        self._model.set_attn_implementation("eager")
        try:
            out = self._model(
                inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=positions[:, None],
                shared_kv_states=slots,
            )  # fmt: skip
        finally:
            self._model.set_attn_implementation(ATTENTION)
        return out.logits, out.last_hidden_state


def _loaded(folder: Path, target: HFModel) -> Any:
    """Loads an assistant onto the target's device, in its dtype."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=target.dtype, use_safetensors=True, trust_remote_code=False,
            attn_implementation="eager", output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # third-party code may raise anything on files of unknown origin
        why = " ".join(str(error).split())[:240]
        raise ValueError(
            f"the assistant in {str(folder)!r} cannot be loaded ({type(error).__name__}: {why}); copy or "
            "download it again"
        ) from error
    model, report = loaded
    for what, names in (("lacks", report["missing_keys"]), ("holds unknown", report["unexpected_keys"])):
        if names:
            raise ValueError(
                f"the assistant in {str(folder)!r} {what} weights, such as {sorted(names)[0]}; copy or "
                "download it again"
            )
    model = model.eval().to(target.device)
    model.set_attn_implementation(ATTENTION)
    return model
