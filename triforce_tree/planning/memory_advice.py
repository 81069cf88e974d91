"""Why a text does not fit, and what would help on this machine: each advice has been planned with."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.streamed_weights import SLOTS
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_choices import first_fitting
from triforce_tree.planning.memory_layout import MemoryPlan, Workload, gib, on_device, with_options
from triforce_tree.planning.memory_map import GIB, Machine, Sizes

_MOST_ADVICE = 3
# Prompts are shortened by so many tokens.
_STEP = 1024
# Options that memory depends on and that are chosen where they are not given.
_CHOSEN = ("budget", "chunk", "retrieval_weight_bits", "prefill_chunk", "gamma", "tree")


def refusal(
    tried: Sequence[MemoryPlan],
    sizes: Sizes,
    machine: Machine,
    config: HierarchyConfig,
    given: Collection[str],
    workload: Workload,
) -> str:
    """What is needed for what, what there is, and what would help.

    Args:
        tried: plans that do not fit, at least one; the others as
            :func:`triforce_tree.planning.memory_plan.plan` has them.
    """
    what = f"a prompt of {workload.prompt} tokens"
    if workload.batch > 1:
        what = f"a batch of {workload.batch} texts, the longest prompt of {workload.prompt} tokens,"
    near = [made for made in tried if made.fits_device]
    if near:
        least = min(near, key=lambda made: made.host_bytes)
        needs = f"at least {gib(least.host_bytes)} of host memory ({_parts(least.host)})"
        has = f"{machine.host_limit} leaves {gib(machine.host)}"
    else:
        least = min(tried, key=lambda made: made.peak)
        reserve = memory_map.reserve(machine.device)
        uses = f"{_parts(least.device)}, spare {gib(reserve)}"
        needs = f"at least {gib(least.peak + reserve)} of device memory ({uses})"
        has = f"{machine.limit} has {gib(machine.device)}"
    found = _Advice(sizes, machine, config, given, workload).that_helps()
    helps = ", or ".join(found) or "use a smaller model, or a machine with more memory"
    return f"{what} needs {needs}, but {has}; {helps}"


def _parts(uses: dict[str, int]) -> str:
    return ", ".join(f"{name} {gib(size)}" for name, size in uses.items() if name != "free" and size)


class _Advice:
    """What to change so that the same texts, or shorter ones, fit."""

    def __init__(
        self,
        sizes: Sizes,
        machine: Machine,
        config: HierarchyConfig,
        given: Collection[str],
        workload: Workload,
    ) -> None:
        self.sizes, self.machine, self.config = sizes, machine, config
        self.given, self.workload = frozenset(given), workload

    def that_helps(self) -> list[str]:
        """The first few, the least costly first."""
        ways = (
            self._more_device_memory,
            self._more_host_memory,
            self._options_left_out,
            self._weights_on_the_host,
            self._fewer_tokens,
            self._fewer_texts,
            self._fewer_levels,
        )
        found = [advice for way in ways for advice in way()]
        return found[:_MOST_ADVICE] or list(self._shorter_with_weights_on_the_host())

    def _fits(
        self,
        sizes: Sizes | None = None,
        machine: Machine | None = None,
        given: Collection[str] | None = None,
        workload: Workload | None = None,
        **options: object,
    ) -> bool:
        """Whether there is a plan with these in the place of what there is."""
        sizes, machine, workload = sizes or self.sizes, machine or self.machine, workload or self.workload
        config = with_options(self.config, **options) if options else self.config
        given = self.given if given is None else given
        if (
            config.offloads == "auto"
            and not sizes.streamed
            and on_device(sizes, machine, config, workload).fits_device
        ):
            return True
        try:
            return first_fitting(sizes, machine, config, given, workload)[0] is not None
        except ValueError:
            # Level 1 was given bits that do not go with streamed weights.
            return False

    def _more_device_memory(self) -> Iterator[str]:
        machine = self.machine
        size = _least_gib(
            machine.device, machine.most_device, lambda n: self._fits(machine=replace(machine, device=n))
        )
        if size:
            yield f'allow more of the device (gpu_memory="{size}GiB")'

    def _more_host_memory(self) -> Iterator[str]:
        machine = self.machine
        size = _least_gib(
            machine.host, machine.most_host, lambda n: self._fits(machine=replace(machine, host=n))
        )
        if size:
            yield f'allow more host memory (host_memory="{size * machine.ranks}GiB")'

    def _options_left_out(self) -> Iterator[str]:
        names = [name for name in _CHOSEN if name in self.given]
        for some in (*([name] for name in names), names):
            if some and self._fits(given=self.given - set(some)):
                own = self.config.as_options()
                yield "leave out " + " and ".join(f"{name}={own[name]}" for name in some)
                return

    def _weights_on_the_host(self) -> Iterator[str]:
        streamed = self._streamed()
        if streamed is not None and self._fits(sizes=streamed):
            yield "let the weights stay on the host too (offload_weights=True)"

    def _fewer_tokens(self, sizes: Sizes | None = None) -> Iterator[str]:
        workload = self.workload

        def fits(steps: int) -> bool:
            return self._fits(sizes=sizes, workload=replace(workload, prompt=steps * _STEP))

        if steps := _most((workload.prompt - 1) // _STEP, fits):
            yield f"shorten the prompt to at most {steps * _STEP} tokens"

    def _shorter_with_weights_on_the_host(self) -> Iterator[str]:
        streamed = self._streamed()
        if streamed is not None:
            for advice in self._fewer_tokens(streamed):
                yield f"let the weights stay on the host too (offload_weights=True), and {advice}"

    def _streamed(self) -> Sizes | None:
        """The same models with the weights of dense layers on the host; None where they are there."""
        own = self.sizes
        attention = 2 * (own.heads + own.kv_heads) * own.head_dim
        layer = own.hidden * (attention + 3 * own.mlp) * own.itemsize
        streamed = replace(own, streamed=layer * own.layers, slots=SLOTS * layer)
        return streamed if not own.streamed and streamed.streamed < own.weights else None

    def _fewer_texts(self) -> Iterator[str]:
        workload = self.workload
        count = _most(workload.batch - 1, lambda n: self._fits(workload=replace(workload, batch=n)))
        if count:
            yield f"take at most {count} of the {workload.batch} texts at once"

    def _fewer_levels(self) -> Iterator[str]:
        own = self.config.levels
        for levels in (2, 1):
            if (own == "auto" or levels < int(own)) and self._fits(levels=levels):
                yield f"set levels={levels}"
                return


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits; 0 where 1 does not. Less of it never fits worse."""
    low, high = 0, limit
    while low < high:
        midpoint = (low + high + 1) // 2
        low, high = (midpoint, high) if fits(midpoint) else (low, midpoint - 1)
    return low


def _least_gib(above: int, most: int, fits: Callable[[int], bool]) -> int:
    """The fewest whole GiB above ``above`` bytes, up to ``most``, that fit; 0 where none do."""
    low, high = above // GIB + 1, most // GIB
    if high < low or not fits(high * GIB):
        return 0
    while low < high:
        midpoint = (low + high) // 2
        low, high = (low, midpoint) if fits(midpoint * GIB) else (midpoint + 1, high)
    return low
