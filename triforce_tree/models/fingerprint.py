"""Records everything that the forwards of a model depend on, so that a later change is noticed.

It records all attributes of all modules, hooks and replaced forwards with the values that they close over,
the classes of the modules with the functions and numbers that their methods read from globals, the settings,
and the tensors with their addresses. A comparison reads all of that again in one pass and compares
identities, which takes half a millisecond for 450 modules. Values are compared only where an identity
differs.
"""

import logging
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.configuration_utils import PreTrainedConfig

from triforce_tree.runtime.devices import before_queued_work
from triforce_tree.runtime.stage_clock import Mark

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
_SEQUENCES = (list, set, frozenset, deque)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_hooks_always_called",
)
# Attributes of modules that change no result of a forward without gradients.
_WITHOUT_EFFECT = {
    *("training", "gradient_checkpointing", "_gradient_checkpointing_func", "_is_hf_initialized"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_state_dict_hooks"),
    *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_non_persistent_buffers_set", "_compiled_call_impl", "_require_grads_hook", "_require_grads_hooks"),
    *("generation_config", "warnings_issued"),
}
# Attributes that length-dependent rotary embeddings write in their own forwards.
_BY_LENGTH = ("inv_freq", "max_seq_len_cached")
# For objects of these packages only the identity is compared: they may make state when it is first needed.
# Modules, functions and configurations are looked into all the same.
_OPAQUE = {
    *("torch", "transformers", "triforce_tree", "accelerate", "peft"),
    *("logging", "threading", "builtins", "typing", "numpy"),
}
# Classes that all models have in common, whose methods read hundreds of globals.
_COMMON = (
    "builtins",
    "torch.nn.modules.module",
    "transformers.configuration_utils",
    "transformers.distributed",
    "transformers.generation",
    "transformers.integrations.peft",
    "transformers.modeling_utils",
    "transformers.utils",
)
_MOST_DEPTH, _MOST_ITEMS = 8, 4096
# Elements of each weight that are compared, because torch counts no writes through ``.data``.
_SAMPLES = 64
_LOG = logging.getLogger(__name__)


class _Places:
    """Holds containers, closures and tensors that a comparison reads again.

    Objects are compared by identity, tensors also by their addresses and by how often they were written to.
    """

    def __init__(self) -> None:
        # Sequences, and the values of dicts.
        self.filled: list[Collection[Any]] = []
        self.empty: list[Collection[Any]] = []
        self.cells: list[types.CellType] = []
        self.unset_cells: list[types.CellType] = []
        self.functions: list[types.FunctionType] = []
        self.items: list[tuple[Mapping[str, Any], str]] = []
        self.tensors: dict[int, Tensor] = {}

    def add(self, container: Any) -> None:
        if not container:
            self.empty.append(container)
        else:
            self.filled.append(container.values() if isinstance(container, Mapping) else container)

    def note(self) -> None:
        """Records what is in these places now."""
        # Tensors of other libraries may have no memory, and inference tensors have no count of writes.
        self._with_memory = [tensor for tensor in self.tensors.values() if _address(tensor)]
        self._counted = [tensor for tensor in self.tensors.values() if not tensor.is_inference()]
        self._lengths, self._objects = [*map(len, self.filled)], [*self._read()]
        self._versions = [tensor._version for tensor in self._counted]
        self._addresses = [tensor.data_ptr() for tensor in self._with_memory]

    def same(self) -> bool:
        """Returns whether the places have what :meth:`note` has recorded."""
        try:
            return (
                not any(self.empty)
                and [*map(len, self.filled)] == self._lengths
                and all(map(is_, self._read(), self._objects))
                and all(cell == _UNSET for cell in self.unset_cells)
                and [tensor._version for tensor in self._counted] == self._versions
                and [tensor.data_ptr() for tensor in self._with_memory] == self._addresses
            )
        except (RuntimeError, ValueError):
            # Another thread was changing a container, or a variable of a closure was deleted.
            return False

    def _read(self) -> Iterator[Any]:
        functions = [(each.__code__, each.__defaults__, each.__kwdefaults__) for each in self.functions]
        items = [mapping.get(name, _ABSENT) for mapping, name in self.items]
        cells = [cell.cell_contents for cell in self.cells]
        return chain.from_iterable(chain(self.filled, functions, (items, cells)))


class Fingerprint:
    """A record of everything that the forwards of a module depend on now.

    Some values are *state*: values that are kept by hooks, replaced forwards, and lists or dicts of modules.
    A forward may change its own state whenever it runs, for example by counting calls.

    Args:
        root: a model, or any module.
        moves: whether weights may move in memory, as streamed weights do.
        left_out: names of state that is not compared.

    Attributes:
        state: where state is kept.
    """

    def __init__(self, root: nn.Module, moves: bool = False, left_out: Collection[str] = ()) -> None:
        self._root, self._moves, self._left_out = root, moves, frozenset(left_out)
        # Maps a name to its value and to the name of the state that the value is part of ("" for none).
        self._values: dict[str, tuple[Any, str]] = {}
        # Maps the id of each object that was visited to the object.
        self._seen: dict[int, Any] = {}
        # The places that are part of a state, and all other places.
        self.state, self._others = _Places(), _Places()
        self._classes: set[type] = set()
        self._weights: dict[int, Tensor] = {}
        self._module("", root)
        for name in _GLOBAL_HOOKS:
            self._add(name, getattr(torch_module, name), "", 0)
        weights = [] if moves else [*self._weights.values()]
        self._with_memory = [weight for weight in weights if _address(weight)]
        self._counted = [weight for weight in weights if not weight.is_inference()]
        self._views = _views(weights)
        self._addresses = [weight.data_ptr() for weight in self._with_memory]
        self.state.note()
        self._others.note()
        self.note_weights()

    def same(self) -> bool:
        """Returns whether all objects are those that were recorded. Weights may have been changed in
        place.
        """
        addresses = [weight.data_ptr() for weight in self._with_memory]
        return addresses == self._addresses and self._others.same() and self.state.same()

    def same_weights(self, at_once: bool = False) -> bool:
        """Returns whether no weight was changed in place.

        Torch does not count changes by ``weight.data``, so a few elements of each weight are compared, too.

        Args:
            at_once: read them before GPUs do the work that they were given, which may change them later.
        """
        versions = [weight._version for weight in self._counted]
        return versions == self._versions and self._sampled(at_once)() == self._samples

    def begin_reading(self) -> Callable[[], bool]:
        """Begins to read a few elements of each weight behind the present work of devices. Returns a function
        that waits for this, and returns whether they are those that were recorded.
        """
        sampled = self._sampled()
        return lambda: sampled() == self._samples

    def again(self, left_out: Collection[str] = ()) -> "Fingerprint":
        """Returns a new record of the same module.

        Args:
            left_out: names of further state that is not compared.
        """
        return Fingerprint(self._root, self._moves, self._left_out.union(left_out))

    def note_weights(self) -> None:
        """Records the present values of the weights in place of the earlier ones."""
        self._versions, self._samples = [weight._version for weight in self._counted], self._sampled()()

    def differences(self, later: "Fingerprint", left_out: Collection[str]) -> dict[str, str]:
        """Returns the names of values that differ between the records, each with the name of the state it
        belongs to.

        Args:
            left_out: names of state that is not compared.
        """
        mine, theirs, absent = self._values, later._values, (_ABSENT, "")
        found = {}
        for name in mine.keys() | theirs.keys():
            value, state = mine.get(name, absent)
            other, its_state = theirs.get(name, absent)
            if not _equal(value, other) and (state or its_state) not in left_out:
                found[name] = state or its_state
        return found

    def _sampled(self, at_once: bool = False) -> Callable[[], list[bytes]]:
        """Begins to copy a few elements of each weight to the host. Returns a function that waits for this,
        and returns their bytes, by device and dtype.

        Bytes are compared by one thread. Torch would wait for threads that other programs keep from running.
        """
        copies, marks = [], []
        with torch.inference_mode():
            for views in self._views:
                device = views[0].device
                with before_queued_work(device) if at_once else nullcontext():
                    copy = torch.cat(views).view(torch.uint8).to("cpu", non_blocking=True)
                copies.append(copy)
                if not at_once:
                    marks.append(Mark(device))

        def read() -> list[bytes]:
            for mark in marks:
                mark.wait()
            return [copy.numpy().tobytes() for copy in copies]

        return read

    def _note(self, name: str, value: Any, state: str = "") -> None:
        self._values[name] = value, state

    def _places(self, state: str) -> _Places:
        return self.state if state else self._others

    def _module(self, name: str, module: nn.Module) -> None:
        """Records a module, the values of its attributes, and its class."""
        self._seen[id(module)] = module
        self._note(name, module)
        self._class(type(module))
        self._note(f"{name}: class", type(module))
        own = vars(module)
        self._others.add(own)
        by_length = _depends_on_length(getattr(module, "rope_type", None))
        for key, value in own.items():
            if key in _WITHOUT_EFFECT or (by_length and _of_length(key)):
                continue
            if key == "_modules":
                self._others.add(value)
                for child, held in value.items():
                    self._add(f"{name}.{child}".lstrip("."), held, "", 0)
            elif key in ("_parameters", "_buffers"):
                self._others.add(value)
                for child, held in value.items():
                    if not (by_length and _of_length(child)):
                        self._tensor(f"{name}.{child}", held, "", key == "_parameters")
            else:
                self._add(f"{name}.{key}", value, "", 0)

    def _tensor(self, name: str, tensor: Tensor | None, state: str, weight: bool = False) -> None:
        self._note(name, tensor, state)
        if tensor is not None:
            (self._weights if weight else self._places(state).tensors)[id(tensor)] = tensor
            if not self._moves or not weight:
                place = (_address(tensor),) if weight else (_address(tensor), _writes(tensor))
                self._note(f"{name}: memory", place, state)

    def _add(self, name: str, value: Any, state: str, depth: int) -> None:
        """Records a value and, up to some depth, its contents.

        Args:
            state: the name of the state that the value belongs to; empty if it belongs to none.
        """
        if name in self._left_out:
            return
        if isinstance(value, Tensor):
            self._tensor(name, value, state)
            return
        if isinstance(value, tuple) and depth <= _MOST_DEPTH:
            self._note(f"{name}: length", len(value), state)
            for number, held in enumerate(value[:_MOST_ITEMS]):
                self._add(f"{name}[{number}]", held, state, depth + 1)
            return
        self._note(name, value, state)
        if isinstance(value, _PLAIN) or id(value) in self._seen or depth > _MOST_DEPTH:
            return
        if isinstance(value, nn.Module):
            self._module(name, value)
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(name, value, state, depth + 1)
        elif isinstance(value, types.MethodType):
            self._add(f"{name}: function", value.__func__, state, depth + 1)
            self._add(f"{name}: self", value.__self__, state, depth + 1)
        elif isinstance(value, partial):
            for part, held in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._add(f"{name}: {part}", held, state, depth + 1)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (dict, *_SEQUENCES)):
            self._container(name, value, state or ("" if "_forward_" in name else name), depth + 1)
        elif isinstance(value, PreTrainedConfig):
            self._object(name, value, "", depth + 1)
        elif _package(type(value)) not in _OPAQUE:
            self._class(type(value))
            self._object(name, value, state, depth + 1)

    def _container(self, name: str, value: Any, state: str, depth: int) -> None:
        self._places(state).add(value)
        held: Any
        if isinstance(value, set | frozenset):
            self._note(f"{name}: elements", frozenset(value), state)
            return
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        self._note(f"{name}: length", len(pairs), state)
        of_hooks = "_forward_" in name.rpartition(".")[2]
        for key, held in pairs[:_MOST_ITEMS]:
            self._add(f"{name}[{key!r:.80}]", held, "" if of_hooks else state, depth)

    def _object(self, name: str, value: Any, state: str, depth: int) -> None:
        """Records the attributes of an object that is neither a module nor a container."""
        own = getattr(value, "__dict__", None)
        if not isinstance(own, dict):
            return
        settings = isinstance(value, PreTrainedConfig)
        places = self._others if settings else self.state
        if any(f"{name}.{key}" in self._left_out for key in own):
            places.items += [(own, key) for key in own if f"{name}.{key}" not in self._left_out]
        else:
            places.add(own)
        for key, held in list(own.items())[:_MOST_ITEMS]:
            self._add(f"{name}.{key}", held, "" if settings else state or f"{name}.{key}", depth)

    def _function(self, name: str, function: types.FunctionType, state: str, depth: int) -> None:
        """Records a function's code, its defaults, its closure, and the globals that it reads."""
        code = function.__code__
        self._places(state).functions.append(function)
        self._note(f"{name}: code", code, state)
        self._add(f"{name}: defaults", function.__defaults__ or (), state, depth)
        self._add(f"{name}: keyword defaults", tuple((function.__kwdefaults__ or {}).items()), state, depth)
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            at = f"{name}: {key}"
            if at not in self._left_out:
                value = _held(cell)
                (self.state.unset_cells if value is _ABSENT else self.state.cells).append(cell)
                self._add(at, value, state or at, depth)
        if str(function.__globals__.get("__name__")).startswith(_COMMON):
            # It wraps a method, and reads what all models share, such as tables of their classes.
            return
        names = _names_in(code)
        for key in names:
            if key not in function.__globals__:
                continue
            at, value = f"{function.__module__}.{key}", function.__globals__[key]
            if isinstance(value, types.ModuleType):
                # Such as ``nn.functional.silu``: not the module itself, which holds much else.
                own = vars(value)
                found = [n for n in names if n in own and (callable(own[n]) or isinstance(own[n], _PLAIN))]
                for attribute in found:
                    self._others.items.append((own, attribute))
                    self._note(f"{value.__name__}.{attribute}", own[attribute])
            elif at not in self._left_out:
                looks = _looks_into(value, function)
                (self.state if looks else self._others).items.append((function.__globals__, key))
                if looks:
                    self._add(at, value, state or at, depth)
                else:
                    self._note(at, value)

    def _class(self, kind: type) -> None:
        """Records the attributes of a class and of its bases, and the globals that their methods read."""
        for base in kind.__mro__:
            place = str(base.__module__)
            if base in self._classes or place.startswith(_COMMON):
                continue
            self._classes.add(base)
            own, at = vars(base), f"{place}.{base.__qualname__}"
            self._others.add(own)
            for key, value in list(own.items()):
                if isinstance(value, types.FunctionType) and (not key.startswith("__") or key == "__call__"):
                    self._add(f"{at}.{key}", value, "", 1)
                # transformers caches answers about a class in attributes with this ending.
                elif not key.startswith("__") and not key.endswith("_cached_value"):
                    self._note(f"{at}.{key}", value)


_ABSENT = object()
# The cell of a closure variable that is not assigned yet. Only such cells are equal to it.
_UNSET = types.CellType()


def _looks_into(value: Any, function: types.FunctionType) -> bool:
    """Returns whether the contents of a function's global are recorded, in addition to its identity."""
    if isinstance(value, types.FunctionType):
        return value.__module__ == function.__module__ or _package(value) not in _OPAQUE
    if isinstance(value, type):
        return _package(value) not in _OPAQUE
    return isinstance(value, (dict, tuple, Tensor, nn.Module, *_SEQUENCES)) or (
        _package(type(value)) not in _OPAQUE or isinstance(value, partial | types.MethodType)
    )


def _package(named: Any) -> str:
    return str(getattr(named, "__module__", None) or "").partition(".")[0]


@cache
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes that a function's code, and functions inside it, read."""

    def every(code: types.CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from every(constant)

    return tuple(dict.fromkeys(every(code)))


def _depends_on_length(kinds: Any) -> bool:
    """Returns whether a rotary embedding of these kinds, ``rope_type``, chooses its frequencies in its
    forwards.
    """
    found = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind in ("dynamic", "longrope") for kind in found)


def _of_length(name: str) -> bool:
    return name.endswith(_BY_LENGTH) and "original" not in name


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a function that refers to itself, and is not assigned yet
        return _ABSENT


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # tensors of other libraries, without memory of their own
        return 0


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _views(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns views of evenly spaced elements of each weight, by device and dtype.

    Tensors of quantisation libraries and tensors that are not contiguous are left out.
    """
    found: dict[Any, list[Tensor]] = {}
    for weight in weights:
        if type(weight.data) is Tensor and weight.is_contiguous() and weight.device.type != "meta":
            step = max(1, weight.numel() // _SAMPLES)
            view = weight.detach().view(-1)[::step][:_SAMPLES]
            found.setdefault((weight.device, weight.dtype), []).append(view)
    return list(found.values())


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    return type(value) is type(other) and isinstance(value, (*_PLAIN, tuple, frozenset)) and value == other


class Changes:
    """Counts the changes of a module between calls.

    State that changes between two successive calls is changed by the forwards, and is no longer compared.

    Args:
        root, moves: see :class:`Fingerprint`.

    Attributes:
        revision: number of changes that were noticed, except changes of weights in place.
        weights: number of calls before which weights were changed in place.
    """

    def __init__(self, root: nn.Module, moves: bool = False) -> None:
        self._noticed = Fingerprint(root, moves)
        self._changing: set[str] = set()
        self._own_state: set[str] = set()
        self._failed = False
        self.revision = self.weights = 0

    def differs(self) -> bool:
        """Returns whether the module has changed since :meth:`refresh`, without waiting for the work of
        GPUs.
        """
        if self._failed or not self._noticed.same_weights(at_once=True):
            return True
        return not self._noticed.same() and bool(self._differences(self._noticed.again()))

    def begin_reading(self) -> Callable[[], bool]:
        """Does the same as :meth:`Fingerprint.begin_reading` for the state at :meth:`refresh`."""
        return self._noticed.begin_reading()

    def refresh(self, renew: Callable[[], None]) -> None:
        """Notices changes since the last call.

        Args:
            renew: called if there are any, before they are counted. If it raises, the next call calls it
                again.
        """
        if not self._noticed.same_weights():
            self.weights += 1
            self._noticed.note_weights()
        if not self._failed and self._noticed.same():
            return
        now = self._noticed.again(self._own_state)
        if self._failed or (found := self._differences(now)):
            if not self._failed:
                names = sorted(found)
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                _LOG.info("changed since the last call: %s%s", names[0], more)
            self._failed = True
            renew()
            self._failed = False
            self.revision += 1
        self._noticed = now

    def settle(self) -> None:
        """Notes which state the forwards have changed by themselves. Called after forwards."""
        if self._failed or self._noticed.state.same():
            return
        found = set(self._differences(self._noticed.again()).values()) - {""}
        self._own_state |= found & self._changing
        self._changing = found

    def _differences(self, now: Fingerprint) -> dict[str, str]:
        return self._noticed.differences(now, self._own_state)
