"""Types and calls of Triton's interpreter at less cost: values that are equal at each operation are kept.

Of a test in the interpreter most time goes into making the types of intermediate tensors, whose shapes and
names are computed anew at each operation, and into the rules of type promotion. All of it depends on the
names of element types and on shapes alone.
"""

import math
from types import ModuleType
from typing import Any

# The releases whose functions are those that are replaced here; in others nothing is.
RELEASES = ("3.9.",)


def install(interpreter: ModuleType) -> None:
    """Replace functions of ``triton.language`` by ones with the same results."""
    core = interpreter.tl.core
    _keep_block_types(core)
    _keep_shapes(core)
    _compare_quickly(core)
    _keep_promotions(type(interpreter.interpreter_semantic), core)
    _call_directly(interpreter, core)


def _keep_block_types(core: ModuleType) -> None:
    """Shape, size and name of a block type, by its element type's name and its shape."""
    block, constant, plural = core.block_type, core.constexpr, core.tuple
    made, known = block.__init__, dict[Any, tuple[Any, int, str]]()

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if type(shape) is plural else shape
        sizes = tuple([size.value if type(size) is constant else size for size in values])
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in known:
            made(self, element_ty, shape)  # checks the shape
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    block.__init__ = __init__


def _keep_shapes(core: ModuleType) -> None:
    """A tensor's shape as constants, by its numbers."""
    constant, plural = core.constexpr, core.tuple
    known = dict[tuple[int, ...], tuple[Any, Any]]()

    def __init__(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in known:
            known[shape] = constant(math.prod(shape)), plural([constant(size) for size in shape])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[shape]

    core.tensor.__init__ = __init__


def _compare_quickly(core: ModuleType) -> None:
    dtype, constant = core.dtype, core.constexpr
    unwrap, equal = core._unwrap_if_constexpr, dtype.__eq__
    integers = frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES)
    plain = frozenset((bool, int, float, str, type(None), core.tensor, dtype, core.block_type))

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o if kind in plain else o.value if kind is constant else unwrap(o)

    core._unwrap_if_constexpr = unwrapped  # type: ignore[attr-defined]
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    dtype.is_int = lambda self: self.name in integers


def _keep_promotions(semantic: Any, core: ModuleType) -> None:
    """The type of a result, by the types of two scalars or elements."""
    promoted, known = semantic.computation_type_impl, dict[Any, Any]()

    def computation_type_impl(
        self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div: bool
    ) -> Any:
        if type(a) is not core.dtype or type(b) is not core.dtype:
            return promoted(self, a, a_is_scalar, b, b_is_scalar, div)
        key = a.name, a_is_scalar, b.name, b_is_scalar, div
        if key not in known:
            known[key] = promoted(self, a, a_is_scalar, b, b_is_scalar, div)
        return known[key]

    semantic.computation_type_impl = computation_type_impl


def _call_directly(interpreter: ModuleType, core: ModuleType) -> None:
    """Call functions of the language without the check that they are inside a kernel."""
    semantic = interpreter.interpreter_semantic
    wrapper = core.program_id.__code__

    def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = _patch_attr  # type: ignore[attr-defined]
