"""Settings of the hierarchy: frozen dataclasses, checked when they are made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypedDict

from triforce_tree.memory_size import bytes_of
from triforce_tree.option_checks import alone, misplaced_option, one_of, unknown_option, within
from triforce_tree.trees.shapes import Shape, grown_alone, other_shapes, tree_shape
from triforce_tree.trees.topology_files import SUFFIX

# The most tokens that one pass may propose.
MOST_PROPOSED = 1024

NO_OFFLOAD = "an offloaded one has 16; leave out kv_bits, or give offload=False and shorten the prompt"


@dataclass(frozen=True)
class StreamingConfig:
    """The draft model's cache: the first ``sinks`` tokens and a window of the newest ones (StreamingLLM).

    Tokens leave the window in blocks, so it holds between ``window`` and ``2 * window`` tokens.
    """

    sinks: int = 4
    window: int = 256

    def __post_init__(self) -> None:
        within("sinks", self.sinks, 0)
        within("window", self.window, 1)


@dataclass(frozen=True)
class RetrievalConfig:
    """The retrieval cache of level 1 (TriForce, section 4.1).

    ``budget`` is its size in tokens. It holds the first chunk of the text, the ``recent`` newest tokens, and
    the chunks that were retrieved. Its window of recent tokens may grow by half before its start moves.

    ``select_chunks`` is the retrieval policy: a function with the arguments of
    ``triforce_tree.kernels.step.select_chunks``, the default, which selects chunk 0 for each KV head and the
    chunks whose mean keys score highest with the root's query. What a policy needs beside these arguments
    is said by its attributes (:class:`triforce_tree.kv.chunk_policy.ChunkPolicy`).
    """

    budget: int = 1536
    chunk: int = 8
    recent: int = 256
    refresh: int = 1
    key_variance: bool = False
    select_chunks: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "chunk", "recent"):
            within(name, getattr(self, name), 1)
        within("refresh", self.refresh, 0)
        one_of("key_variance", self.key_variance, True, False)
        if self.select_chunks is not None and not callable(self.select_chunks):
            raise ValueError(
                f"select_chunks={self.select_chunks!r} must be a function, or None for the default"
            )
        if self.recent < self.chunk:
            raise ValueError(
                f"recent={self.recent} is smaller than chunk={self.chunk}; use recent>={self.chunk} or a "
                "smaller chunk"
            )
        least = -(-(self.chunk + self.recent) // self.chunk) * self.chunk
        if self.budget < self.chunk + self.recent:
            raise ValueError(
                f"budget={self.budget} is smaller than what is always included, one chunk of "
                f"sinks ({self.chunk}) + recent={self.recent}; use budget>={least} or a smaller recent"
            )
        if self.budget % self.chunk:
            raise ValueError(
                f"budget={self.budget} is not a multiple of chunk={self.chunk}; "
                f"use budget={max(least, self.budget // self.chunk * self.chunk)}"
            )

    def columns(self, head_dim: int) -> int:
        """Returns how many numbers are kept of a chunk's keys: means, and variances with ``key_variance``."""
        return 2 * head_dim if self.key_variance else head_dim

    def chooses(self, forward: int) -> bool:
        """Returns whether a forward of level 1 selects chunks; the first after a level-2 pass is number 0."""
        return forward == 0 or (self.refresh > 0 and forward % self.refresh == 0)


@dataclass(frozen=True)
class HierarchyConfig:
    """The settings of all levels. docs/options.md and docs/advanced.md say what each option does.

    Options that are left at their defaults are chosen for each request: by the device
    (``planning/device_defaults.py``) or, if memory is limited, by the memory plan. Some values mean that a
    choice is made later:

    - ``levels`` "auto": by the length of the prompt, and again before each pass.
    - ``rounds`` None: before each pass, from measured acceptance and stage times.
    - ``other_trees`` None: by the device if ``tree`` is not given, else none.
    - ``runner_ups`` None: on a GPU.
    - ``retrieval_weight_bits`` "auto": when buffers are made, by free memory.
    - ``prefill_chunk`` None: by the device.
    - ``attention_backend`` "auto": by the device (``kernels/attention/backend.py``).
    - ``context_parallel`` "auto": when the models are loaded.
    - ``offload`` None: "auto" if ``gpu_memory`` or ``host_memory`` is given, True if ``offload_weights`` is
      True, else False.
    - ``offload_weights`` "auto": when models that are named by id or folder are loaded.
    - ``host_attention`` "auto": if something is offloaded, and a kernel for this processor exists.
    """

    levels: int | str = "auto"
    gamma: int = 12
    tree: str | Shape = "best-first:6,5,4"
    other_trees: str | Sequence[str | Shape] | None = None
    runner_ups: bool | None = None
    tail_tree: bool = False
    retrieval_weight_bits: int | str = "auto"
    rounds: int | None = None
    prefill_chunk: int | None = None
    kv_bits: int = 16
    exact: bool = False
    attention_backend: str = "auto"
    prefix_cache: bool | int | str = True
    context_parallel: int | str = "auto"
    offload: bool | str | None = None
    gpu_memory: int | str | None = None
    host_memory: int | str | None = None
    offload_weights: bool | str = "auto"
    host_attention: bool | str = "auto"
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)

    def __post_init__(self) -> None:
        within("gamma", self.gamma, 1, MOST_PROPOSED)
        if self.rounds is not None:
            within("rounds", self.rounds, 1, MOST_PROPOSED)
        if self.prefill_chunk is not None:
            within("prefill_chunk", self.prefill_chunk, 1)
        one_of("retrieval_weight_bits", self.retrieval_weight_bits, 16, 8, 4, "auto")
        if not isinstance(self.prefix_cache, bool):
            try:
                bytes_of(self.prefix_cache, "prefix_cache")
            except ValueError as error:
                raise ValueError(f"{error}; or give True or False") from error
        one_of("kv_bits", self.kv_bits, 16, 8)
        one_of("levels", self.levels, 1, 2, 3, "auto")
        one_of("runner_ups", self.runner_ups, True, False, None)
        if isinstance(self.tree, str) and self.tree.endswith(SUFFIX):
            # The name of the content, so that later changes of the file have no effect.
            object.__setattr__(self, "tree", tree_shape(self.tree).name)
        tree_shape(self.tree)
        if self.other_trees is not None:
            object.__setattr__(self, "other_trees", other_shapes(self.other_trees))
        if not isinstance(self.offload, bool) and self.offload not in (None, "auto"):
            raise ValueError(f"offload={self.offload!r} must be True, False or 'auto'")
        for name in ("gpu_memory", "host_memory"):
            size = getattr(self, name)
            if size is None:
                continue
            bytes_of(size, name)
            if self.offload is False:
                bound = f"{name}={size!r} bounds an offloaded cache, and offload=False asks for none"
                raise ValueError(f"{bound}; leave one of them out")
        for name in ("offload_weights", "host_attention"):
            one_of(name, getattr(self, name), True, False, "auto")
        if self.offload_weights is True and self.offload is False:
            raise ValueError(
                "offload_weights=True needs an offloaded cache, and offload=False asks for none; leave one "
                "of them out"
            )
        if self.host_attention is True and not self.offloads:
            raise ValueError(
                "host_attention=True needs KV slots in host memory, but nothing is offloaded; give "
                "offload=True or gpu_memory, or leave it out"
            )
        if self.kv_bits != 16 and self.offloads is True:
            raise ValueError(f"kv_bits={self.kv_bits} is for a cache on the device; {NO_OFFLOAD}")
        if self.context_parallel != "auto":
            within("context_parallel", self.context_parallel, 1)
        for name in ("exact", "tail_tree"):
            one_of(name, getattr(self, name), True, False)
        if not isinstance(self.attention_backend, str):
            raise ValueError(
                f"attention_backend={self.attention_backend!r} must be the name of a backend, or 'auto'"
            )
        offloaded = "an offloaded cache (offload, gpu_memory, host_memory, offload_weights)"
        refused = {offloaded: self.offloads, f"kv_bits={self.kv_bits}": self.kv_bits != 16}
        split = {f"context_parallel={self.context_parallel}": self.text_ranks > 1}
        if self.text_ranks > 1:
            alone(next(iter(split)), {**refused, "select_chunks": self.retrieval.select_chunks})
        if self.exact:
            alone("exact=True", {**refused, **split})

    @cached_property
    def text_ranks(self) -> int:
        """Returns how many ranks split each text by position; 1 while "auto" is undecided, as in one
        process.
        """
        return self.context_parallel if isinstance(self.context_parallel, int) else 1

    @cached_property
    def shapes(self) -> tuple[str | Shape, ...]:
        """Returns the trees that passes may propose, ``tree`` first. If ``rounds`` is given this is ``tree``
        alone.
        """
        if self.rounds is not None or self.levels == 1:
            return self.trees[:1]
        # Passes of two levels verify matched tokens.
        return self.trees if self.levels != 3 else grown_alone(self.trees)

    @cached_property
    def trees(self) -> tuple[str | Shape, ...]:
        """Returns ``tree`` followed by ``other_trees``."""
        return (self.tree, *(self.other_trees or ()))

    @cached_property
    def chooses_levels(self) -> bool:
        """Returns whether decoding may choose passes of two levels in place of three."""
        return self.levels == "auto" and self.rounds is None

    @cached_property
    def offloads(self) -> bool | str:
        """Returns whether the full cache may live in host memory: True, False or "auto"."""
        if self.offload is None:
            bounded = self.gpu_memory is not None or self.host_memory is not None
            return self.offload_weights is True or ("auto" if bounded else False)
        return self.offload

    @cached_property
    def streams(self) -> bool | str:
        """Returns whether weights may live in host memory: True, False or "auto"."""
        return self.offload_weights if self.offloads else False

    @cached_property
    def gpu_bytes(self) -> int | None:
        """Returns the device memory limit in bytes, or None for no limit."""
        return None if self.gpu_memory is None else bytes_of(self.gpu_memory, "gpu_memory")

    @cached_property
    def host_bytes(self) -> int | None:
        """Returns the host memory limit in bytes, or None for all memory except a reserve for the system."""
        return None if self.host_memory is None else bytes_of(self.host_memory, "host_memory")

    @cached_property
    def prefix_bytes(self) -> int:
        """Returns the bytes of host memory for keys and values of earlier texts; 0 for none."""
        return 0 if isinstance(self.prefix_cache, bool) else bytes_of(self.prefix_cache, "prefix_cache")

    @cached_property
    def weight_bits(self) -> int:
        """Returns the bits of level 1's weights; 16 while "auto" is undecided."""
        return self.retrieval_weight_bits if isinstance(self.retrieval_weight_bits, int) else 16

    def levels_for(self, prompt: int, budget: int | None = None) -> int:
        """Returns the levels for a prompt of so many tokens, with this budget or that of the settings."""
        if isinstance(self.levels, int):
            return self.levels
        return 3 if prompt >= 2 * (budget or self.retrieval.budget) else 2

    def as_options(self) -> dict[str, Any]:
        """Returns all options in one flat dict, as :meth:`from_options` takes them."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        streaming, retrieval = own.pop("streaming"), own.pop("retrieval")
        return {**own, **vars(streaming), **vars(retrieval)}

    def changed(self, options: Mapping[str, Any]) -> "HierarchyConfig":
        """Returns these settings with other options; ``context_parallel="auto"`` stays as it was decided."""
        if options.get("context_parallel") == "auto":
            options = {**options, "context_parallel": self.context_parallel}
        return self.from_options(**{**self.as_options(), **options})

    @classmethod
    def from_options(cls, **options: Any) -> "HierarchyConfig":
        """Returns the settings that a flat dict of options describes (:func:`flat_options`).

        Raises:
            ValueError: an unknown or impossible option.
        """
        parts: dict[str, dict[str, Any]] = {"streaming": {}, "retrieval": {}, "own": {}}
        groups = {"streaming": StreamingConfig, "retrieval": RetrievalConfig, "own": cls}
        owners = {
            f.name: group for group, kind in groups.items() for f in fields(kind) if f.name not in groups
        }
        for name, value in options.items():
            if name not in owners:
                raise unknown_option(name, owners)
            parts[owners[name]][name] = value
        return cls(
            streaming=StreamingConfig(**parts["streaming"]),
            retrieval=RetrievalConfig(**parts["retrieval"]),
            **parts["own"],
        )


class Options(TypedDict, total=False):
    """The options of :func:`triforce_tree.load`; :class:`HierarchyConfig` describes their values.

    ``advanced`` holds further options by name; docs/advanced.md lists them.
    """

    levels: int | str
    tree: str | Shape
    budget: int
    kv_bits: int
    retrieval_weight_bits: int | str
    offload: bool | str | None
    gpu_memory: int | str | None
    host_memory: int | str | None
    exact: bool
    advanced: Mapping[str, Any]


SHOWN = tuple(name for name in Options.__annotations__ if name != "advanced")
ADVANCED = tuple(name for name in HierarchyConfig().as_options() if name not in SHOWN)


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of :func:`triforce_tree.load` as one flat dict that includes those in ``advanced``.

    Raises:
        ValueError: an option is unknown; an option is inside ``advanced`` and belongs outside, or the
            reverse; or ``advanced`` is not a mapping.
    """
    advanced = options.get("advanced", {})
    if not isinstance(advanced, Mapping):
        raise ValueError(
            f"advanced={advanced!r} must be a dict of options by name, as in advanced={{'gamma': 8}}"
        )
    shown = {name: value for name, value in options.items() if name != "advanced"}
    for given, here, elsewhere in ((shown, SHOWN, ADVANCED), (advanced, ADVANCED, SHOWN)):
        for name, value in given.items():
            if name in elsewhere:
                raise misplaced_option(name, value, name in ADVANCED)
            if name not in here:
                known = ADVANCED if given is advanced else (*SHOWN, *ADVANCED, "advanced")
                raise unknown_option(name, known, given is advanced)
    return {**shown, **advanced}


def load_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as :func:`triforce_tree.load` takes them, with further options inside
    ``advanced``.
    """
    advanced = {name: value for name, value in options.items() if name in ADVANCED}
    shown = {name: value for name, value in options.items() if name not in ADVANCED}
    return {**shown, "advanced": advanced} if advanced else shown
