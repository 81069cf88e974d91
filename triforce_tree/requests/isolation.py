"""Copies of callables together with everything that their calls may change, so that a call has no effect.

``copy.deepcopy`` does not copy functions, classes and the objects that they refer to. Here functions are
rebuilt over copied closure cells, defaults and global variables, methods over copied instances, and classes
over copied attributes. Objects of libraries that keep no state are shared. Everything else that cannot be
copied is an error, and so is code whose result depends on something that is never copied, such as the time.
"""

import abc
import builtins
import dis
import enum
import io
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Modules whose functions have effects, or answers that do not follow from their arguments.
_IMPURE = frozenset(
    """
    random secrets uuid time datetime os sys io socket ssl threading _thread multiprocessing concurrent queue
    subprocess asyncio signal logging warnings gc weakref ctypes contextvars tempfile shutil shelve sqlite3
    dbm inspect atexit
    """.split()  # noqa: SIM905 - a list would take a line for each name
)
_PURE = (sys.stdlib_module_names - _IMPURE) | {"torch", "numpy", "transformers", "tokenizers", "regex"}
_IMPURE_BUILTINS = frozenset(
    {"print", "open", "input", "exec", "eval", "compile", "globals", "__import__", "breakpoint"}
)
# Methods and functions of torch and numpy that draw random numbers, perhaps in some calls alone.
_RANDOM = frozenset(
    """
    rand randn randint randperm rand_like randn_like randint_like multinomial bernoulli bernoulli_ normal
    normal_ uniform_ exponential_ random_ random cauchy_ geometric_ log_normal_ dropout manual_seed
    """.split()  # noqa: SIM905
)
# Functions that make an object, and methods that change one.
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_CHANGING = frozenset(
    """
    append appendleft add update pop popleft popitem setdefault extend extendleft insert remove discard clear
    sort reverse rotate subtract
    """.split()  # noqa: SIM905
)
# Attributes that Python makes for each new class.
_MADE_WITH_CLASS = frozenset(
    {"__dict__", "__weakref__", "__module__", "__slots__", "__abstractmethods__", "_abc_impl"}
)
_PLAIN = frozenset({int, str, float, bool, bytes, list, dict, tuple, set, frozenset, type(None)})
# Methods by which an object may tell pickle to leave out parts of it.
_COPIED_OTHERWISE = frozenset({"__reduce__", "__reduce_ex__", "__getstate__"})
_MOST_OBJECTS, _MOST_BYTES = 20_000, 1 << 28


class NotIsolatedError(Exception):
    """An object cannot be copied, or calls depend on an object that is not copied; the message names it."""


class Isolated:
    """A copy of a callable that shares nothing that a call may change.

    Args:
        given: the callable.

    Attributes:
        call: the copy.

    Raises:
        NotIsolatedError: such a copy cannot be made.
    """

    def __init__(self, given: Callable[..., Any]) -> None:
        shared: dict[int, Any] = {}
        self.call: Callable[..., Any] = _loaded(_saved(given, shared), shared)
        self._before = self._state()

    def changed(self) -> bool:
        """Returns whether calls have changed any object that the copy refers to."""
        return self._state() != self._before

    def _state(self) -> bytes:
        return _saved(self.call, {})


def _saved(given: Any, shared: dict[int, Any]) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, shared).dump(given)
    except NotIsolatedError:
        raise
    except Exception as error:
        raise NotIsolatedError(f"it holds what cannot be copied ({error})") from error
    return file.getvalue()


def _loaded(saved: bytes, shared: dict[int, Any]) -> Any:
    unpickler = pickle.Unpickler(io.BytesIO(saved))
    vars_of: Any = unpickler
    vars_of.persistent_load = shared.__getitem__
    try:
        return unpickler.load()
    except Exception as error:
        raise NotIsolatedError(f"it holds what cannot be copied ({error})") from error


class _Shared:
    """An object that the copy refers to without copying it."""

    def __init__(self, given: Any) -> None:
        self.given = given


class _Space:
    """The global variables of a module. A copy has those that the copied functions name."""

    def __init__(self, module: str) -> None:
        self.module = module


class _Pickler(pickle.Pickler):
    """Writes the objects to copy. Objects to share get a number in ``shared``."""

    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared_by_id, self._left, self._bytes = shared, _MOST_OBJECTS, _MOST_BYTES
        self._spaces: dict[int, _Space] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) in _PLAIN:
            return None
        if isinstance(obj, _Shared):
            obj = obj.given
        elif not _is_shared(obj):
            return None
        self._shared_by_id[id(obj)] = obj
        return id(obj)

    def reducer_override(self, obj: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise NotIsolatedError("it refers to too many objects")
        if isinstance(obj, Tensor):
            return self._tensor(obj)
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, types.CellType):
            return types.CellType, ()
        if isinstance(obj, types.MethodType):
            return types.MethodType, (obj.__func__, obj.__self__)
        if isinstance(obj, _Space):
            return _new_space, (obj.module,)
        if isinstance(obj, (staticmethod, classmethod)):
            return type(obj), (obj.__func__,)
        if isinstance(obj, property):
            return property, (obj.fget, obj.fset, obj.fdel, obj.__doc__)
        if isinstance(obj, type):
            return self._class(obj)
        if type(obj).__name__ == "_lru_cache_wrapper":
            raise NotIsolatedError(f"it calls {obj.__name__}, which remembers its results")
        if isinstance(obj, PreTrainedModel):
            raise NotIsolatedError(f"it runs a model ({type(obj).__name__})")
        for each in type(obj).__mro__:
            if _COPIED_OTHERWISE & vars(each).keys() and not _is_shared(each):
                raise NotIsolatedError(f"{each.__name__} has a way of its own to be copied")
        return NotImplemented

    def _tensor(self, tensor: Tensor) -> Any:
        self._bytes -= tensor.numel() * tensor.element_size()
        if self._bytes < 0:
            raise NotIsolatedError("it holds tensors that are too large to copy")
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        made = type(tensor) if type(tensor) is torch.nn.Parameter else None
        return _tensor, (data, tensor.dtype, tuple(tensor.shape), str(tensor.device), made)

    def _function(self, function: types.FunctionType) -> Any:
        names = dict.fromkeys(_global_names(function.__code__))
        known = function.__globals__
        _check_code(function.__code__, known)
        key = id(known)
        if key not in self._spaces:
            self._spaces[key] = _Space(str(known.get("__name__")))
        state = (
            {name: known[name] for name in names if name in known},
            [_content(cell) for cell in function.__closure__ or ()],
            function.__defaults__,
            function.__kwdefaults__,
            dict(function.__dict__),
        )
        skeleton = (
            _Shared(function.__code__), self._spaces[key], function.__name__, function.__qualname__,
            list(function.__closure__ or ()),
        )  # fmt: skip
        return _new_function, skeleton, state, None, None, _fill_function

    def _class(self, given: type) -> Any:
        own = vars(given)
        if type(given) not in (type, abc.ABCMeta) or "__init_subclass__" in own:
            raise NotIsolatedError(f"the class {given.__name__} is made in a way of its own")
        # Members that describe a class are shared and not copied, since they are not called while decoding;
        # the ``__repr__`` of a dataclass takes locks.
        described = {"__repr__", "__str__", *(name for name, value in own.items() if not callable(value))}
        attributes = {
            name: _Shared(value) if name.startswith("__") and name in described else value
            for name, value in own.items()
            if name not in _MADE_WITH_CLASS
            and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
        }
        slots = own.get("__slots__")
        skeleton = (_Shared(type(given)), given.__name__, given.__bases__, given.__module__, slots)
        return _new_class, skeleton, attributes, None, None, _fill_class


def _is_shared(obj: Any) -> bool:
    """Returns whether a copy refers to an object without copying it.

    Raises:
        NotIsolatedError: the object belongs to code that is not known to be without state.
    """
    if isinstance(obj, types.ModuleType):
        _check_library(obj.__name__)
        return True
    if isinstance(obj, types.CodeType | PreTrainedTokenizerBase | np.ufunc):
        return True
    if isinstance(obj, types.BuiltinFunctionType):
        owner = obj.__self__
        if owner is None or isinstance(owner, types.ModuleType | type):
            if owner is builtins:
                _check_builtin(obj.__name__)
            elif (module := obj.__module__) is not None:
                _check_library(module)
            return True
        return False
    if isinstance(obj, type):
        if obj.__module__ == "builtins" or issubclass(obj, enum.Enum):
            return True
        return _of_library(obj.__module__)
    if isinstance(obj, types.FunctionType):
        # Our own may only pass on to a user's.
        return obj.__module__ == __name__ or (not _is_ours(obj.__module__) and _of_library(obj.__module__))
    return isinstance(obj, types.MethodDescriptorType | types.WrapperDescriptorType)


def _of_library(module: str | None) -> bool:
    """Returns whether functions and classes of a module are shared. Those of the user's own modules are
    copied.
    """
    root = (module or "").partition(".")[0]
    root = root if root.startswith("__") else root.lstrip("_")
    if root in _IMPURE or _is_ours(module):
        raise NotIsolatedError(f"it uses {root}")
    return root in _PURE


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == __name__.partition(".")[0]


def _check_library(module: str) -> None:
    if not _of_library(module):
        raise NotIsolatedError(f"it uses the module {module}")


def _check_builtin(name: str) -> None:
    if name in _IMPURE_BUILTINS:
        raise NotIsolatedError(f"it calls {name}")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Returns a function's code and the code of all functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of global variables that a function and the functions in it read or write."""
    used = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"}
    found = dict.fromkeys(
        str(each.argval) for own in _codes(code) for each in dis.get_instructions(own) if each.opname in used
    )
    return tuple(found)


def _check_code(code: types.CodeType, known: dict[str, Any]) -> None:
    """Raises NotIsolatedError for code that has effects, or whose results may differ from call to call."""
    for name in _global_names(code):
        if name not in known:
            _check_builtin(name)
    if code.co_name not in _MAKING and (what := _assigned(code, known)) is not None:
        raise NotIsolatedError(f"it may change {what}")
    for own in _codes(code):
        if drawing := _RANDOM.intersection(own.co_names):
            raise NotIsolatedError(f"it uses {min(drawing)}")
        for each in dis.get_instructions(own):
            if each.opname == "IMPORT_NAME":
                _check_library(str(each.argval))


def _assigned(code: types.CodeType, known: dict[str, Any]) -> str | None:
    """Returns the name of something that some calls change and that outlives a call (test calls may not
    reveal it), or None.
    """
    for own in _codes(code):
        before: list[dis.Instruction] = []
        for each in dis.get_instructions(own):
            name, at = str(each.argval), each.positions and each.positions[:1] + each.positions[2:3]
            if each.opname in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"):
                return name
            if each.opname == "STORE_DEREF" and name in own.co_freevars:
                return name
            changes = each.opname in ("LOAD_METHOD", "LOAD_ATTR") and (
                name in _CHANGING or (name.endswith("_") and not name.startswith("_"))
            )
            if changes or each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                # The changed object is found at the beginning of the expression, which may be a local
                # variable or longer.
                begun = [b for b in before if b.positions and b.positions[:1] + b.positions[2:3] == at]
                root = next((str(b.argval) for b in begun if b.opname == "LOAD_GLOBAL"), None)
                if root is not None and isinstance(known.get(root), types.ModuleType):
                    continue
                for part in begun:
                    if part.opname in ("LOAD_ATTR", "LOAD_DEREF", "LOAD_GLOBAL"):
                        return str(part.argval)
            before.append(each)
    return None


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str, made: Any) -> Tensor:
    flat = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.zeros(0, dtype=torch.uint8, device="cpu")
    )
    tensor = flat.view(dtype).view(shape).to(device)
    return made(tensor, requires_grad=False) if made is not None else tensor


def _new_space(module: str) -> dict[str, Any]:
    return {"__builtins__": builtins, "__name__": module}


def _new_function(
    code: types.CodeType, space: dict[str, Any], name: str, qualname: str, cells: list[types.CellType]
) -> types.FunctionType:
    function = types.FunctionType(code, space, name, None, tuple(cells))
    function.__qualname__, function.__module__ = qualname, space["__name__"]
    return function


def _fill_function(function: types.FunctionType, state: Any) -> None:
    used, contents, function.__defaults__, function.__kwdefaults__, attributes = state
    function.__globals__.update(used)
    function.__dict__.update(attributes)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:
            [cell.cell_contents] = content


def _new_class(made: Any, name: str, bases: tuple[type, ...], module: str, slots: Any) -> type:
    # Attributes that the metaclass needs; all others follow.
    body = {"__module__": module} | ({} if slots is None else {"__slots__": slots})
    created: type = made(name, bases, body)
    return created


def _fill_class(created: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(created, name, value)
    if isinstance(created, abc.ABCMeta):
        abc.update_abstractmethods(cast(Any, created))


class RandomNumbers:
    """A context that restores the states of the global random number generators when it ends.

    Args:
        device: the device whose generator is included beside those of the host.

    Attributes:
        drawn: whether numbers were drawn inside; set when the context ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.drawn = device, False

    def __enter__(self) -> "RandomNumbers":
        numpy = np.random.get_state()  # noqa: NPY002 - the generator that a user's code may use
        self._before = random.getstate(), numpy, torch.get_rng_state(), self._of_device()
        return self

    def __exit__(self, *_: object) -> None:
        python, numpy, on_host, on_device = self._before
        now: Any = np.random.get_state()  # noqa: NPY002
        self.drawn = not (
            random.getstate() == python
            and all(np.array_equal(own, before) for own, before in zip(now, numpy, strict=True))
            and torch.equal(torch.get_rng_state(), on_host)
            and torch.equal(self._of_device(), on_device)
        )
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(on_host)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(on_device, self._device)

    def _of_device(self) -> Tensor:
        is_gpu = self._device.type == "cuda"
        return torch.cuda.get_rng_state(self._device) if is_gpu else torch.zeros(0, device="cpu")
