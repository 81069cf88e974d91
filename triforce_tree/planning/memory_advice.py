"""The error text when a workload does not fit, with advice that has been checked by planning with it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from triforce_tree.kv.offload.weights.streamed_weights import SLOTS
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_choices import first_fitting, first_on_device
from triforce_tree.planning.memory_layout import MemoryPlan, Task, gib
from triforce_tree.planning.memory_map import GIB, Sizes

_MOST_ADVICE = 3
# Advised prompt lengths are multiples of this.
_PROMPT_STEP = 1024
# Options that decide memory, and are chosen if not given.
_MEMORY_OPTIONS = ("budget", "chunk", "retrieval_weight_bits", "prefill_chunk", "gamma", "tree")


def refusal(tried: Sequence[MemoryPlan], task: Task) -> str:
    """Returns a message with the memory that is needed, by use, the memory that is available, and changes
    that would help.

    Args:
        tried: plans for the task that do not fit, at least one.
    """
    machine, workload = task.machine, task.workload
    what = f"a prompt of {workload.prompt} tokens"
    if workload.batch > 1:
        what = f"a batch of {workload.batch} sequences, the longest prompt of {workload.prompt} tokens,"
    short_of_host = [plan for plan in tried if plan.fits_device]
    if short_of_host:
        least = min(short_of_host, key=lambda plan: plan.host_bytes)
        needs = f"at least {gib(least.host_bytes)} of host memory ({_parts(least.host)})"
        has = f"{machine.host_limit} leaves {gib(machine.host)}"
    else:
        least = min(tried, key=lambda plan: plan.peak)
        reserve = memory_map.reserve(machine.device)
        uses = f"{_parts(least.device)}, reserve {gib(reserve)}"
        needs = f"at least {gib(least.peak + reserve)} of device memory ({uses})"
        has = f"{machine.limit} has {gib(machine.device)}"
    found = _Advice(task).found()
    remedy = ", or ".join(found) or "use a smaller model, or a machine with more memory"
    return f"{what} needs {needs}, but {has}; {remedy}"


def _parts(uses: dict[str, int]) -> str:
    return ", ".join(f"{name} {gib(size)}" for name, size in uses.items() if name != "free" and size)


class _Advice:
    """Finds changes with which the same workload, or a smaller one, fits."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def found(self) -> list[str]:
        """Returns the first few sufficient changes, beginning with the least costly."""
        changes = (
            self._more_device_memory,
            self._more_host_memory,
            self._options_left_out,
            self._weights_on_the_host,
            self._fewer_tokens,
            self._fewer_sequences,
            self._fewer_levels,
        )
        found = [advice for change in changes for advice in change()]
        return found[:_MOST_ADVICE] or list(self._shorter_with_weights_on_the_host())

    def _more_device_memory(self) -> Iterator[str]:
        task, machine = self.task, self.task.machine
        size = _least_gib(
            machine.device,
            machine.most_device,
            lambda n: _fits(replace(task, machine=replace(machine, device=n))),
        )
        if size:
            yield f'allow more of the device (gpu_memory="{size}GiB")'

    def _more_host_memory(self) -> Iterator[str]:
        task, machine = self.task, self.task.machine
        size = _least_gib(
            machine.host, machine.most_host, lambda n: _fits(replace(task, machine=replace(machine, host=n)))
        )
        if size:
            yield f'allow more host memory (host_memory="{size * machine.ranks}GiB")'

    def _options_left_out(self) -> Iterator[str]:
        given = frozenset(self.task.given)
        names = [name for name in _MEMORY_OPTIONS if name in given]
        for omitted in (*([name] for name in names), names):
            if omitted and _fits(replace(self.task, given=given - set(omitted))):
                options = self.task.config.as_options()
                yield "leave out " + " and ".join(f"{name}={options[name]}" for name in omitted)
                return

    def _weights_on_the_host(self) -> Iterator[str]:
        streamed = self._streamed()
        if streamed is not None and _fits(replace(self.task, sizes=streamed)):
            yield "keep the weights on the host too (offload_weights=True)"

    def _fewer_tokens(self, sizes: Sizes | None = None) -> Iterator[str]:
        task = replace(self.task, sizes=sizes or self.task.sizes)

        def fits(steps: int) -> bool:
            return _fits(replace(task, workload=replace(task.workload, prompt=steps * _PROMPT_STEP)))

        if steps := _most((task.workload.prompt - 1) // _PROMPT_STEP, fits):
            yield f"shorten the prompt to at most {steps * _PROMPT_STEP} tokens"

    def _shorter_with_weights_on_the_host(self) -> Iterator[str]:
        streamed = self._streamed()
        if streamed is not None:
            for advice in self._fewer_tokens(streamed):
                yield f"keep the weights on the host too (offload_weights=True), and {advice}"

    def _streamed(self) -> Sizes | None:
        """Returns the models with the weights of their layers in host memory, or None if they already are.

        If a model has experts, only these are moved, and the device slots hold one layer.
        """
        sizes = self.task.sizes
        if sizes.experts is not None and not sizes.streamed:
            return replace(sizes, streamed=sizes.experts.total, slots=sizes.experts.layer_bytes)
        attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
        layer = sizes.hidden * (attention + 3 * sizes.mlp) * sizes.itemsize
        streamed = replace(sizes, streamed=layer * sizes.layers, slots=SLOTS * layer)
        return streamed if not sizes.streamed and streamed.streamed < sizes.weights else None

    def _fewer_sequences(self) -> Iterator[str]:
        task, workload = self.task, self.task.workload
        count = _most(workload.batch - 1, lambda n: _fits(replace(task, workload=replace(workload, batch=n))))
        if count:
            yield f"take at most {count} of the {workload.batch} sequences at once"

    def _fewer_levels(self) -> Iterator[str]:
        current = self.task.config.levels
        for levels in (2, 1):
            if (current == "auto" or levels < int(current)) and _fits(self.task.with_options(levels=levels)):
                yield f"set levels={levels}"
                return


def _fits(task: Task) -> bool:
    try:
        return first_on_device(task) is not None or first_fitting(task)[0] is not None
    except ValueError:
        # retrieval_weight_bits=16 was given, and does not work with streamed weights.
        return False


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to ``limit`` that fits, by bisection; 0 if 1 does not fit."""
    return bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def _least_gib(above: int, most: int, fits: Callable[[int], bool]) -> int:
    """Returns the fewest whole GiB for which ``fits`` is true, more than ``above`` and at most ``most``
    bytes; 0 if there are none.
    """
    low, high = above // GIB + 1, most // GIB
    if high < low or not fits(high * GIB):
        return 0
    return low + bisect_left(range(low, high), True, key=lambda size: fits(size * GIB))
